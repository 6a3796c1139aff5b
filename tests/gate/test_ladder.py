"""The ladder: what stops it, what it says, what it costs. Rungs here are tiny programs that write reports."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmoe.__main__ import main
from flashmoe._version import WHEEL_PREFIX
from flashmoe.errors import ExitCode, ExtensionError
from flashmoe_build.gate import history
from flashmoe_build.gate.cli import render as render_gate
from flashmoe_build.gate.climb import Budget, Climb, find_places
from flashmoe_build.gate.decide import decide
from flashmoe_build.gate.execute import execute
from flashmoe_build.gate.history import append_record, last_known_good, read_history, record_of, render
from flashmoe_build.gate.ladder import LadderError, read_ladder, select
from flashmoe_build.gate.load import load_check
from flashmoe_build.gate.load import main as load_main
from flashmoe_tools.report import Report, ReportError, Verdict, read_report, write_report
from tests.bench.synthetic import synthetic_report

WRITE = """
import json, sys
verdict, code = sys.argv[2], int(sys.argv[3])
check = {"name": "it", "verdict": verdict, "found": "found it", "expected": "", "why": "", "next_step": "do this"}
report = {"schema": "flashmoe.report/1", "kind": "t", "checks": [check], "data": {}, "environment": {}, "command": [],
          "started": "", "seconds": 0.0}
