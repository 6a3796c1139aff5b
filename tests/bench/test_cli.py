"""What the command line does with its options, without measuring anything."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashmoe.__main__ import main
from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_tools.bench import cli
from flashmoe_tools.bench.cli import add_arguments, fit_suite, merge, only_cases
from flashmoe_tools.bench.distributed import session
from flashmoe_tools.bench.suites import Suite, load_suite
from flashmoe_tools.report import Report, typed_command, write_report
from tests.bench.synthetic import synthetic_report


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def fit(name: str, *words: str) -> Suite:
    return fit_suite(load_suite(name), options(*words), "cpu")


def test_options_change_a_suite() -> None:
    assert fit("science").repeats == 300
    assert fit("science", "--repeats", "40").repeats == 40
    assert fit("science").flush_l2
    assert not fit("science", "--warm").flush_l2
    assert fit("science", "--contenders", "sdpa-cpu,sdpa-math").contenders == ("sdpa-cpu", "sdpa-math")
    quick = fit("cpu", "--quick")
    assert (len(quick.cases), quick.repeats) == (12, 30)
    key = load_suite("cpu").cases[-1].key
    assert [case.key for case in fit("cpu", "--case", key).cases] == [key]
    with pytest.raises(ArgumentError, match="--repeats -1"):
        fit("cpu", "--repeats", "-1")
    with pytest.raises(ArgumentError, match="it has f32"):
        only_cases(load_suite("cpu"), ["nothing"])


def test_suites_that_measure_alike_can_run_as_one() -> None:
    both = merge([load_suite("decode"), load_suite("science")])
    assert both.name == "decode+science"
    assert len(both.cases) == len(load_suite("decode").cases) + len(load_suite("science").cases)
    assert set(both.contenders) >= set(load_suite("science").contenders)
    assert merge([load_suite("cpu")]) == load_suite("cpu")
    with pytest.raises(ArgumentError, match="measure differently"):
        merge([load_suite("science"), load_suite("latency")])


def test_a_preset_is_chosen_by_the_gpus_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    suite = load_suite("science")
    assert fit_suite(suite, options(), "cuda").baseline == "sdpa-efficient"
    assert fit_suite(suite, options("--preset", "none"), "cuda") == suite
    assert "sdpa-flash" in fit_suite(suite, options("--preset", "A100"), "cuda").contenders


def test_a_report_keeps_the_command_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["flashmoe", "bench", "--json", "/some/where/a.json", "--suite", "mine.toml"])
    assert typed_command() == ("python", "-m", "flashmoe", "bench", "--json", "a.json", "--suite", "mine.toml")


def test_comparisons_leave_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_report(a, synthetic_report(speeds={"flashmoe": 0.8, "sdpa-flash": 0.5}, seed=1))
    write_report(b, synthetic_report(speeds={"flashmoe": 0.7, "sdpa-flash": 0.5}, seed=2))
    words = ["bench", "--compare", str(a), str(b), "--markdown", str(tmp_path / "c.md")]
    assert main(words) == ExitCode.OK
    assert main([*words, "--fail-on", "slower"]) == ExitCode.FAILED
    assert "SLOWER" in (tmp_path / "c.md").read_text()
    assert "SLOWER" in capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("--quick",), ("--repeats", "3")])
def test_a_suite_of_several_gpus_is_shortened_on_request(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    seen: list[Suite] = []
    suite = load_suite("distributed")
    monkeypatch.setattr(session, "measure_distributed", lambda given, *_: seen.append(given))
    assert cli._measure_distributed(options(*words), [suite], "cuda") == ExitCode.OK
    expected = {(): suite, ("--quick",): suite.quick()}
    assert seen == [expected.get(words, replace(suite, repeats=3))]
    assert suite.quick() != suite


@pytest.mark.parametrize("kept", [("--json",), ("--summary",), ()])
def test_a_report_of_several_gpus_is_kept_where_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    report = Report("bench-distributed", (), {"parts": []})
    monkeypatch.setattr(session, "measure_distributed", lambda *_: report)
    monkeypatch.setattr(session, "as_text", lambda _: "")
    words = [word for option in kept for word in (option, str(tmp_path / f"{option[2:]}.json"))]
    cli._measure_distributed(options(*words), [load_suite("distributed")], "cuda")
    assert {path.name for path in tmp_path.iterdir()} == {f"{option[2:]}.json" for option in kept}
