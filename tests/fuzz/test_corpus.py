"""Regression tests for fuzzing: every input of corpus.json, and a few new ones for each reader."""

import json
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.targets import TARGETS

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry["target"])
def test_what_was_found_stays_found(entry: dict) -> None:  # type: ignore[type-arg]
    value = entry["value"] if "value" in entry else entry["text"] * entry["times"]
    TARGETS[entry["target"]].check(value)


@pytest.mark.parametrize("name", ["elf", "index"])
def test_a_run_ends_in_time_with_a_count(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0", "--only", name]) == 0
    assert f"{name}: " in capsys.readouterr().out
