"""A failure prints the command that repeats it, and that command does."""

import json
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe.errors import ExitCode
from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.cases import Case, matching, suite
from flashmoe_build.emulation.cli import main, parser, selected_cases
from flashmoe_build.emulation.mutation.planted import load_mutants, overlay
from flashmoe_build.emulation.runs import Runs, kind_of, run_cases, summarised
from flashmoe_tools.interpreter import interpreter, runnable
from flashmoe_tools.report import Check, Verdict
from flashmoe_tools.tables import load_tables

CASES = list(suite(load_tables()))


def named_apart() -> list[Case]:
    """Every kernel once, and every problem of an operation once: a command has a word for each."""
    seen: set[object] = set()
    chosen = []
    for case in CASES:
        words = {case.kernel.label, (case.kernel.unit.row.operation, case.problem.name)}
        if words - seen:
            chosen.append(case)
            seen |= words
    return chosen


def test_the_command_names_the_case() -> None:
    for case in named_apart():
        words = shlex.split(case.command())
        assert words[:3] == ["python", "-m", "flashmoe_build.emulation"]
        assert selected_cases(parser().parse_args(words[3:])) == [case]


def test_a_planted_bug_is_found_and_its_command_printed(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = next(mutant for mutant in load_mutants() if mutant.name == "ring-tail-commit")
    options = Options(overlay=overlay(mutant))
    same_name = matching(load_tables(), mutant.kernels[0])  # tiles of several targets: with a ring and without
    cases = [case for kernel in same_name for case in islice(suite(load_tables(), kernel.label), 3)]
    runs = run_cases(cases, options, {})
    failed = [case for case, check in zip(cases, runs.checks, strict=True) if check.verdict is Verdict.FAIL]
    printed = capsys.readouterr().out
    assert failed
    firsts = [alike[0] for alike in runs.failures.values()]
    assert sum(map(len, runs.failures.values())) == len(failed)
    for case in failed:  # the first of each kind in full
        assert (f"FAIL {case.identity}\n" in printed) == (case in firsts)
    command = f"repeat: {interpreter()} {failed[0].command().removeprefix('python ')}\n"
    assert command in printed
    again = selected_cases(parser().parse_args(shlex.split(failed[0].command())[3:]))
    checks_again = run_cases(again, options, {}).checks
    assert checks_again[0].found == next(check.found for check in runs.checks if check.verdict is Verdict.FAIL)


def test_seeds_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = "attention_forward_sm80_f16_d64_m64"
    words = ["--kernel", kernel, "--shape", "b1.h1.kv1.q5.k9.d64", "--mask", "causal", "--seed", "40", "--seeds", "3"]
    assert main([*words, "--json", str(tmp_path / "report.json")]) == ExitCode.OK
    assert "3 runs, 0 failed" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [(check["name"], check["found"]) for check in report["checks"]] == [(kernel, "3 runs without a failure")]


def test_no_kernel_is_not_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kernel", "sm12345"]) == ExitCode.NOTHING_CHECKED
    assert "no kernel matches" in capsys.readouterr().err


def test_many_seeds_keep_every_failure() -> None:
    checks = [Check(case.identity, Verdict.PASS) for case in CASES[:3]]
    checks[1] = Check(CASES[1].identity, Verdict.FAIL, found="race")
    short = summarised(CASES[:3], checks)
    assert [check.verdict for check in short] == [Verdict.PASS, Verdict.FAIL]
    assert short[0].found == "2 runs without a failure"
    assert short[1].name == CASES[1].identity


def outcome(kind: str = "", line: int = 7) -> Any:
    """The outcome of a run, as far as a summary looks at it."""
    failure = SimpleNamespace(kind=kind, file="tile.cuh", line=line) if kind else None
    report = SimpleNamespace(failure=failure, statistics={}, seconds=0.0)
    return SimpleNamespace(passed=not kind, report=report, explain=lambda: f"{kind} whole")


def test_failures_of_one_cause_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(CASES[:70])
    for index, case in enumerate(CASES[:65]):
        runs.add(case, outcome("race", 8 if index == 64 else 7) if index > 4 else outcome())
    printed = capsys.readouterr().out
    assert printed.count("race whole") == 2  # the second is at another line
    assert printed.count("repeat: ") == 2
    one, other = runs.summary()
    assert one.startswith("59 x race at tile.cuh:7: ")
    assert " and " in one
    assert other.startswith("1 x race at tile.cuh:8")
    assert kind_of(outcome("deadlock", 0)) == "deadlock"
    assert len(runs.checks) == 65
    assert CASES[69].kernel.label in {case.kernel.label for case in runs.cases}
    assert not {case.kernel.label for case in runs.passed_kernels} & {case.kernel.label for case in CASES[5:70]}


def test_an_interruption_leaves_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def run(case: Case, *_: object, **__: object) -> object:
        calls.append(case)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return outcome()

    monkeypatch.setattr("flashmoe_build.emulation.runs.run_case", run)
    words = ["--kernel", "attention_forward_sm80_f16_d64_m64", "--json", str(tmp_path / "report.json")]
    assert main(words) == ExitCode.INTERRUPTED
    assert "2 runs of 24: interrupted, 0 failed" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["verdict"] == "FAIL"
    assert report["checks"][-1]["found"].startswith("22 of 24 runs")


def test_what_the_time_did_not_allow_is_said(tmp_path: Path) -> None:
    words = ["--kernel", "attention_forward_sm80_f16_d64_m64", "--quick", "--seconds", "0"]
    assert main([*words, "--json", str(tmp_path / "report.json")]) == ExitCode.OK
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [check["verdict"] for check in report["checks"]] == ["WARN"]
    assert "1 kernels not at all: the time limit was reached" in report["checks"][0]["found"]


def test_a_printed_command_names_an_interpreter_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(Path(sys.prefix).parent)
    words = shlex.split(runnable("next: python -m flashmoe doctor; ./nox -s x").split("; ")[0].removeprefix("next: "))
    assert words[1:] == ["-m", "flashmoe", "doctor"]
    assert not Path(words[0]).is_absolute()
    done = subprocess.run([words[0], "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == sys.prefix
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert runnable("python -m flashmoe smem") != "python -m flashmoe smem"  # another environment's
