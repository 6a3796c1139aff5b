"""A further operation is timed by adding a package of problems and a module of contenders, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoe.errors import ArgumentError
from flashmoe_tools import operations
from flashmoe_tools.bench import ceilings
from flashmoe_tools.bench.cli import merge
from flashmoe_tools.bench.contenders import default_registry
from flashmoe_tools.bench.markdown import bench_markdown, describe_case
from flashmoe_tools.bench.session import Options, Session
from flashmoe_tools.bench.suites import parse_suite
from flashmoe_tools.report import Verdict, read_report, write_report

PROBLEMS = """
from dataclasses import asdict, dataclass
import torch
from flashmoe_tools.operations import Verification, fields

@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor

    def poison(self):
        torch.full_like(self.x, float("nan"))

@dataclass(frozen=True)
class Reference:
    out: torch.Tensor
    tolerance: float = 0.0
    coverage: float = 1.0

    def judge(self, result, lse=None):
        error = float((result - self.out).abs().max())
        return Verification(error == 0.0, error, 0.0, None, 1.0, "" if error == 0.0 else "differs")

@dataclass(frozen=True)
class Double:
    operation = "toy"
    dtype: str
    size: int
    key = property(lambda self: f"toy-{self.size}")
    title = property(lambda self: f"{self.size} numbers, doubled")
    flops = property(lambda self: self.size)
    bytes_moved = property(lambda self: 8 * self.size)

    def to_json(self):
        return {"key": self.key, "operation": "toy", **asdict(self)}

    @classmethod
    def from_json(cls, row):
        return cls(row["dtype"], row["size"])

    @classmethod
    def smallest(cls):
        return cls("f32", 4)

    @classmethod
    def expand(cls, row, where):
        fields.known(row, {"size"}, where)
        return (cls("f32", size) for size in fields.counts(row, where, "size"))

    def fit(self, dtypes, max_tokens):
        return self

    def make_inputs(self, device, seed):
        return Inputs(torch.randn(self.size, device=device))

    def make_reference(self, inputs):
        return Reference(inputs.x * 2)

PROBLEM = Double
"""
CONTENDERS = """
from flashmoe_tools.bench.contenders import Contender, Prepared, always

def contenders():
    return (
        Contender("ours", "ours", ("cpu",), always, lambda inputs: Prepared(lambda: inputs.x + inputs.x), ours=True),
        Contender("theirs", "theirs", ("cpu",), always, lambda inputs: Prepared(lambda: inputs.x * 2)),
    )
"""
SUITE = {
    "schema": 1,
    "name": "toy",
    "operation": "toy",
    "devices": ["cpu"],
    "contenders": ["ours", "theirs"],
    "baseline": "theirs",
    "repeats": 30,
    "cases": [{"size": [64, 128]}],
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "operations" / "toy"
    room.mkdir(parents=True)
    (room / "__init__.py").touch()
    (room / "problem.py").write_text(PROBLEMS)
    (room / "contenders.py").write_text(CONTENDERS)
    monkeypatch.setattr(operations, "__path__", [*operations.__path__, str(room.parent)])


@pytest.mark.usefixtures("toy")
def test_a_further_operation_is_timed_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 64})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(ceilings, "SECONDS", {"cpu": 0.01})
    monkeypatch.setattr("flashmoe_tools.bench.session.quiet_check", lambda *_: None)
    suite = parse_suite(SUITE, "toy.toml")
    report = Session(suite, Options("cpu"), default_registry("toy")).run(lambda _: None)
    assert [cell["case"]["key"] for cell in report.data["cells"]] == ["toy-64", "toy-128"]
    assert all(cell["verification"]["ours"]["passed"] for cell in report.data["cells"])
    assert report.verdict in (Verdict.PASS, Verdict.WARN)
    write_report(tmp_path / "toy.json", report)
    again = read_report(tmp_path / "toy.json")
    assert "toy-128" in bench_markdown(again)
    assert describe_case(again.data["cells"][0]["case"]) == "64 numbers, doubled"


@pytest.mark.usefixtures("toy")
def test_suites_of_two_operations_are_not_merged() -> None:
    attention = {"schema": 1, "name": "mine", "cases": [{"head_dim": 64, "batch": 1, "heads": 8, "seq": 128}]}
    with pytest.raises(ArgumentError, match="suites toy and mine are of toy and attention"):
        merge([parse_suite(SUITE, "toy.toml"), parse_suite(attention, "mine.toml")])


def test_an_operation_without_problems_is_named() -> None:
    with pytest.raises(ArgumentError, match="no operation 'toy'; known: attention"):
        operations.problem_type("toy")
