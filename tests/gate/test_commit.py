"""The verdict on a single commit, and the arguments of a gate's steps, with fake pipelines and reports."""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe.errors import ArgumentError, ExitCode, ExtensionError, ReportError
from flashmoe_build.gate import bisect, commit, execute, history, load
from flashmoe_build.gate.commit import (
    CODES,
    GATES,
    WORDS,
    baseline_of,
    judge_speed,
    speed_word,
    steps_of,
    timed,
    word_of,
)
from flashmoe_tools.bench import compare
from flashmoe_tools.report import Check, Report, Verdict, read_report


def done(verdict: Verdict | None, stopped_at: str = "") -> Any:
    """A pipeline with the steps build and symbols, the last of which has this verdict."""
    outcomes = {} if verdict is None else {"symbols": SimpleNamespace(verdict=verdict, report=None)}
    return SimpleNamespace(steps=steps_of("symbols"), outcomes=outcomes, stopped_at=stopped_at)


@pytest.mark.parametrize(
    ("verdict", "stopped_at", "word"),
    [
        (Verdict.PASS, "", "good"),
        (Verdict.WARN, "", "good"),
        (Verdict.FAIL, "", "bad"),
        (Verdict.FAIL, "symbols", "bad"),
        (Verdict.FAIL, "build", "skip"),
        (Verdict.PASS, "build", "skip"),
        (Verdict.SKIP, "", "skip"),
        (None, "", "skip"),
    ],
)
def test_a_commit_is_called_by_its_last_step(verdict: Verdict | None, stopped_at: str, word: str) -> None:
    assert word_of(done(verdict, stopped_at)) == word


def test_a_gate_is_steps_or_one_of_them() -> None:
    for gate, names in GATES.items():
        assert tuple(step.name for step in steps_of(gate)) == names
    assert [step.name for step in steps_of("build")] == ["build"]
    with pytest.raises(ArgumentError):
        steps_of("nothing")
    step = timed(steps_of("speed")[-1], "a-suite", "a-case")
    words = list(step.command)
    assert [words[words.index(name) + 1] for name in ("--suite", "--case", "--time-budget", "--json")] == [
        *("a-suite", "a-case", "60", "{report}")
    ]


def change(verdict: str, case: str = "a", **given: Any) -> dict[str, Any]:
    return {"case": case, "verdict": verdict, "subject": "ours", **given}


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([], "skip"),
        ([change("SLOWER", case="b")], "skip"),
        ([change("SLOWER"), change("SAME")], "bad"),
        ([change("AMBIGUOUS")], "skip"),
        ([change("AMBIGUOUS"), change("SAME")], "good"),
        ([change("FASTER")], "good"),
    ],
)
def test_a_speed_is_judged_by_the_rule_for_two_runs(
    monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], word: str
) -> None:
    here, good = Report("bench", ()), Report("bench", ())
    requested: list[tuple[Report, Report]] = []

    def compared(a: Report, b: Report) -> Any:
        requested.append((a, b))
        return SimpleNamespace(data={"changes": rows}, checks=())

    monkeypatch.setattr(compare, "compare_reports", compared)
    assert speed_word(here, good, "a") == word
    assert requested == [(good, here)]
    wrong = SimpleNamespace(data={"changes": rows}, checks=(Check("a", Verdict.FAIL, "wrong in B: x"),))
    monkeypatch.setattr(compare, "compare_reports", lambda *_: wrong)
    assert speed_word(here, good, "a") == ("skip" if not any(row["case"] == "a" for row in rows) else "bad")


@pytest.mark.parametrize(
    ("interval", "end", "word"),
    [
        ((0.4, 0.49), 0.25, "bad"),  # the middle of 1 and 0.25 is 0.5
        ((0.4, 0.5), 0.25, "skip"),
        ((0.5, 0.9), 0.25, "skip"),
        ((0.51, 0.9), 0.25, "good"),
        ((0.51, None), 0.25, "good"),
        ((None, 0.49), 0.25, "bad"),
        ((None, None), 0.25, "skip"),
        ((0.1, 0.2), 1.0, "skip"),  # equal ends say nothing
        ((0.1, 0.2), 1.5, "skip"),
    ],
)
def test_between_the_ends_a_commit_is_like_the_nearer_one(
    monkeypatch: pytest.MonkeyPatch, interval: tuple[float | None, float | None], end: float, word: str
) -> None:
    good, here, bad = (Report(kind, ()) for kind in ("good", "here", "bad"))

    def compared(_: Report, other: Report) -> Any:
        rows = [change("AMBIGUOUS", interval=interval, value=end), change("SAME", case="b", interval=(9, 9), value=9.0)]
        assert other.kind in ("here", "bad")
        return SimpleNamespace(data={"changes": rows}, checks=())

    monkeypatch.setattr(compare, "compare_reports", compared)
    assert speed_word(here, good, "a", bad) == word


