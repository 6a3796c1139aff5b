"""What is recorded for the comparison with a GPU: every kernel run there, and everything that each launch writes."""

import io

import pytest
import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.hardware import OPERATIONS, TARGET, gpu_units, problems, record, unwritten
from flashmoe_build.emulation.on_gpu import totals, ulps
from flashmoe_build.emulation.parameters import structure
from flashmoe_tools.tables import Unit, load_tables

UNITS = {unit.name: unit for unit in gpu_units(load_tables(), "")}


def test_every_kernel_of_the_target_is_recorded() -> None:
    units = load_tables().units((TARGET,))
    assert set(UNITS) == {unit.name for unit in units if unit.row.operation in OPERATIONS}
    for unit in UNITS.values():
        masks = {"causal" if problem.causal else "full" for problem in problems(unit)}
        assert masks == set(unit.row.words.get("mask", ("full",)))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("attention_forward_sm90_f16_d64_full", {"out", "lse"}),
        ("attention_forward_sm80_bf16_d64_split", {"out_partial", "lse_partial"}),
        ("attention_combine_sm80_f16_d256", {"out", "lse"}),
    ],
)
def test_a_record_holds_the_launch(name: str, written: set[str]) -> None:
    unit: Unit = UNITS[name]
    problem = problems(unit)[0]
    found = record(unit, problem, "x.cubin")
    assert set(found["expected"]) == written
    for key in written:
        assert found["tensors"][key].shape == found["expected"][key].shape
        assert torch.isnan(found["tensors"][key]).all()
        assert not torch.isnan(found["expected"][key]).any()
    assert {pointer for _, pointer in found["pointers"]} == set(found["tensors"])
    params = structure(unit.row.descriptor.params, Options().roots()).from_buffer_copy(found["params"])
    assert params.num_splits == problem.splits
    assert params.q_stride.row == (0 if unit.row.operation == "attention_combine" else problem.shape.head_dim)
    assert found["symbol"].startswith(f"flashmoe_{name}".removesuffix("_full").removesuffix("_causal"))


def test_what_a_launch_must_write_takes_no_room_in_a_file() -> None:
    stream = io.BytesIO()
    torch.save(unwritten(torch.empty(512, 512)), stream)
    assert len(stream.getvalue()) < 4096


def test_distances_and_totals() -> None:
    left = torch.tensor([1.0, -0.0, float("nan"), 2.0])
    right = torch.tensor([1.0 + 2.0**-23, 0.0, float("nan"), 2.0])
    assert ulps(left, right).tolist() == [1, 0, 0, 0]
    row = {"values": 4, "bitwise_equal": 3, "within_1_ulp": 4, "max_ulp": 1, "max_abs": 1e-7}
    probe = {"name": "probe_rcp", "symbol": "probe_rcp", "d": row}
    total = totals([{"name": "a", "symbol": "a", "out": row}, {"name": "b", "symbol": "b", "out": row}, probe])
    assert total == {"out": {"launches": 2, "max_abs": 1e-7, "values": 8, "bitwise_equal": 6, "within_1_ulp": 8}}
