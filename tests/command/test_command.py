"""The command `flashmoe`: its demonstration, its completion, and its name."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe.__main__ import CHECKOUT_ONLY, COMMANDS, all_commands, main
from flashmoe.errors import ExitCode
from flashmoe_tools import demo
from flashmoe_tools.operations import Verification


def test_the_demo_checks_both_sides_and_draws_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(demo.LENGTHS, "cpu", (32, 65))
    monkeypatch.setattr(demo, "WARM_UP_SECONDS", 0.0)
    assert main(["demo", "--device", "cpu", "--seconds", "0"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "causal attention, f32" in out
    assert out.count(" ours ") == out.count(" SDPA ") == 2
    assert "Kernel of the last row: cpu:" in out
    assert "WRONG" not in out


def row(ours: float, theirs: float, *, passed: bool = True) -> demo.Row:
    judged = Verification(passed, 1e-3, 2e-3, None, 1.0, "" if passed else "max error 1")
    return demo.Row(64, "cpu:avx2", dict.fromkeys(demo.SIDES, judged), {"flashmoe": ours, "sdpa": theirs})


def test_the_longer_bar_fills_the_width_and_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = demo.picture(row(1e6, 4e6)).splitlines()
    assert (first.count("█"), second.count("█")) == (demo.BAR // 4, demo.BAR)
    text = demo.conclusion([row(1e6, 4e6), row(1e6, 1e6, passed=False)])
    assert "2.00 (geometric mean; 1.00 to 4.00)" in text
    assert "WRONG at length 64: max error 1" in text
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert demo.block() == "#"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_shell_completes_every_command_and_its_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == ExitCode.OK
    script = capsys.readouterr().out
    for word in (*all_commands(), "head-dim", "foreign", "time-budget"):
        assert word in script
    if shell == "bash":
        question = 'COMP_WORDS=(flashmoe smem --he); COMP_CWORD=2; _shtab_flashmoe; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{question}"], capture_output=True, text=True, check=True)
        assert {*done.stdout.split()} == {"--head-dim", "--help"}


def test_the_page_lists_the_commands() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"| `flashmoe {name}" not in text] == []
    assert [name for name in CHECKOUT_ONLY if f"`{name}`" not in text] == []


def test_the_usage_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    message = capsys.readouterr().out
    assert message.startswith("usage: flashmoe [-h]")
    assert "``" not in message


def test_a_command_of_the_checkout_says_how_to_run_it_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(CHECKOUT_ONLY) <= set(all_commands())
    monkeypatch.setitem(sys.modules, "flashmoe_build.commands", None)
    for name in CHECKOUT_ONLY:
        assert main([name]) == ExitCode.FAILED
        assert capsys.readouterr().err.endswith(f"there: ./nox -s {name}\n")
