"""A planted regression is bisected to its commit, on the CPU, in a small repository created for the test."""

import argparse
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_build.gate.bisect import Search, git, report_of
from flashmoe_build.gate.commit import judge_speed, speed_word
from flashmoe_tools.report import Verdict, read_report, write_report
from tests.bench.synthetic import synthetic_report

REPORT = """
import json, os, sys
def write(path, ok, found=""):
    check = {"name": "it", "verdict": "PASS" if ok else "FAIL", "found": found, "expected": "", "why": "", "next_step": ""}
    report = {"schema": "flashmoe.report/1", "kind": "t", "checks": [check], "data": {}, "environment": {}, "command": [],
              "started": "", "seconds": 0.0}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    json.dump(report, open(path, "w"))
"""
# The programs that the gate's steps start, as they are in the small repository.
PROGRAMS = {
    "toy.py": REPORT,
    "flashmoe_build/__init__.py": "",  # otherwise a checkout on PYTHONPATH comes first and is built from nothing
    "flashmoe_build/gate/__init__.py": "",
    "flashmoe_build/__main__.py": "import product, toy\ntoy.write('build/reports/build.json', True)\n",
    "flashmoe_build/gate/load.py": "import sys, toy\ntoy.write(sys.argv[2], True)\n",
    "tests/attention/test_correctness.py": (
        "import os, product, toy\n"
        "def test_it():\n"
        "    toy.write(os.environ['FLASHMOE_TEST_REPORT'], product.answer() == 42)\n"
        "    assert product.answer() == 42\n"
    ),
    ".gitignore": "build/\n__pycache__/\n",
}


