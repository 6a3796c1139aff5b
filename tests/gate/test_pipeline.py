"""The gate: what stops it, what it reports, what it costs. Steps here are tiny programs that write reports."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe.__main__ import main
from flashmoe._version import WHEEL_PREFIX
from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_build.gate import cli, history
from flashmoe_build.gate.decide import decide
from flashmoe_build.gate.execute import Outcome, execute
from flashmoe_build.gate.history import append_record, last_known_good, read_history, record_of, render
from flashmoe_build.gate.pipeline import Pipeline, find_paths, without_runs
from flashmoe_build.gate.steps import STEPS, Step, select
from flashmoe_tools.report import Check, Report, ReportError, Verdict, read_report, write_report
from tests.bench.synthetic import synthetic_report

WRITE = """
import json, sys
verdict, code = sys.argv[2], int(sys.argv[3])
check = {"name": "it", "verdict": verdict, "found": "found it", "expected": "", "why": "", "next_step": "do this"}
report = {"schema": "flashmoe.report/1", "kind": "t", "checks": [check], "data": {"runs": 1}, "environment": {},
          "command": [], "started": "", "seconds": 0.0}
json.dump(report, open(sys.argv[1], "w"))
sys.exit(code)
"""


def step(name: str, verdict: str = "PASS", code: int = 0, **others: Any) -> Step:
    """A step that writes a report with this verdict and ends with this exit code."""
    command = ("{python}", "{root}/write.py", "{report}", verdict, str(code))
    return Step(name, others.pop("command", command), why=f"why {name}", next_step=f"mend {name}", **others)


def python(code: str, **others: Any) -> Step:
    return step("one", command=("{python}", "-c", code), **others)


def pipeline(folder: Path, *steps: Step, seconds: float = 60.0, rate: float = 3600.0, **others: Any) -> Pipeline:
    (folder / "write.py").write_text(WRITE)
    return Pipeline(steps, find_paths(folder), seconds, rate, **{"every": steps, **others})


def run(folder: Path, *steps: Step, **others: Any) -> Report:
    return pipeline(folder, *steps, **others).run()


def verdicts(report: Report) -> dict[str, str]:
    return {check.name: check.verdict.value for check in report.checks}


def test_a_library_built_elsewhere_skips_the_build(tmp_path: Path) -> None:
    library = tmp_path / "wheel" / "libflashmoe.so"
    library.parent.mkdir()
    library.touch()
    given = pipeline(tmp_path, step("build", "FAIL", 1), step("next"))
    given.paths = find_paths(tmp_path, library)
    assert (given.paths.library, given.paths.given, find_paths(tmp_path).given) == (library, True, False)
    report = given.run()
    assert verdicts(report) == {"build": "SKIP", "next": "PASS"}
    assert "built elsewhere" in report.checks[0].found
    assert record_of(report, tmp_path, library)["commit"] == ""
    for dirty, commit in ((False, "0123abcd"), (True, "0123abcd+")):
        (library.parent / "provenance.json").write_text(json.dumps({"commit": "0123abcd", "dirty": dirty}))
        assert record_of(report, tmp_path, library)["commit"] == commit


def test_the_environment_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout its package comes first, and its library, which the steps before it is built do not get."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    made = pipeline(tmp_path)
    message = {name: made._environment(step(name)) for name in ("build", "environment", "import")}
    assert all(not {"PYTHONPATH", "FLASHMOE_LIBRARY"} & words.keys() for words in message.values())
    made.paths = replace(made.paths, checkout=True)
    message = {name: made._environment(step(name)) for name in ("build", "environment", "import")}
    assert all(words["PYTHONPATH"] == str(tmp_path) for words in message.values())
    assert [words.get("FLASHMOE_LIBRARY") for words in message.values()] == [None, None, str(made.paths.library)]
    assert {words["FLASHMOE_TEST_REPORT"] for words in message.values()} == {
        str(made.paths.reports / f"{name}.json") for name in message
    }


def test_a_build_that_was_not_given_runs(tmp_path: Path) -> None:
    assert verdicts(run(tmp_path, step("build"))) == {"build": "PASS"}


def test_a_warning_is_no_step_that_was_not_checked(tmp_path: Path) -> None:
    report = run(tmp_path, step("one"), step("two", "WARN"), step("three", needs="checkout"))
    message = [words.partition(":")[0] for words in report.data["not_checked"]]
    assert message == ["three", "any kernel on a GPU"]


def test_steps_that_pass(tmp_path: Path) -> None:
    report = run(tmp_path, step("one"), step("two", "WARN"))
    assert verdicts(report) == {"one": "PASS", "two": "WARN"}
    assert report.exit_code is ExitCode.OK
    assert report.data["known_good"] == ["one", "two"]
    assert report.data["cost"] == pytest.approx(report.seconds, rel=0.2)  # 3600 per hour is 1 per second
    assert all(row["cost"] == pytest.approx(row["seconds"]) for row in report.data["steps"])


def test_it_stops_at_the_first_failure_and_says_what_to_do(tmp_path: Path) -> None:
    report = run(tmp_path, step("one"), step("two", "FAIL", 1), step("three"))
    assert verdicts(report) == {"one": "PASS", "two": "FAIL", "three": "SKIP"}
    assert report.data["stopped_at"] == "two"
    failed, after = report.checks[1:3]
    assert (after.found, after.why) == ("not run", "the gate stopped at two")
    assert "found it" in failed.found
    assert (failed.why, failed.next_step) == ("why two", "mend two")
    assert report.exit_code is ExitCode.FAILED
    assert not (tmp_path / "build" / "reports" / "gate" / "three.json").exists()


def test_a_step_runs_after_a_failure_only_where_it_says_so(tmp_path: Path) -> None:
    report = run(tmp_path, step("one", "FAIL", 1), step("two"), step("look", after_failed="one"))
    assert verdicts(report) == {"one": "FAIL", "two": "SKIP", "look": "PASS"}
    assert report.verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (python("raise SystemExit(0)"), "exit 0 and no report"),
        (python("raise SystemExit('the words')"), "the words"),
        (step("one", command=("/no/such/program",)), "No such file"),
        (step("one", "PASS", 9), "exit 9 although its report says PASS"),
        (step("one", "SKIP", 0), "1 SKIP"),
    ],
)
def test_what_proves_nothing_fails(tmp_path: Path, one: Step, words: str) -> None:
    report = run(tmp_path, one)
    assert report.verdict is Verdict.FAIL
    assert words in report.checks[0].found


def test_an_old_report_is_not_believed(tmp_path: Path) -> None:
    assert run(tmp_path, step("one")).verdict is Verdict.PASS
    assert "no report" in run(tmp_path, python("pass")).checks[0].found


def test_a_build_that_fails_leaves_the_report_of_the_last_one(tmp_path: Path) -> None:
    """Profile and smem can then still find the registers of the last build."""
    execute_in(tmp_path, "import json, shutil, sys; shutil.copy('kept.json', 'build.json')")
    before = (tmp_path / "build.json").read_text()
    failed = execute_in(tmp_path, "raise SystemExit('a template error')")
    assert failed.verdict is Verdict.FAIL
    assert "no report: a template error" in failed.found
    assert (tmp_path / "build.json").read_text() == before
    assert not (tmp_path / "build.old.json").exists()


def execute_in(folder: Path, code: str, note: Any = str) -> Outcome:
    write_report(folder / "kept.json", Report("build", (Check("one", Verdict.PASS, ""),)))
    words = [sys.executable, "-c", code]
    return execute(words, folder / "build.json", folder=folder, environment={}, limit=30.0, note=note)


def test_a_long_step_shows_what_its_program_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoe_build.gate.execute.LOOK_SECONDS", 0.1)
    seen: list[str] = []
    execute_in(
        tmp_path, "import time; print('device code 3/217 4s', flush=True); time.sleep(1); print('no')", seen.append
    )
    assert seen[0] == "device code 3/217 4s"
    assert set(seen) <= {"device code 3/217 4s", "no"}  # a busy machine may only see the last line


def test_without_a_compiler_only_what_needs_one_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = run(tmp_path, step("one"), step("two", needs="compiler"), step("three"))
    assert verdicts(report) == {"one": "PASS", "two": "SKIP", "three": "PASS"}


def test_a_table_cell_ends_with_a_word(tmp_path: Path) -> None:
    report = run(tmp_path, python(f"raise SystemExit('{'word ' * 60}')"))
    (row,) = [line for line in cli.render(report).splitlines() if line.startswith("one ")]
    assert row.endswith(" word ...")


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    begin = time.monotonic()
    found = execute([sys.executable, "-c", child], tmp_path / "r.json", folder=tmp_path, environment={}, limit=1.0)
    assert found.verdict is Verdict.FAIL
    assert "did not end within 1 s" in found.found
    assert 1.0 <= found.seconds <= time.monotonic() - begin < 30.0


@pytest.mark.parametrize(("limit", "budget"), [(0.5, 3000.0), (3000.0, 0.5)], ids=["its own", "the whole"])
def test_a_step_is_ended_at_its_limit(tmp_path: Path, limit: float, budget: float) -> None:
    begin = time.monotonic()
    report = run(tmp_path, python("import time; time.sleep(60)", limit_seconds=limit), seconds=budget)
    assert "did not end within" in report.checks[0].found
    assert time.monotonic() - begin < 30.0


def test_a_spent_budget_stops_it(tmp_path: Path) -> None:
    moments = iter([0.0, 0.0, *[100.0] * 20])
    report = run(tmp_path, step("one"), step("two"), clock=lambda: next(moments))
    assert verdicts(report) == {"one": "PASS", "two": "FAIL"}
    assert "budget" in report.checks[1].found


def test_an_interruption_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flashmoe_build.gate.pipeline.execute", stop)
    write_report(tmp_path / "gate.json", run(tmp_path, step("one")))
    again = read_report(tmp_path / "gate.json")
    assert again.verdict is Verdict.FAIL
    assert "interrupted" in verdicts(again)


def test_the_checkouts_steps_are_skipped_without_one(tmp_path: Path) -> None:
    report = run(tmp_path, step("one"), step("two", needs="checkout"))
    assert verdicts(report) == {"one": "PASS", "two": "SKIP"}


@pytest.mark.parametrize(
    ("proof", "good"),
    [("PASS", ["one", "emulation"]), ("WARN", []), ("FAIL", []), ("left out", []), ("no compiler", [])],
)
def test_nothing_is_known_good_without_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: str, good: list[str]
) -> None:
    (tmp_path / ".git").mkdir()
    verdict = proof if proof in ("PASS", "WARN", "FAIL") else "PASS"
    monkeypatch.setenv("CXX", "no-such-compiler" if proof == "no compiler" else "sh")
    whole = (step("one"), step("emulation", verdict, int(verdict == "FAIL"), needs="compiler"), step("two"))
    report = run(tmp_path, *select(["one"] if proof == "left out" else ["one", "emulation"], whole), every=whole)
    assert report.data["known_good"] == good
    message = "\n".join(report.data["not_checked"])
    assert "two (./nox -s gate)" in message
    assert ("emulation" in message) == (proof in ("WARN", "left out", "no compiler"))
    assert "any kernel on a GPU: there is none here" in message
    text = cli.render(report)
    assert ("known good: one, emulation\n" in text) == bool(good)
    assert ("known good: nothing (emulation has to pass first)\n" in text) != bool(good)


@pytest.mark.parametrize(
    ("found", "runs", "verdict", "words"),
    [
        ("0 of 284 differ from commit x", 0, Verdict.SKIP, "nothing was emulated: 0 of 284 differ"),
        ("3 of 284 differ from commit x", 0, Verdict.PASS, "3 of 284 differ from commit x, and passed before"),
        ("3 of 284 differ from commit x", 7, Verdict.PASS, "2 PASS"),
    ],
)
def test_an_emulation_of_nothing_is_no_proof(found: str, runs: int, verdict: Verdict, words: str) -> None:
    report = Report("emulation", (Check("changed kernels", Verdict.PASS, found),), {"runs": runs})
    outcome = without_runs(Outcome(Verdict.PASS, "2 PASS", 1.0, report))
    assert outcome.verdict is verdict
    assert words in outcome.found


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.WARN, Verdict.SKIP])
def test_an_emulation_that_did_not_pass_stays_so(verdict: Verdict) -> None:
    outcome = Outcome(verdict, "found", 1.0, Report("emulation", (Check("a", verdict, "3 of 284"),), {"runs": 0}))
    assert without_runs(outcome) is outcome


def test_an_emulation_without_a_check_chose_no_kernel() -> None:
    outcome = without_runs(Outcome(Verdict.PASS, "", 1.0, Report("emulation", (), {"runs": 0})))
    assert (outcome.verdict, outcome.found) == (Verdict.SKIP, "nothing was emulated: no kernel was chosen")


@pytest.mark.parametrize(("stopped_at", "words"), [("two", "stopped at two"), (None, "failed"), ("", "failed")])
def test_why_a_run_that_failed_is_not_good(stopped_at: str | None, words: str) -> None:
    assert history.why_not_good({"verdict": "FAIL", "stopped_at": stopped_at}) == words


def test_the_newest_wheel_is_what_a_checkout_is_judged_by(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    paths, one = find_paths(tmp_path), step("one")
    words = ["{artifact}", "{objects}", ""]
    assert paths.fill(words, one) == [str(tmp_path / "build" / "lib" / "libflashmoe.so")]
    for age, name in ((10, f"{WHEEL_PREFIX}1-a.whl"), (20, f"{WHEEL_PREFIX}0-a.whl")):
        path = tmp_path / "dist" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "build" / "objects").mkdir(parents=True)
    wheel = str(tmp_path / "dist" / f"{WHEEL_PREFIX}1-a.whl")
    assert paths.fill(words, one) == [wheel, f"--objects={tmp_path / 'build' / 'objects'}"]
    assert replace(paths, given=True).fill(words, one) == [str(paths.library)]


def test_what_a_program_printed_stays_in_its_log(tmp_path: Path) -> None:
    report = run(tmp_path, python("print('x' * 2000)"))
    assert "(all of it: one.log)" in report.checks[0].found
    assert len((tmp_path / "build" / "reports" / "gate" / "one.log").read_text()) == 2001


def test_our_own_steps(tmp_path: Path) -> None:
    names = [one.name for one in STEPS]
    assert names == [
        "environment", "emulation", "build", "symbols", "import", "smoke", "correctness", "baseline", "decision", "profile",
    ]  # fmt: skip
    assert [one.name for one in select(["smoke", "build"])] == ["build", "smoke"]
    with pytest.raises(ArgumentError, match="no step 'speed'"):
        select(["speed"])
    for one in STEPS:  # every placeholder is known
        assert not any("{" in word for word in find_paths(tmp_path).fill([*one.command, one.next_step], one))
        assert one.why
        assert one.after_failed in ("", *names)


@pytest.mark.parametrize(
    ("speed", "verdict", "word"),
    [
        (0.2, Verdict.FAIL, "stop"),
        (0.4, Verdict.WARN, "caution"),
        (0.8, Verdict.PASS, "go on"),
        (1.2, Verdict.PASS, "next bottleneck"),
    ],
)
def test_the_decision_follows_the_thresholds(speed: float, verdict: Verdict, word: str) -> None:
    report = synthetic_report(speeds={"flashmoe": speed, "sdpa-flash": 0.5, "sdpa-cudnn": 0.9})
    check, *others = decide(report)
    assert not [other for other in others if other.name.startswith("speed")]  # from other baselines
    assert (check.verdict, check.found.rsplit(": ", 1)[1]) == (verdict, word)


def test_no_ratio_decides_nothing() -> None:
    for speeds in ({"sdpa-flash": 0.5, "sdpa-cudnn": 0.9}, {"flashmoe": 0.5}):
        assert [check.verdict for check in decide(synthetic_report(speeds=speeds))] == [Verdict.SKIP]


def test_a_memory_bound_case_is_compared_with_the_copy() -> None:
    report = synthetic_report("decode", speeds={"flashmoe": 0.01, "sdpa-flash": 0.01})
    slow = decide(report)
    assert any(check.name.startswith("bandwidth bf16-d128") and check.verdict is Verdict.WARN for check in slow)
    settings = {**report.data["settings"], "device": "cpu"}  # a CPU keeps such cases in its cache
    for cell in report.data["cells"]:
        cell["summaries"]["flashmoe"]["share_of_copy"] = None  # nothing was copied, which is not slow
    assert not [check for check in decide(report) if check.name.startswith("bandwidth")]
    on_a_cpu = decide(replace(report, data={**report.data, "settings": settings}))
    assert not [check for check in on_a_cpu if check.name.startswith("bandwidth")]


def test_the_decision_is_over_the_baseline_of_the_same_run(tmp_path: Path) -> None:
    write_report(tmp_path / "made.json", synthetic_report(speeds={"flashmoe": 0.2, "sdpa-flash": 0.5}))
    copy = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"
    baseline = step("baseline", command=("{python}", "-c", copy, "{root}/made.json", "{report}"))
    report = run(tmp_path, baseline, step("decision"), step("next"), step("profile", after_failed="decision"))
    assert verdicts(report) == {"baseline": "WARN", "decision": "FAIL", "next": "SKIP", "profile": "PASS"}
    assert "0.40x of sdpa-flash" in report.checks[1].found
    record = record_of(report, tmp_path)
    assert (record["architecture"], record["stopped_at"], record["commit"]) == ("sm90", "decision", "")
    assert record["ratios"]["flashmoe / sdpa-flash"] == pytest.approx(0.4, rel=0.01)


def test_history_keeps_the_last_known_good(tmp_path: Path) -> None:
    base = {**record_of(run(tmp_path, step("one")), tmp_path), "architecture": "sm90"}
    rows = [
        {**base, "commit": "a" * 40, "started": "2030-01-01"},
        {**base, "commit": "b" * 40, "started": "2030-01-02", "verdict": "WARN", "ratios": {"flashmoe / x": 1.5}},
        {**base, "commit": "c" * 40, "started": "2030-01-03", "verdict": "FAIL", "stopped_at": "smoke"},
        {**base, "commit": "d" * 40 + "+", "started": "2030-01-04"},
        {**base, "commit": "e" * 40, "started": "2030-01-05", "known_good": []},
    ]
    for row in rows:
        append_record(tmp_path / "history", row)
    found = read_history(tmp_path / "history")
    assert found == {"sm90": rows}
    assert last_known_good(found["sm90"])["commit"] == "b" * 40  # type: ignore[index]
    text = render(found, limit=4)
    assert "last known good bbbbbbbbbbbb of 2030-01-02" in text
    assert "stopped at smoke" in text
    assert "aaaaaaaa" not in text
    assert "bbbbbbbbbbbb   2030-01-02  WARN  flashmoe / x 1.500x" in text
    assert "dddddddddddd+  2030-01-04  PASS  no ratio; not known good: files differed from the commit (+)" in text
    assert "not known good: without a PASS of the emulation" in text
    (tmp_path / "history" / "sm90.jsonl").write_text("{}\n")
    with pytest.raises(ReportError, match=r"sm90\.jsonl line 1"):
        read_history(tmp_path / "history")


@pytest.mark.parametrize(
    ("folder", "dirty", "named"), [("", False, "abc"), ("..", True, "abc+"), ("elsewhere", False, "")]
)
def test_outside_of_git_the_commit_is_the_librarys(tmp_path: Path, folder: str, dirty: bool, named: str) -> None:
    library = tmp_path / "build" / "lib" / "libflashmoe.so"
    library.parent.mkdir(parents=True)
    (library.parent / folder).mkdir(exist_ok=True)
    (library.parent / folder / "provenance.json").write_text(json.dumps({"commit": "abc", "dirty": dirty}))
    assert history.built_commit(library) == named


def test_the_program_runs_records_and_remembers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither a checkout nor an installed wheel, whose commit the history would record.
    monkeypatch.setattr(history, "built_commit", lambda library: "")
    (tmp_path / "write.py").write_text(WRITE)
    steps = (step("one"), step("two", "FAIL", 1), step("three"))
    monkeypatch.setattr(cli, "select", lambda names: select(names, steps))
    words = ["gate", "--root", str(tmp_path), "--rate", "0.6", "--record", str(tmp_path / "records")]
    assert main(words) == ExitCode.FAILED
    text = capsys.readouterr().out
    assert "stopped at two: 1 FAIL; it: found it; next: do this" in text
    assert "next: mend two" in text
    assert "known good: nothing" in text
    assert re.search(r"^stage +verdict +seconds +cost +checks$", text, re.MULTILINE)
    assert re.search(r"^two +FAIL +\d+\.\d  ", text, re.MULTILINE)
    assert "cost 0.0" in text
    assert main(words[:-2]) == ExitCode.FAILED  # nothing is recorded
    capsys.readouterr()
    assert read_report(tmp_path / "build" / "reports" / "gate.json").data["stopped_at"] == "two"
    assert main([*words, "--only", "one", "--json", str(tmp_path / "g.json")]) == ExitCode.OK
    assert [row["name"] for row in read_report(tmp_path / "g.json").data["steps"]] == ["one"]
    capsys.readouterr()
    assert main(["history", "--folder", str(tmp_path / "records")]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "last known good none" in text  # there is no commit to name
    assert text.count("stopped at two") == 1
    assert main(["history", "--folder", str(tmp_path / "nothing")]) == ExitCode.NOTHING_CHECKED
    assert main([*words, "--budget-minutes", "0"]) == ExitCode.USAGE
    assert main([*words, "--only", "four"]) == ExitCode.USAGE
    assert "the gate has one, two, three" in capsys.readouterr().err


@pytest.mark.parametrize("rate", [0.0, 1.8])
def test_the_whole_text_of_a_run(rate: float) -> None:
    rows = [
        {"name": "import", "verdict": "PASS", "seconds": 1.25, "cost": 0.00063, "found": "2 PASS"},
        {"name": "emulation", "verdict": "FAIL", "seconds": 1061.0, "cost": 0.53, "found": "1 FAIL\nmore of it"},
    ]
    checks = (
        Check("emulation", Verdict.FAIL, "1 FAIL", why="it is wrong", next_step="mend it"),
        Check("import", Verdict.PASS, "fine"),
    )
    data: dict[str, Any] = {"steps": rows, "rate_per_hour": rate, "cost": 0.5306, "budget_seconds": 1800.0}
    data |= {"known_good": [], "unproven": ["emulation"], "not_checked": ["tests (./nox -s gate)"]}
    text = cli.render(Report("gate", checks, data, {}, (), "", 1062.4))
    costs, total = (["     cost", "   0.0006", "   0.5300"], ", cost 0.5306") if rate else ([""] * 3, "")
    assert text.splitlines() == [
        f"stage      verdict  seconds{costs[0]}  checks",
        f"import     PASS         1.2{costs[1]}  2 PASS",
        f"emulation  FAIL      1061.0{costs[2]}  1 FAIL",
        f"gate FAIL: 1062 of 1800 s{total}",
        "known good: nothing (emulation has to pass first)",
        "not checked: tests (./nox -s gate)",
        "stopped at emulation: 1 FAIL",
        "why: it is wrong",
        "next: mend it",
    ]
    data |= {"known_good": ["import", "emulation"], "unproven": [], "not_checked": []}
    assert cli.render(Report("gate", (), data, {}, (), "", 1.0)).splitlines()[4:] == ["known good: import, emulation"]


@pytest.mark.parametrize("message", ["environment", "data"])
def test_what_a_run_with_a_gpu_and_one_that_did_nothing_leave_unsaid(tmp_path: Path, message: str) -> None:
    words = "any kernel on a GPU: there is none here"
    assert words not in pipeline(tmp_path, step("one")).not_checked  # nothing ran
    ran = pipeline(tmp_path, step("one"))
    ran.run()
    assert ran.not_checked == [words]
    own = '"environment": {' if message == "environment" else '"data": {'
    comma = "" if message == "environment" else ", "
    gpu = '"gpu": {"name": "a GPU", "capability": "9.0"}' + comma
    (tmp_path / "write.py").write_text(WRITE.replace(own, own + gpu))
    seen = Pipeline(ran.steps, ran.paths, 60.0, 0.0, every=ran.steps)
    report = seen.run()
    assert seen.not_checked == []
    record = record_of(report, tmp_path)
    assert (record["architecture"], record["device"]) == ("sm90", "a GPU")


def test_the_budget_is_in_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []

    class Stop(Exception):  # noqa: N818
        pass

    def pipeline_of(*arguments: Any) -> Any:
        given.extend(arguments[2:])
        raise Stop

    monkeypatch.setattr(cli, "Pipeline", pipeline_of)
    options = SimpleNamespace(budget_minutes=2.5, rate=3.0, root=tmp_path, only="", library=None)
    with pytest.raises(Stop):
        cli.run(options)  # type: ignore[arg-type]
    assert given == [150.0, 3.0]
