"""The gate's results on each side of each limit, and with and without each optional part, using fakes."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_build.gate import bisect, cli, decide, execute, history, pipeline, steps
from flashmoe_build.gate.execute import Outcome
from flashmoe_tools.bench.thresholds import load_thresholds
from flashmoe_tools.report import Check, Report, Verdict, read_report, write_report

# Compilers


@pytest.mark.parametrize(
    ("code", "verdicts", "ignore", "found"),
    [
        (None, "P", (), (Verdict.FAIL, "did not end within 3 s and was stopped")), (1, "", (), (Verdict.FAIL, "exit 1 and no report: tail (all of it: r.log)")),
        (0, "P", (), (Verdict.PASS, "1 PASS")), (1, "P", (), (Verdict.FAIL, "exit 1 although its report says PASS: tail")),
        (1, "W", (), (Verdict.FAIL, "exit 1 although its report says WARN: tail")), (1, "WP", ("c0",), (Verdict.PASS, "1 PASS")),
        (1, "F", (), (Verdict.FAIL, "1 FAIL; c0: f (expected e); next: n")), (0, "PWF", ("c2",), (Verdict.WARN, "1 PASS, 1 WARN; c1: f (expected e); next: n")),
        (0, "S", ("c0",), (None, "nothing was checked")),
    ],
)  # fmt: skip
def test_what_a_program_leaves(
    tmp_path: Path, code: int | None, verdicts: str, ignore: tuple[str, ...], found: tuple[Any, str]
) -> None:
    words = {"P": Verdict.PASS, "W": Verdict.WARN, "F": Verdict.FAIL, "S": Verdict.SKIP}
    if verdicts:
        checks = tuple(Check(f"c{number}", words[one], "f", "e", next_step="n") for number, one in enumerate(verdicts))
        write_report(tmp_path / "r.json", Report("t", checks))
    done = execute._outcome(code, "tail", tmp_path / "r.json", 1.5, 3.2, ignore)
    assert (found[0] or done.verdict, found[1]) == (done.verdict, done.found)
    assert (done.report is not None) is (code is not None and bool(verdicts))
    assert execute._words(Check("a", Verdict.FAIL, "f")) == "a: f"


@pytest.mark.parametrize(
    ("printed", "tail"),
    [
        ("a b", "a b"),
        ("x" * 700, "x" * 600),
        ("head " + "x" * 598 + " y", "y"),
        ("ab " + "x" * 597, "x" * 597),
        ("a " + "x" * 597, "a " + "x" * 597),
    ],
)
def test_the_end_of_what_was_printed(tmp_path: Path, printed: str, tail: str) -> None:
    (tmp_path / "text").write_text(printed)
    code, text = execute._run(["cat", "text"], tmp_path, {"PATH": "/bin:/usr/bin"}, 60.0, tmp_path / "log", print)
    assert (code, text) == (0, tail)
    assert execute._run(["no-such"], tmp_path, {}, 60.0, tmp_path / "log", print) == (
        127,
        "no-such: No such file or directory",
    )


def test_what_a_program_leaves_behind_is_stopped(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 600 & echo $! && exit 3"]
    code, printed = execute._run(command, tmp_path, dict(os.environ), 60.0, tmp_path / "log", print)
    assert code == 3
    status = Path(f"/proc/{printed}/status")

    def has_ended() -> bool:
        return not status.exists() or "State:\tZ" in status.read_text()

    end = time.monotonic() + 30
    while not has_ended() and time.monotonic() < end:
        time.sleep(0.01)
    assert has_ended()


def record_with(**changes: Any) -> dict[str, Any]:
    return {
        "verdict": "PASS",
        "stopped_at": "",
        "known_good": ["a"],
        "commit": "c" * 40,
        "started": "1",
        "ratios": {},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""), ({"verdict": "WARN"}, ""), ({"verdict": "FAIL"}, "failed"), ({"verdict": "FAIL", "stopped_at": "b"}, "stopped at b"),
        ({"verdict": "SKIP"}, "failed"),
        ({"known_good": []}, "without a PASS of the emulation"), ({"commit": ""}, "of an unknown commit"),
        ({"commit": "c+"}, "files differed from the commit (+)"),
    ],
)  # fmt: skip
def test_which_records_are_good(changes: dict[str, Any], why: str) -> None:
    one = record_with(**changes)
    assert history.why_not_good(one) == why
    assert history.last_known_good([one]) is (None if why else one)
    newer = record_with(started="2", commit="d" * 40)
    assert history.last_known_good([newer, one]) is newer
    lines = history.render({"sm90": [record_with(ratios={"a / b": 1.5}), one]}, 1).splitlines()
    good = f"{'c' * 12} of 1"
    assert lines[0] == f"sm90: last known good {good}"
    commit = one["commit"][:12] + ("+" if one["commit"].endswith("+") else "")
    where = "stopped at b" if one["stopped_at"] else "no ratio"
    reason = "" if not why or one["stopped_at"] else f"; not known good: {why}"
    assert lines[1:] == [f"   {commit:<13}  1  {one['verdict']:<4}  {where}{reason}"]
    alone = history.render({"cpu": [one]}, 3).splitlines()
    assert alone[0] == f"cpu: last known good {'none, see the right-hand column' if why else good}"
    assert (alone[1][1] == "*") is not bool(why)


@pytest.mark.parametrize("gpu", [None, {"name": "G", "capability": "9.0"}])
@pytest.mark.parametrize("commit", ["abc", ""])
@pytest.mark.parametrize("library", [None, Path("l.so")])
def test_a_record(monkeypatch: pytest.MonkeyPatch, gpu: Any, commit: str, library: Path | None) -> None:
    monkeypatch.setattr(history, "commit_of", lambda _: commit)
    monkeypatch.setattr(history, "built_commit", lambda _: "built")
    rows = [{"subject": "a", "baseline": "b", "geometric_mean": 1.23456}]
    data = {"gpu": gpu, "stopped_at": "", "known_good": [], "cost": 0.123456, "aggregates": rows}
    found = history.record_of(Report("gate", (), data, {"processor": "P"}, seconds=1.26), Path(), library)
    assert (found["architecture"], found["device"]) == (("sm90", "G") if gpu else ("cpu", "P"))
    assert (found["commit"], found["seconds"], found["cost"]) == (commit or ("built" if library else ""), 1.3, 0.1235)
    assert found["ratios"] == {"a / b": 1.2346}


LIMITS = load_thresholds()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, []), ({"share": 0.70}, []), ({"share": 0.69}, ["bandwidth k"]), ({"share": None}, []), ({"share": 0.69, "device": "cpu"}, []),
        ({"share": 0.69, "flops": 10_000_000}, []), ({"share": 0.69, "peak": None}, []), ({"launch": True}, ["launch k"]),
        ({"launch": True, "timing": "graph"}, []),
        ({"error": 0.01}, []), ({"error": 0.011}, ["error k"]), ({"error": None}, []),
    ],
)  # fmt: skip
def test_warnings_of_the_decision(change: dict[str, Any], names: list[str]) -> None:
    case = {
        "share": 0.9,
        "device": "cuda",
        "flops": 1,
        "peak": 1.0,
        "launch": False,
        "timing": "events",
        "error": 0.0,
        **change,
    }
    summary = {"share_of_copy": case["share"], "launch_bound": case["launch"], "median_us": 3.0}
    cell = {"case": {"key": "k", "dtype": "f16"}, "summaries": {"a": summary}, "flops": case["flops"], "bytes": 1, "timing": case["timing"],
            "verification": {"a": {"max_error": case["error"]}}}  # fmt: skip
    ceilings = None if case["peak"] is None else {"matmul_tflops": {"f16": case["peak"]}, "copy_gbps": 1.0}
    row = {"subject": "a", "baseline": "b", "geometric_mean": 1.5, "worst": 1.0, "worst_case": "w", "cells": 1}
    data = {"aggregates": [row, {**row, "baseline": "c"}, {**row, "subject": "x"}], "baseline": "b", "settings": {"device": case["device"]},
            "contenders": [{"name": "a", "ours": True}, {"name": "gone", "ours": True},
            {"name": "x", "ours": False}], "cells": [cell], "ceilings": ceilings}  # fmt: skip
    speed, *others = decide.decide(Report("bench", (), data), LIMITS)
    assert (speed.name, speed.found) == ("speed of a", "1.50x of b over 1 cases, worst 1.00x (w): go on")
    assert [one.name for one in others] == names
    none = decide.decide(Report("bench", (), {**data, "baseline": "z"}))
    assert [(one.name, one.verdict) for one in none] == [("speed", Verdict.SKIP)]
    for edge, is_left in ((999, True), (1000, False)):  # at the ridge bytes and products take the same time
        assert (
            decide._memory_bound(
                {**cell, "flops": edge},
                {**data, "ceilings": {"matmul_tflops": {"f16": 1.0}, "copy_gbps": 1.0}, "settings": {"device": "cuda"}},
            )
            is is_left
        )


OTHERS = steps.STEPS[0]


@pytest.mark.parametrize("is_checkout", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", ["build", "environment", "smoke"])
def test_why_a_step_is_skipped_and_what_it_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_checkout: bool, given: bool, name: str
) -> None:
    paths = pipeline.Paths(tmp_path, tmp_path, tmp_path / "l.so", tmp_path, is_checkout, given)
    run = pipeline.Pipeline((), paths, 1.0)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    needs = {"build": "checkout", "environment": "", "smoke": "compiler"}[name]
    step = replace(OTHERS, name=name, needs=needs)
    monkeypatch.setattr(pipeline.shutil, "which", lambda _: None)
    why = "only installed files here; this step needs a checkout" if needs and not is_checkout else ""
    why = why or ("no C++ compiler here: install g++, or set CXX" if needs == "compiler" else "")
    why = why or ("built elsewhere: l.so was given" if name == "build" and given else "")
    assert run._why_skipped(step) == why
    monkeypatch.setattr(pipeline.shutil, "which", lambda _: "/bin/g++")
    assert run._why_skipped(replace(step, name="x")) == ("" if is_checkout or not needs else why)
    seen = {"PYTHONUNBUFFERED": "1", "FLASHMOE_TEST_REPORT": str(tmp_path / f"{name}.json")}
    if is_checkout:
        seen["PYTHONPATH"] = f"{tmp_path}:/mine"
        seen |= {"FLASHMOE_LIBRARY": str(tmp_path / "l.so")} if name == "smoke" else {}
    assert run._environment(step) == seen


@pytest.mark.parametrize("name", ["one", steps.PROOF])
@pytest.mark.parametrize("after", ["", "zero"])
def test_a_step_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, after: str) -> None:
    """The proof only passes if something ran; other steps need not. A step after a failure runs if it says so."""
    report = Report("t", (), {})
    ran: list[str] = []

    def ended(command: Any, path: Path, **given: Any) -> Outcome:
        ran.append(path.stem)
        assert given["limit"] <= 60.0
        return Outcome(Verdict.FAIL if path.stem == "zero" else Verdict.PASS, "said", 0.5, report)

    monkeypatch.setattr(pipeline, "execute", ended)
    chosen = [replace(OTHERS, name="zero"), replace(OTHERS, name=name, after_failed=after)]
    run = pipeline.Pipeline(chosen, pipeline.find_paths(tmp_path), 60.0, every=(*chosen, replace(OTHERS, name="last")))
    found = run.run()
    assert ran == ["zero", *([name] if after else [])]
    assert run.stopped_at == "zero"
    row = {check.name: (check.verdict, check.found, check.why) for check in found.checks}[name]
    if not after:
        assert row == (Verdict.SKIP, "not run", "the gate stopped at zero")
    elif name == "one":
        assert row == (Verdict.PASS, "said", "")
        assert {check.next_step for check in found.checks} == {"python -m flashmoe doctor", ""}
    else:
        assert row[:2] == (Verdict.SKIP, "nothing was emulated: no kernel was chosen")
    assert found.data["not_checked"][0] == "last (./nox -s gate)"
    assert found.data["unproven"] == ([steps.PROOF] if name == steps.PROOF else [])
    assert found.data["known_good"] == (["one"] if name == "one" and after else [])
    monkeypatch.setattr(pipeline, "execute", lambda *_, **__: ran.append("again") or Outcome(Verdict.PASS, "said", 0.5))
    pipeline.Pipeline(chosen, pipeline.find_paths(tmp_path), 60.0).run()
    assert ran[-2:] == ["again"] * 2  # also without a failure


@pytest.mark.parametrize("first_bad", ["b" * 40, ""])
def test_the_report_of_a_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first_bad: str) -> None:
    search = bisect.Search(tmp_path, "g", "z", "symbols", tmp_path)
    words = {"g": "good", "m" * 40: "skip", "z": "bad"}
    monkeypatch.setattr(bisect, "commit_named", lambda _, name: name.replace("^", "-parent"))
    monkeypatch.setattr(bisect, "git", lambda *_, **__: "a subject")
    (tmp_path / bisect.one_commit.WORDS).write_text(
        "".join(json.dumps({"commit": one, "word": word}) + "\n" for one, word in words.items())
    )
    (tmp_path / f"{first_bad}.json").write_text("{}")
    report = bisect.report_of(search, first_bad, "log", "then", 1.0)
    (check,) = report.checks
    assert check.why == f"1 commits in between were tested: {'m' * 10} skip"
    found = f"{first_bad} a subject" if first_bad else "not found: too many commits could not be tested"
    assert (check.verdict, check.found, check.next_step) == (
        (Verdict.PASS, found, f"git show {first_bad}") if first_bad else (Verdict.FAIL, found, "")
    )
    assert report.data["last_good"] == (f"{first_bad}-parent" if first_bad else "")
    (tmp_path / bisect.one_commit.WORDS).unlink()
    assert bisect.report_of(search, "", "", "", 0.0).checks[0].why.endswith("tested: none was needed")


@pytest.mark.parametrize(
    ("words", "told"), [(("--budget-minutes", "0"), True), (("--rate", "-1"), True), (("--rate", "0"), False)]
)
def test_options_of_a_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...], told: bool) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    made: list[Any] = []
    run = SimpleNamespace(run=lambda: Report("gate", (Check("c", Verdict.FAIL),), {}), interrupted=False)
    monkeypatch.setattr(cli, "Pipeline", lambda *given: made.append(given) or run)
    monkeypatch.setattr(cli, "render", lambda _: "")
    monkeypatch.setattr(cli, "append_record", lambda *given: made.append(given))
    monkeypatch.setattr(cli, "record_of", lambda *_: "record")
    args = parser.parse_args(["--root", str(tmp_path), *words])
    if told:
        with pytest.raises(ArgumentError, match="a positive time and a rate of at least 0"):
            cli.run(args)
        return
    assert cli.run(args) == ExitCode.FAILED
    assert read_report(tmp_path / "build" / "reports" / "gate.json").kind == "gate"
    run.interrupted, args.json, args.record, args.only = True, tmp_path / "mine.json", tmp_path, "build"
    assert cli.run(args) == ExitCode.INTERRUPTED
    assert args.json.is_file()
    assert (made[-1], len(made[-2][0]), len(made[0][0])) == ((tmp_path, "record"), 1, len(steps.STEPS))
    for width, text in ((160, "a " * 80), (161, "a" * 100 + " " + "b" * 60)):
        assert cli._first(text[:width] + "\nmore") == (text if width == 160 else "a" * 100 + " ...")


@pytest.mark.parametrize("is_named", [True, False])
def test_where_a_search_leaves_its_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_named: bool) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    bisect.add_arguments(parser)
    mine, folder = tmp_path / "mine.json", tmp_path / "reports"
    words = ["g", "z", "--root", str(tmp_path), *(("--json", str(mine), "--reports", str(folder)) if is_named else ())]
    monkeypatch.setattr(bisect, "commit_named", lambda _, name: name)
    for found, verdict, code in (("b", Verdict.PASS, ExitCode.OK), ("", Verdict.PASS, ExitCode.FAILED)):
        tasks: list[bisect.Search] = []
        monkeypatch.setattr(
            bisect, "search", lambda task, found=found, tasks=tasks: tasks.append(task) or (found, "log")
        )
        seconds: list[float] = []
        report = Report("bisect", (Check("c", verdict, "f"),))
        monkeypatch.setattr(
            bisect, "report_of", lambda *given, report=report, seconds=seconds: seconds.append(given[-1]) or report
        )
        assert bisect.run(parser.parse_args(words)) == code
        assert 0.0 <= seconds[0] < 60.0
        default = tmp_path / "build" / "reports" / "bisect"
        assert tasks[0].reports == (folder if is_named else default)
        assert (mine if is_named else default / "bisect.json").is_file()
    for bad in (["--gate", "speed"], ["--gate", "no"]):
        with pytest.raises(
            ArgumentError, match="--gate speed needs --case KEY" if bad[1] == "speed" else "no step 'no'"
        ):
            bisect.run(parser.parse_args([*words, *bad]))
