"""The command line as a person uses it, in a separate process."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ExitCode
from flashmoe_tools.report import read_report

SUITE = """
schema = 1
name = "mine"
devices = ["cpu"]
repeats = 30
block = 3
baseline = "sdpa-cpu"
contenders = ["sdpa-cpu", "sdpa-math"]
[[cases]]
dtype = "f32"
head_dim = 32
causal = [false, true]
batch = 1
heads = 2
seq = {lengths}
"""


def bench(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashmoe", "bench", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def suite_file(folder: Path, lengths: str) -> str:
    path = folder / "mine.toml"
    path.write_text(SUITE.format(lengths=lengths))
    return str(path)


def test_a_run_leaves_three_files_and_they_compare(
    tmp_path: Path,
    program_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    suite = suite_file(tmp_path, "[16, 64]")
    outputs = ("--json", "a.json", "--markdown", "a.md", "--html", "a.html")
    done = bench(tmp_path, program_environment, "--suite", suite, "--baseline-only", *outputs)
    assert done.returncode == 0, done.stderr
    report = read_report(tmp_path / "a.json")
    assert [cell["summaries"]["sdpa-cpu"]["samples"] for cell in report.data["cells"]] == [30] * 4
    assert report.data["cells"][0]["case"]["key"] == "f32-d32-full-b1-h2-s16"
    assert report.command[-len(outputs) :] == outputs
    assert "sdpa-math / sdpa-cpu" in (tmp_path / "a.md").read_text()
    assert "</html>" in (tmp_path / "a.html").read_text()
    assert str(tmp_path.parent) not in json.dumps(report.environment)

    monkeypatch.chdir(tmp_path)
    code = main(["bench", "--compare", "a.json", "a.json", "--fail-on", "changed", "--json", "c.json"])
    text = capsys.readouterr().out
    assert code in (ExitCode.OK, ExitCode.NOTHING_CHECKED), text  # the latter if everything is too noisy for a verdict
    assert "FASTER" not in text
    assert "SLOWER" not in text
    assert read_report(tmp_path / "c.json").kind == "bench-compare"
    assert main(["bench", "--render", "a.json", "--html", "again.html"]) == 0
    assert (tmp_path / "again.html").read_text() == (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_valid_partial_report(
    tmp_path: Path, program_environment: dict[str, str], number: signal.Signals
) -> None:
    suite = suite_file(tmp_path, "[16, 256, 257, 258, 259, 260]")
    arguments = ["--suite", suite, "--baseline-only", "--repeats", "3000", "--json", "a.json"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "flashmoe", "bench", *arguments],
        cwd=tmp_path,
        env=program_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:  # progress lines: wait until one of the 12 cases has its samples
        if line.startswith("bench mine ") and not line.startswith("bench mine 0/"):
            break
    time.sleep(0.5)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    report = read_report(tmp_path / "a.json")
    assert report.data["partial"] == "interrupted"
    assert report.data["cells"]
    assert len(report.data["cells"]) < 12
    assert "PARTIAL" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "nothing"), "known suites are"),
        (("--suite", "cpu", "--device", "cuda"), "this suite runs on cpu"),
        (("--suite", "cpu", "--contenders", "sdpa-flsh"), "no contender 'sdpa-flsh'"),
        (("--suite", "cpu", "--repeats", "0"), "--repeats 0"),
        (("--suite", "cpu", "--case", "f32-d1"), "has no case 'f32-d1'"),
    ],
)
def test_mistakes_end_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_a_report_that_is_not_there_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--compare", "a.json", "b.json"]) == ExitCode.FAILED
    assert "cannot read the report a.json" in capsys.readouterr().err