class Repository:
    """Commits of ``product.py``: correct ones, one that does not build, and the first wrong one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        for name, text in PROGRAMS.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        self.commits: list[str] = []

    def git(self, *words: str) -> str:
        identity = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *words], cwd=self.root, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, text: str, message: str) -> str:
        (self.root / "product.py").write_text(f"{text}\n# {len(self.commits)}\n")
        self.git("add", "-A")
        self.git("commit", "-qm", message)
        self.commits.append(self.git("rev-parse", "HEAD"))
        return self.commits[-1]


RIGHT, WRONG, BROKEN = "def answer(): return 42", "def answer(): return 41", "def answer( return"


@pytest.fixture(autouse=True)
def pytest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps' pytest loads no plugins, which would take a second per commit."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "toy")
    for number, text in enumerate([RIGHT, RIGHT, RIGHT, BROKEN, RIGHT, RIGHT, WRONG, WRONG, WRONG]):
        made.commit(text, f"change {number}")
    return made


@dataclass(frozen=True)
class Done:
    """The outcome of a run of the program."""

    code: int
    out: str
    err: str


@pytest.fixture
def bisect(repository: Repository, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    folder = repository.root.parent
    options = ["--root", str(repository.root), "--reports", str(folder / "out")]

    def run(*words: str) -> Done:
        code = main(["bisect", *words, *options])
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return run


def test_the_first_bad_commit_is_found(repository: Repository, bisect: Callable[..., Done]) -> None:
    done = bisect(repository.commits[0], "main")
    assert done.code == 0, done.out + done.err
    report = read_report(repository.root.parent / "out" / "bisect.json")
    assert report.data["first_bad"] == repository.commits[6]
    assert report.data["last_good"] == repository.commits[5]
    assert "change 6" in done.out
    neighbours = report.data["neighbours"]
    assert {name: row["verdict"] for name, row in neighbours.items()} == {
        repository.commits[5]: "PASS",
        repository.commits[6]: "FAIL",
    }
    assert repository.git("worktree", "list").count("\n") == 0  # the worktree was removed
    assert repository.git("status", "--porcelain") == ""
    assert repository.git("rev-parse", "HEAD") == repository.commits[-1]


def test_a_commit_that_does_not_build_is_skipped(
    repository: Repository, bisect: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if Python itself keeps the current folder out of its path."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    done = bisect(repository.commits[2], repository.commits[6])
    assert done.code == 0, done.out + done.err
    report = read_report(repository.root.parent / "out" / "bisect.json")
    assert report.data["first_bad"] == repository.commits[6]
    words = {row["commit"]: row["word"] for row in report.data["tried"]}
    assert words.get(repository.commits[3], "skip") == "skip"


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        (6, 8, "was given as good, but the gate says bad"),
        (0, 5, "was given as bad, but the gate says good"),
        (6, 0, "not an ancestor"),
    ],
)
def test_ends_that_are_not_as_named_are_refused(
    repository: Repository, bisect: Callable[..., Done], good: int, bad: int, words: str
) -> None:
    done = bisect(repository.commits[good], repository.commits[bad])
    assert done.code == ExitCode.USAGE
    assert words in done.err
    assert repository.git("worktree", "list").count("\n") == 0


def test_a_speed_gate_needs_its_case_and_a_step_must_exist(repository: Repository, bisect: Callable[..., Done]) -> None:
    assert "--case KEY" in bisect("main~1", "main", "--gate", "speed").err
    assert "no step 'taste'" in bisect("main~1", "main", "--gate", "taste").err
    assert "nothing-here" in bisect("nothing-here", "main").err


@pytest.mark.parametrize(("speed", "word"), [(0.8, "good"), (0.7, "bad"), (0.9, "good")])
def test_the_speed_gate_compares_one_case_with_the_good_commit(speed: float, word: str) -> None:
    good = synthetic_report(speeds={"flashmoe": 0.8, "sdpa-flash": 0.5})
    here = synthetic_report(speeds={"flashmoe": speed, "sdpa-flash": 0.5}, seed=3)
    case = good.data["cells"][11]["case"]["key"]
    assert speed_word(here, good, case) == word
    assert speed_word(here, good, "no such case") == "skip"
    far = synthetic_report(speeds={"flashmoe": 0.4, "sdpa-flash": 0.5}, seed=4)
    assert speed_word(here, good, case, far) == "good"  # the search is for a regression to half
    assert speed_word(far, good, case, far) == "bad"
    wrong = synthetic_report(speeds={"flashmoe": 0.8, "sdpa-flash": 0.5}, wrong="flashmoe")
    assert speed_word(wrong, good, case) in ("bad", "skip")


def test_a_search_that_has_judged_nothing_has_no_words(tmp_path: Path) -> None:
    assert Search(tmp_path, "good", "bad", "correct", tmp_path).words() == {}


def test_what_git_prints_is_told_wherever_it_prints_it(repository: Repository) -> None:
    (repository.root / "product.py").write_text("changed")
    with pytest.raises(ArgumentError, match="git diff: diff --git"):
        git(repository.root, "diff", "--exit-code")
    with pytest.raises(ArgumentError, match="git show: fatal"):
        git(repository.root, "show", "no-such-commit")


def test_git_runs_in_the_environment_that_is_given(tmp_path: Path) -> None:
    words = ("-c", "alias.tell=!echo $ASKED $LC_ALL", "tell")
    assert git(tmp_path, *words, environment={**os.environ, "ASKED": "this", "LC_ALL": "POSIX"}) == "this POSIX"
    assert git(tmp_path, *words) == "C"


def test_a_search_without_an_end_names_no_commit(tmp_path: Path) -> None:
    """git is not needed: the folder is not a repository."""
    report = report_of(Search(tmp_path, "good", "bad", "correct", tmp_path), "", "", "", 1.0)
    assert (report.verdict, report.checks[0].found) == (Verdict.FAIL, "not found: too many commits could not be tested")


def test_only_the_good_end_is_good_unseen(tmp_path: Path) -> None:
    good, slow = (synthetic_report(speeds={"flashmoe": speed, "sdpa-flash": 0.5}) for speed in (0.8, 0.4))
    options = argparse.Namespace(reports=tmp_path, good="a", bad="c", case=good.data["cells"][11]["case"]["key"])
    assert judge_speed(good, "a", options) == "good"
    assert judge_speed(slow, "b", options) == "bad"
    assert judge_speed(None, "b", options) == "skip"


def test_a_slowdown_is_bisected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark of each commit is one of two reports, depending on what the commit's product returns."""
    made = Repository(tmp_path / "toy")
    for name, speed in (("42", 0.8), ("41", 0.5)):
        report = synthetic_report(speeds={"flashmoe": speed, "sdpa-flash": 0.5}, seed=int(name))
        write_report(made.root / f"{name}.json", report)
    (made.root / "flashmoe").mkdir()
    bench = "import shutil, sys, product\nshutil.copy(f'{product.answer()}.json', sys.argv[-1])\n"
    (made.root / "flashmoe" / "__init__.py").touch()  # otherwise an installed flashmoe comes first
    (made.root / "flashmoe" / "__main__.py").write_text(bench)
    for number, text in enumerate([RIGHT, RIGHT, WRONG, WRONG]):
        made.commit(text, f"change {number}")
    words = ["--gate", "speed", "--case", report.data["cells"][11]["case"]["key"], "--root", str(made.root)]
    code = main(["bisect", made.commits[0], "main", *words, "--reports", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    assert read_report(tmp_path / "out" / "bisect.json").data["first_bad"] == made.commits[2]
