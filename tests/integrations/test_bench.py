"""The program that times whole models: its ratios, and that it runs, checks and reports."""

from pathlib import Path

import pytest

from flashmoe_tools.bench import models as bench
from flashmoe_tools.bench.models import CONTENDERS, Contender
from flashmoe_tools.report import Verdict, read_report

pytest.importorskip("transformers")


def test_a_ratio_is_the_median_over_the_rounds() -> None:
    ours, other = Contender("fmoe"), Contender("sdpa")
    rows = bench._rows("train", {ours: [1.0, 2.0, 1.0], other: [1.5, 2.0, 3.0]}, 30)
    assert [row["tokens_per_s"] for row in rows] == [30.0, 15.0]
    assert "ours_is_faster_by" not in rows[0]
    assert rows[1]["ours_is_faster_by"] == 1.5


def test_a_slow_contender_is_timed_once_and_takes_no_round_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"fmoe": 1.0, "sdpa": 1.25, "eager": 10.0}
    used: list[str] = []
    monkeypatch.setattr(Contender, "use", lambda self, _: used.append(self.attention))
    monkeypatch.setattr(bench, "prepare", lambda *_: (lambda: None, 30))
    monkeypatch.setattr(bench, "seconds_of", lambda *_: seconds[used[-1]])
    rows = bench.measure(None, "generate", list(map(Contender, seconds)), bench.SIZES["tiny"], "cpu", 5, 100.0)
    assert {row["contender"]: len(row["ms"]) for row in rows} == {"fmoe": 5, "sdpa": 5, "eager": 1}
    assert [row.get("ours_is_faster_by") for row in rows] == [None, 1.25, 10.0]


@pytest.mark.filterwarnings("ignore")
def test_a_tiny_model_is_checked_timed_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.json"
    words = [
        "--size",
        "tiny",
        "--model",
        "dense",
        "--task",
        "train",
        "--rounds",
        "3",
        "--limit",
        "0",
        "--device",
        "cpu",
    ]
    assert bench.main([*words, "--json", str(path)]) == 0
    report = read_report(path)
    assert report.verdict is Verdict.PASS
    assert report.command[:3] == ("python", "-m", "flashmoe_tools.bench.models")
    assert report.environment["torch"]
    assert len(report.environment["commit"]) >= 40
    # Eager attention is not compared in training
    assert [row["contender"] for row in report.data["rows"]] == ["fmoe", "sdpa"]
    # Reported as left out
    assert {check.name for check in report.checks} >= {f"dense {one.name}" for one in CONTENDERS["dense"][2:4]}
    assert "models PASS" in capsys.readouterr().out