def test_the_good_end_is_what_others_are_held_against(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = argparse.Namespace(good="g", bad="b", case="a", reports=tmp_path)
    seen: list[tuple[Any, ...]] = []

    def word(here: Report, good: Report, case: str, far: Report | None) -> str:
        seen.append((here.command, good.command, case, far and far.command))
        return "bad"

    monkeypatch.setattr(commit, "speed_word", word)
    report = {name: Report("bench", (Check("x", Verdict.PASS),), command=(name,)) for name in "gbm"}
    assert judge_speed(None, "m", options) == "skip"
    assert judge_speed(report["g"], "g", options) == "good"
    assert seen == []
    assert judge_speed(report["m"], "m", options) == "bad"
    assert judge_speed(report["b"], "b", options) == "bad"
    assert judge_speed(report["m"], "m", options) == "bad"
    assert seen == [(("m",), ("g",), "a", None), (("b",), ("g",), "a", None), (("m",), ("g",), "a", ("b",))]
    assert read_report(baseline_of(tmp_path, "m")).command == ("m",)


@pytest.mark.parametrize(
    ("gate", "verdict", "word"),
    [
        ("symbols", Verdict.PASS, "good"),
        ("speed", Verdict.PASS, "bad"),
        ("speed", Verdict.FAIL, "bad"),
        ("symbols", Verdict.SKIP, "skip"),
    ],
)
def test_the_program_leaves_a_word_and_ends_with_its_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gate: str, verdict: Verdict, word: str
) -> None:
    given: list[Any] = []
    judged: list[tuple[Any, str]] = []

    class Pipeline:
        stopped_at = ""

        def __init__(self, steps: Any, paths: Any, seconds: float) -> None:
            self.steps = steps
            self.outcomes = {steps[-1].name: SimpleNamespace(verdict=verdict, report="its report")}
            given.append((paths.checkout, seconds, steps[-1].command))

        def run(self) -> Report:
            return Report("gate", (Check("x", Verdict.PASS),))

    monkeypatch.setattr(commit, "Pipeline", Pipeline)
    monkeypatch.setattr(commit, "find_paths", lambda _: _Paths())
    monkeypatch.setattr(commit, "commit_of", lambda _: "abc+")
    monkeypatch.setattr(commit, "judge_speed", lambda report, of, _: judged.append((report, of)) or "bad")
    monkeypatch.setenv("PYTHONPATH", f"first{os.pathsep}second{os.pathsep}third")
    monkeypatch.setattr(
        sys, "argv", ["commit", "--gate", gate, "--reports", str(tmp_path), "--case", "a-case", "--suite", "s"]
    )
    assert commit.main() == CODES[word]
    assert os.environ["PYTHONPATH"] == f"second{os.pathsep}third"
    assert [json.loads(line) for line in (tmp_path / WORDS).read_text().splitlines()] == [
        {"commit": "abc", "word": word}
    ]
    assert (tmp_path / WORDS).read_text().endswith("\n")
    assert read_report(tmp_path / "abc.json").kind == "gate"
    ((checkout, seconds, command),) = given
    assert (checkout, seconds) == (True, commit.COMMIT_SECONDS)
    assert ("a-case" in command) is (gate == "speed")
    assert judged == ([("its report", "abc")] if gate == "speed" and verdict is Verdict.PASS else [])


@dataclass(frozen=True)
class _Paths:
    checkout: bool = False


# Programs


@pytest.mark.parametrize("module", ["flashmoe_build.gate.commit", "flashmoe_build.gate.load"])
def test_a_program_ends_with_its_own_code(module: str) -> None:
    command = [sys.executable, "-m", module, "--nonsense"]
    root = Path(commit.__file__).parents[2]  # independent of where the tests were started
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == ExitCode.USAGE, done


def test_an_interruption_ends_what_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], *_: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "_wait", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        execute._run(["sleep", "60"], tmp_path, dict(os.environ), 60.0, tmp_path / "log", print)
    assert started[0].poll() is not None
    assert time.monotonic() - begin < 30


def test_the_last_whole_line_is_what_a_program_says(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for text, line in (
        ("", ""),
        ("one\n", "one"),
        ("one\ntwo", "one"),
        ("one\n  \n", "one"),
        ("a\rb\rc", "b"),
        ("\n\n", ""),
    ):
        log.write_bytes(text.encode())
        assert execute.newest_line(log) == line


def test_a_record_by_another_rule_is_named(tmp_path: Path) -> None:
    record = {"schema": history.SCHEMA, "architecture": "sm90"}
    (tmp_path / "sm90.jsonl").write_text(json.dumps(record) + "\n" + json.dumps({**record, "schema": "other"}) + "\n")
    with pytest.raises(ReportError, match=r"sm90\.jsonl line 2 is not a record of .*other"):
        history.read_history(tmp_path)
    (tmp_path / "sm90.jsonl").write_text(json.dumps(record) + "\n")
    assert history.read_history(tmp_path) == {"sm90": [record]}


# Loading the extension


def test_what_loads_and_what_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from flashmoe import _extension

    path = tmp_path / "load.json"
    monkeypatch.setattr(sys, "argv", ["load", "--json", str(path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(load, "load_check", lambda: Check("load", Verdict.PASS, "an operator"))
    assert load.main() == 0
    assert read_report(path).data == {"gpu": None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert load.main() == 0
    assert read_report(path).data == {"gpu": {"name": "a GPU", "capability": "9.0"}}
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["load", "--json", str(path)])

    def refuse() -> None:
        msg = "no library"
        raise ExtensionError(msg)

    monkeypatch.setattr(_extension, "load", refuse)
    assert load.main() == 1
    assert read_report(path).data == {}
    assert "FAIL ExtensionError: no library" in capsys.readouterr().out


def test_a_search_keeps_its_compilations_unless_somebody_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    search = bisect.Search(tmp_path, "g", "b", "symbols", tmp_path / "reports")
    for given, folder in (("", str(tmp_path / "reports" / "cache")), ("/elsewhere", "/elsewhere")):
        monkeypatch.setenv("FLASHMOE_CACHE_DIR", given)
        assert search.environment["FLASHMOE_CACHE_DIR"] == folder
    assert search.environment["LC_ALL"] == "C"
    assert "--case" not in search.command
    assert bisect.Search(tmp_path, "g", "b", "speed", tmp_path, "a-case", "s").command[-8:] == [
        *("--good", "g", "--bad", "b", "--case", "a-case", "--suite", "s")
    ]