json.dump(report, open(sys.argv[1], "w"))
sys.exit(code)
"""


def ladder(folder: Path, *rows: str) -> Path:
    path = folder / "ladder.toml"
    path.write_text("schema = 1\n" + "\n".join(rows))
    return path


def rung(name: str, verdict: str = "PASS", code: int = 0, more: str = "") -> str:
    command = f'command = ["{{python}}", "{{root}}/write.py", "{{report}}", "{verdict}", "{code}"]'
    return f'[[rung]]\nname = "{name}"\n{command}\nwhy = "why {name}"\nnext_step = "mend {name}"\n{more}\n'


def climb(folder: Path, *rows: str, seconds: float = 60.0, rate: float = 3600.0) -> Report:
    (folder / "write.py").write_text(WRITE)
    return Climb(read_ladder(ladder(folder, *rows)), find_places(folder, None, None), Budget(seconds, rate)).run()


def verdicts(report: Report) -> dict[str, str]:
    return {check.name: check.verdict.value for check in report.checks}


def test_a_library_built_elsewhere_skips_the_rung_that_would_make_it(tmp_path: Path) -> None:
    (tmp_path / "write.py").write_text(WRITE)
    rungs = read_ladder(ladder(tmp_path, rung("build", "FAIL", 1, 'makes = "library"'), rung("next")))
    library = tmp_path / "wheel" / "libflashmoe.so"
    library.parent.mkdir()
    library.touch()
    report = Climb(rungs, find_places(tmp_path, library, None), Budget(60.0, 0.0)).run()
    assert verdicts(report) == {"build": "SKIP", "next": "PASS"}
    assert "built elsewhere" in report.checks[0].found
    assert record_of(report, tmp_path, library)["commit"] == ""
    (library.parent / "provenance.json").write_text('{"commit": "0123abcd", "dirty": false}')
    assert record_of(report, tmp_path, library)["commit"] == "0123abcd"
    (library.parent / "provenance.json").write_text('{"commit": "0123abcd", "dirty": true}')
    assert record_of(report, tmp_path, library)["commit"] == "0123abcd+"


def test_a_ladder_that_holds(tmp_path: Path) -> None:
    report = climb(tmp_path, rung("one"), rung("two", "WARN"))
    assert verdicts(report) == {"one": "PASS", "two": "WARN"}
    assert report.exit_code is ExitCode.OK
    assert report.data["known_good"] == ["one", "two"]
    assert report.data["cost"] == pytest.approx(report.seconds, rel=0.2)  # 3600 an hour is 1 a second
    assert all(row["cost"] == pytest.approx(row["seconds"]) for row in report.data["rungs"])


def test_it_stops_at_the_first_failing_rung_and_says_what_to_do(tmp_path: Path) -> None:
    report = climb(tmp_path, rung("one"), rung("two", "FAIL", 1), rung("three"))
    assert verdicts(report) == {"one": "PASS", "two": "FAIL", "three": "SKIP"}
    assert report.data["stopped_at"] == "two"
    failed = report.checks[1]
    assert "found it" in failed.found
    assert (failed.why, failed.next_step) == ("why two", "mend two")
    assert report.exit_code is ExitCode.FAILED
    assert not (tmp_path / "build" / "reports" / "gate" / "three.json").exists()


def test_a_rung_after_a_failure_is_climbed_only_where_it_says_so(tmp_path: Path) -> None:
    report = climb(tmp_path, rung("one", "FAIL", 1), rung("two"), rung("look", more='after_failed = "one"'))
    assert verdicts(report) == {"one": "FAIL", "two": "SKIP", "look": "PASS"}
    assert report.verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ('["{python}", "-c", "raise SystemExit(0)"]', "exit 0 and no report"),
        ('["{python}", "-c", "raise SystemExit(\'the words\')"]', "the words"),
        ('["/no/such/program"]', "No such file"),
        ('["{python}", "{root}/write.py", "{report}", "PASS", "9"]', "exit 9 although its report says PASS"),
        ('["{python}", "{root}/write.py", "{report}", "SKIP", "0"]', "1 SKIP"),
    ],
)
def test_what_proves_nothing_fails(tmp_path: Path, command: str, words: str) -> None:
    report = climb(tmp_path, f'[[rung]]\nname = "one"\ncommand = {command}')
    assert report.verdict is Verdict.FAIL
    assert words in report.checks[0].found


def test_an_old_report_is_not_believed(tmp_path: Path) -> None:
    assert climb(tmp_path, rung("one")).verdict is Verdict.PASS
    report = climb(tmp_path, '[[rung]]\nname = "one"\ncommand = ["{python}", "-c", "pass"]')
    assert "no report" in report.checks[0].found


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    begin = time.monotonic()
    found = execute([sys.executable, "-c", child], tmp_path / "r.json", folder=tmp_path, environment={}, limit=1.0)
    assert found.verdict is Verdict.FAIL
    assert "did not end within 1 s" in found.found
    assert time.monotonic() - begin < 30.0


def test_a_rung_is_ended_at_its_own_limit(tmp_path: Path) -> None:
    slow = '[[rung]]\nname = "one"\ncommand = ["{python}", "-c", "import time; time.sleep(60)"]\nlimit_seconds = 0.5'
    begin = time.monotonic()
    report = climb(tmp_path, slow, seconds=3000.0)
    assert "did not end within" in report.checks[0].found
    assert time.monotonic() - begin < 30.0
    begin = time.monotonic()
    report = climb(tmp_path, slow.replace("0.5", "3000.0"), seconds=0.5)
    assert "did not end within" in report.checks[0].found, "nor may it outlive the whole budget"
    assert time.monotonic() - begin < 30.0


def test_a_spent_budget_stops_the_ladder(tmp_path: Path) -> None:
    moments = iter([0.0, 0.0, *[100.0] * 20])
    (tmp_path / "write.py").write_text(WRITE)
    rungs = read_ladder(ladder(tmp_path, rung("one"), rung("two")))
    report = Climb(rungs, find_places(tmp_path, None, None), Budget(60.0, 0.0), clock=lambda: next(moments)).run()
    assert verdicts(report) == {"one": "PASS", "two": "FAIL"}
    assert "budget" in report.checks[1].found


def test_an_interruption_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flashmoe_build.gate.climb.execute", stop)
    report = climb(tmp_path, rung("one"))
    write_report(tmp_path / "gate.json", report)
    again = read_report(tmp_path / "gate.json")
    assert again.verdict is Verdict.FAIL
    assert "interrupted" in verdicts(again)


def test_the_checkouts_rungs_are_skipped_without_one(tmp_path: Path) -> None:
    report = climb(tmp_path, rung("one"), rung("two", more='needs = "checkout"'))
    assert verdicts(report) == {"one": "PASS", "two": "SKIP"}


@pytest.mark.parametrize(
    ("proof", "good"),
    [("PASS", ["one", "proof"]), ("WARN", []), ("FAIL", []), ("left out", []), ("no compiler", [])],
)
def test_nothing_is_known_good_without_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: str, good: list[str]
) -> None:
    (tmp_path / "write.py").write_text(WRITE)
    (tmp_path / ".git").mkdir()
    verdict = proof if proof in ("PASS", "WARN", "FAIL") else "PASS"
    monkeypatch.setenv("CXX", "no-such-compiler" if proof == "no compiler" else "sh")
    more = 'proof = true\nneeds = "compiler"'
    whole = read_ladder(
        ladder(tmp_path, rung("one"), rung("proof", verdict, int(verdict == "FAIL"), more), rung("two"))
    )
    rungs = select(whole, ["one"] if proof == "left out" else ["one", "proof"])
    report = Climb(rungs, find_places(tmp_path, None, None), Budget(60.0, 0.0), ladder=whole).run()
    assert report.data["known_good"] == good
    told = "\n".join(report.data["not_checked"])
    assert "two (./nox -s gate)" in told
    assert ("proof" in told) == (proof in ("WARN", "left out", "no compiler"))
    assert "any kernel on a GPU: there is none here" in told
    text = render_gate(report)
    assert ("known good: one, proof\n" in text) == bool(good)
    assert ("known good: nothing (without a PASS of proof nothing is)\n" in text) != bool(good)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((), "no [[rung]]"),
        (('[[rung]]\nname = "a"',), "command or decision_of"),
        (('[[rung]]\nname = "a"\ncomand = ["x"]',), "comand"),
        ((rung("a"), rung("a")), "two rungs"),
        (('[[rung]]\nname = "a"\ndecision_of = "b"',), "no earlier rung"),
        (("[[rung",), "no ladder"),
    ],
)
def test_mistakes_in_a_ladder_are_named(tmp_path: Path, rows: tuple[str, ...], words: str) -> None:
    with pytest.raises(LadderError, match=r".*") as caught:
        read_ladder(ladder(tmp_path, *rows))
    assert words in str(caught.value)


def test_the_newest_wheel_is_what_a_checkout_is_judged_by(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    places = find_places(tmp_path, None, None)
    words = ["{artifact}", "{objects}", ""]
    (one,) = read_ladder(ladder(tmp_path, rung("one")))
    assert places.fill(words, one, "", 0.0) == [str(tmp_path / "build" / "lib" / "libflashmoe.so"), ""]
    for age, name in ((10, f"{WHEEL_PREFIX}1-a.whl"), (20, f"{WHEEL_PREFIX}0-a.whl")):
        path = tmp_path / "dist" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "build" / "objects").mkdir(parents=True)
    wheel = str(tmp_path / "dist" / f"{WHEEL_PREFIX}1-a.whl")
    assert places.fill(words, one, "", 0.0) == [wheel, f"--objects={tmp_path / 'build' / 'objects'}", ""]
    given = replace(places, given=True)
    assert given.fill(words, one, "", 0.0) == [str(given.library), ""]


def test_what_a_program_said_is_kept(tmp_path: Path) -> None:
    report = climb(tmp_path, '[[rung]]\nname = "one"\ncommand = ["{python}", "-c", "print(\'x\' * 2000)"]')
    assert "(all of it: one.log)" in report.checks[0].found
    assert len((tmp_path / "build" / "reports" / "gate" / "one.log").read_text()) == 2001


def test_our_own_ladder() -> None:
    rungs = read_ladder()
    names = [one.name for one in rungs]
    assert names == [
        "environment", "build", "symbols", "import", "smoke", "emulation", "correctness", "baseline", "decision", "profile",
    ]  # fmt: skip
    assert [one.name for one in select(rungs, ["smoke", "build"])] == ["build", "smoke"]
    with pytest.raises(LadderError, match="no rung 'speed'"):
        select(rungs, ["speed"])


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
    check = decide(report)[0]
    assert (check.verdict, check.found.rsplit(": ", 1)[1]) == (verdict, word)


def test_no_ratio_decides_nothing() -> None:
    for speeds in ({"sdpa-flash": 0.5, "sdpa-cudnn": 0.9}, {"flashmoe": 0.5}):
        assert [check.verdict for check in decide(synthetic_report(speeds=speeds))] == [Verdict.SKIP]


def test_a_memory_bound_case_is_held_to_the_copy() -> None:
    slow = decide(synthetic_report("decode", speeds={"flashmoe": 0.01, "sdpa-flash": 0.01}))
    assert any(check.name.startswith("bandwidth bf16-d128") and check.verdict is Verdict.WARN for check in slow)


def test_the_ladder_decides_over_its_own_baseline(tmp_path: Path) -> None:
    made = tmp_path / "made.json"
    write_report(made, synthetic_report(speeds={"flashmoe": 0.2, "sdpa-flash": 0.5}))
    copy = '["{python}", "-c", "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])", "{root}/made.json", "{report}"]'
    rows = (
        f'[[rung]]\nname = "baseline"\ncommand = {copy}',
        '[[rung]]\nname = "decision"\ndecision_of = "baseline"',
        rung("next"),
        rung("profile", more='after_failed = "decision"'),
    )
    report = climb(tmp_path, *rows)
    assert verdicts(report) == {"baseline": "WARN", "decision": "FAIL", "next": "SKIP", "profile": "PASS"}
    assert "0.40x of sdpa-flash" in report.checks[1].found
    record = record_of(report, tmp_path)
    assert (record["architecture"], record["stopped_at"], record["commit"]) == ("sm90", "decision", "")
    assert record["ratios"]["flashmoe / sdpa-flash"] == pytest.approx(0.4, rel=0.01)


def test_history_keeps_the_last_known_good(tmp_path: Path) -> None:
    report = climb(tmp_path, rung("one"))
    base = {**record_of(report, tmp_path), "architecture": "sm90"}
    rows = [
        {**base, "commit": "a" * 40, "started": "2030-01-01"},
        {**base, "commit": "b" * 40, "started": "2030-01-02", "verdict": "WARN", "ratios": {"flashmoe / x": 1.5}},
        {**base, "commit": "c" * 40, "started": "2030-01-03", "verdict": "FAIL", "stopped_at": "smoke"},
        {**base, "commit": "d" * 40 + "+", "started": "2030-01-04"},
        {**base, "commit": "e" * 40, "started": "2030-01-05", "known_good": []},
    ]
    for row in rows:
        append_record(tmp_path / "history", row)
    history = read_history(tmp_path / "history")
    assert history == {"sm90": rows}
    assert last_known_good(history["sm90"])["commit"] == "b" * 40  # type: ignore[index]
    text = render(history, limit=4)
    assert "last known good bbbbbbbbbbbb of 2030-01-02" in text
    assert "stopped at smoke" in text
    assert "aaaaaaaa" not in text
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


def test_the_program_climbs_records_and_remembers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither a checkout nor an installed wheel, whose own commit the history would name.
    monkeypatch.setattr(history, "built_commit", lambda library: "")
    (tmp_path / "write.py").write_text(WRITE)
    path = ladder(tmp_path, rung("one"), rung("two", "FAIL", 1), rung("three"))
    words = [
        "gate",
        "--root",
        str(tmp_path),
        "--ladder",
        str(path),
        "--rate",
        "0.6",
        "--record",
        str(tmp_path / "kept"),
    ]
    assert main(words) == ExitCode.FAILED
    text = capsys.readouterr().out
    assert "stopped at two: 1 FAIL; it: found it; next: do this" in text
    assert "next: mend two" in text
    assert "known good: one" in text
    assert re.search(r"^stage +verdict +seconds +cost +checks$", text, re.MULTILINE)
    assert re.search(r"^two +FAIL +\d+\.\d  ", text, re.MULTILINE)
    assert "cost 0.0" in text
    assert read_report(tmp_path / "build" / "reports" / "gate.json").data["stopped_at"] == "two"
    assert main([*words, "--only", "one", "--json", str(tmp_path / "g.json")]) == ExitCode.OK
    assert [row["name"] for row in read_report(tmp_path / "g.json").data["rungs"]] == ["one"]
    capsys.readouterr()
    assert main(["history", "--folder", str(tmp_path / "kept")]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "last known good none" in text  # there is no commit to name
    assert text.count("stopped at two") == 1
    assert main(["history", "--folder", str(tmp_path / "nothing")]) == ExitCode.NOTHING_CHECKED
    assert main([*words, "--budget-minutes", "0"]) == ExitCode.USAGE
    assert main([*words, "--only", "four"]) == ExitCode.USAGE
    assert "the ladder has one, two, three" in capsys.readouterr().err


def test_loading_is_judged_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flashmoe import _extension

    def refuse() -> None:
        raise ExtensionError("no libflashmoe.so here")

    monkeypatch.setattr(_extension, "load", refuse)
    check = load_check()
    assert check.verdict is Verdict.FAIL
    assert "no libflashmoe.so here" in check.found
    monkeypatch.setattr("sys.argv", ["load", "--json", str(tmp_path / "load.json")])
    assert load_main() == ExitCode.FAILED
    assert read_report(tmp_path / "load.json").kind == "load"
