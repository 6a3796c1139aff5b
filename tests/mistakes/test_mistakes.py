"""Mistakes that newcomers make, with the complete error message: ``mistakes.toml``, one line each.

A line contains what was typed (Python code, a command, a variable), the error and its full message. After changing messages,
``python -m tests.mistakes.test_mistakes`` writes the current ones; read the difference before committing.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from flashmoe_tools.toml import tomllib

TABLE = Path(__file__).parent / "mistakes.toml"
TOLD: dict[str, dict[str, str]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
KINDS = ("python", "command", "variable")
ROWS = [(kind, typed, message) for kind in KINDS for typed, message in TOLD[kind].items()]
GIVEN = """
import torch, flashmoe
torch.manual_seed(0)
q, k = (torch.randn(2, heads, 16, 32, dtype=torch.bfloat16) for heads in (8, 2))
v = k.clone()
tokens, keys, cu = torch.randn(16, 8, 32), torch.randn(16, 2, 32), torch.tensor([0, 5, 16], dtype=torch.int32)
cache, pages, table = torch.zeros(2, 2, 64, 32), torch.zeros(8, 16, 2, 32), torch.tensor([[0, 9], [1, 2]], dtype=torch.int32)
one, new, used = torch.randn(2, 8, 1, 32), torch.randn(2, 2, 1, 32), torch.tensor([3, 7], dtype=torch.int32)
x, w13, w2, logits = torch.randn(6, 32), torch.randn(4, 128, 32), torch.randn(4, 32, 64), torch.randn(6, 4)
weights, ids = flashmoe.topk_route(logits, 2)
"""


def _told_by_python(code: str) -> str:
    names: dict[str, Any] = {}
    exec(GIVEN, names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            exec(code, names)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _told_by_command(line: str, capsys: Any) -> str:
    """The last line that a command writes to standard error."""
    from flashmoe.__main__ import main
    from flashmoe_build.__main__ import main as build

    program, *words = line.split()
    saved = sys.argv
    sys.argv = [program, *words]
    try:
        status = main(words) if program == "flashmoe" else build()
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.argv = saved
    assert status != 0
    lines = [row for row in capsys.readouterr().err.splitlines() if row.strip()]
    return lines[-1] if lines else ""


def _told_of_variable(setting: str) -> str:
    from flashmoe.variables import check_variables

    name, _, value = setting.partition("=")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            check_variables({name: value})
        except (Warning, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def told(kind: str, typed: str, capsys: Any) -> str:
    """The message, up to the table's ``before`` text, after which there is a list that grows with every suite and option."""
    saved = dict(os.environ)
    try:
        if kind == "python":
            said = _told_by_python(typed)
        else:
            said = _told_of_variable(typed) if kind == "variable" else _told_by_command(typed, capsys)
    finally:
        for name in set(os.environ) - set(saved):
            del os.environ[name]
    before = TOLD["before"].get(typed, "")
    assert before in said
    return said[: said.index(before)] if before else said


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Undoes what a row sets, and resets warnings that are issued once."""
    from flashmoe.attn import layout
    from flashmoe.compat import uninstall_flash_attn

    monkeypatch.setattr(layout, "checks_left", 1)
    monkeypatch.chdir(tmp_path)
    yield
    uninstall_flash_attn()


@pytest.mark.parametrize(("kind", "typed", "message"), ROWS, ids=[typed[:70] for _, typed, _ in ROWS])
def test_a_mistake_is_told_what_it_is(kind: str, typed: str, message: str, capsys: Any) -> None:
    assert told(kind, typed, capsys) == message


def test_nothing_is_twice_and_nothing_is_torchs() -> None:
    every = [typed for _, typed, _ in ROWS]
    messages = [message for _, _, message in ROWS]
    assert len(every) == len(set(every)) >= 97
    assert set(TOLD["before"]) <= set(every)
    assert all(messages)
    untyped = [said for said in messages if said.startswith(("TypeError", "KeyError", "IndexError"))]
    assert all("missing" in said for said in untyped)  # Python itself names a missing argument


def _rewrite() -> None:
    import contextlib
    import io
    import json
    from types import SimpleNamespace

    from flashmoe.attn import layout

    lines = TABLE.read_text(encoding="utf-8").splitlines()
    for kind, typed, message in ROWS:
        layout.checks_left = 1
        written = io.StringIO()
        with contextlib.redirect_stderr(written):
            said = told(kind, typed, SimpleNamespace(readouterr=lambda: SimpleNamespace(err=written.getvalue())))  # noqa: B023
        old, new = (
            " = ".join(json.dumps(word, ensure_ascii=False) for word in (typed, one)) for one in (message, said)
        )
        lines[lines.index(old)] = new
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _rewrite()
