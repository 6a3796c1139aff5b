"""The rules that C++ refers to: each has a message that says what to do, using the values from C++."""

import re
import string
from pathlib import Path

import pytest

from flashmoe.rules import _all_rules

ROOT = Path(__file__).resolve().parents[2]
RULES = _all_rules()
_BROKEN = re.compile(r'violate\(\s*"(?P<rule>[\w.]+)"(?P<values>.*?)\);', re.DOTALL)


@pytest.mark.parametrize("name", RULES)
def test_a_message_says_what_was_found_and_what_to_do(name: str) -> None:
    found, _, step = re.sub(r"\{.*?\}", "X", RULES[name].message).partition(";")
    if not step:  # "...: do this"
        found, _, step = found.rpartition(":")
    assert found.strip()
    assert len(step.split()) > 1, "no next step"
    assert not RULES[name].message.endswith((" ", ";", ":"))


def test_every_rule_that_cpp_names_has_a_message_of_its_values() -> None:
    calls = [
        match
        for path in sorted((ROOT / "csrc").rglob("*"))
        if path.suffix in (".cpp", ".h")
        for match in _BROKEN.finditer(path.read_text(encoding="utf-8"))
    ]
    assert len(calls) > 100
    for call in calls:
        message = RULES[call["rule"]].message
        wanted = {field.split(":")[0].split("!")[0] for _, field, _, _ in string.Formatter().parse(message) if field}
        given = set(re.findall(r'\{"(\w+)",', call["values"]))
        assert wanted <= given or not given, f"{call['rule']}: {sorted(wanted - given)} are not given"
