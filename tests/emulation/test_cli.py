"""A failure prints the command that repeats it, and that command does."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from flashmoe.errors import ExitCode
from flashmoe.tools.report import Check, Verdict
from flashmoe.tools.tables import load_tables
from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.cases import Case, suite
from flashmoe_build.emulation.cli import main, parser, run_cases, selected_cases, summarised
from flashmoe_build.emulation.mutants import load_mutants, overlay

CASES = list(suite(load_tables()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.identity)
def test_the_command_names_the_case(case: Case) -> None:
    words = shlex.split(case.command())
    assert words[:3] == ["python", "-m", "flashmoe_build.emulation"]
    assert selected_cases(parser().parse_args(words[3:])) == [case]


def test_a_planted_bug_is_found_and_its_command_printed(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = next(mutant for mutant in load_mutants() if mutant.name == "ring-wait-late")
    options = Options(overlay=overlay(mutant))
    cases = [case for case in suite(load_tables(), mutant.kernels[0]) if not case.problem.huge][:3]
    checks, _ = run_cases(cases, options, {})
    failed = [case for case, check in zip(cases, checks, strict=True) if check.verdict is Verdict.FAIL]
    printed = capsys.readouterr().out
    assert failed
    for case in failed:
        assert f"FAIL {case.identity}\n" in printed
        assert f"repeat: {case.command()}\n" in printed
    again = selected_cases(parser().parse_args(shlex.split(failed[0].command())[3:]))
    checks_again, _ = run_cases(again, options, {})
    assert checks_again[0].found == next(check.found for check in checks if check.verdict is Verdict.FAIL)


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
