"""Each instruction of the emulated machine does what it should, and each misuse is a failure of the right kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from flashmoe_build.emulation.machine import TENSOR_CORES, LaunchReport, Settings

if TYPE_CHECKING:
    from tests.emulation.conftest import Machine

SEEDS = range(6)  # two of each policy for work in flight


def failure_kind(report: LaunchReport) -> str:
    return "none" if report.failure is None else report.failure.kind


def words(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int32)


# ---- generic accesses ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
def test_exchange(machine: Machine, seed: int) -> None:
    given, out = words(128), torch.zeros(128, dtype=torch.int32)
    report, _ = machine.run(
        "exchange", given, out, threads=64, shared=256, grid=2, size=64, settings=Settings(seed=seed)
    )
    assert report.failure is None, report.failure
    assert torch.equal(out, given + 1)


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (1, {"out_of_bounds"}),
        (2, {"misaligned"}),
        (3, {"plain_dereference"}),
        (4, {"plain_dereference"}),
        (5, {"out_of_bounds"}),
        (6, {"race"}),
        (7, {"uninitialised_read"}),
        (8, {"race", "uninitialised_read"}),
        (9, {"global_race"}),
        (10, {"read_only"}),
        (11, {"uninitialised_read"}),
        (12, {"undefined"}),
        (13, {"undefined"}),
        (14, {"undefined"}),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_exchange_faults(machine: Machine, seed: int, fault: int, kinds: set[str]) -> None:
    given, out = words(128), torch.zeros(128, dtype=torch.int32)
    report, _ = machine.run(
        "exchange", given, out, threads=64, shared=256, grid=2, fault=fault, size=128, settings=Settings(seed=seed)
    )
    assert failure_kind(report) in kinds


def test_a_failure_names_kernel_thread_and_call_site(machine: Machine) -> None:
    report, _ = machine.run(
        "exchange", words(128), torch.zeros(128, dtype=torch.int32), threads=64, shared=256, grid=2, fault=6, size=128
    )
    failure = report.failure
    assert failure is not None
    assert report.kernel == "exchange"
    assert failure.what == "st_shared_32"
    assert failure.file.endswith(".cpp")
    assert failure.line > 0
    assert failure.function == "exchange"
    assert failure.warp == failure.thread // 32
    assert failure.lane == failure.thread % 32
    assert failure.block in (0, 1)
    assert "thread" in failure.message  # the access before it
    assert "st_shared_32" in failure.message


def test_the_same_seed_gives_the_same_failure(machine: Machine) -> None:
    def once(seed: int) -> str:
        report, _ = machine.run(
            "exchange",
            words(128),
            torch.zeros(128, dtype=torch.int32),
            threads=64,
            shared=256,
            grid=2,
            fault=8,
            size=128,
            settings=Settings(seed=seed),
        )
        return str(report.failure)

    first = {seed: once(seed) for seed in SEEDS}
    assert first == {seed: once(seed) for seed in SEEDS}
    assert len(set(first.values())) > 1  # other seeds, other interleavings


@pytest.mark.parametrize("seed", SEEDS)
def test_warp_exchange(machine: Machine, seed: int) -> None:
    given, out = words(128), torch.zeros(128, dtype=torch.int32)
    report, _ = machine.run("warp_exchange", given, out, threads=32, shared=512, settings=Settings(seed=seed))
    assert report.failure is None, report.failure
    lanes = torch.arange(32)
    assert torch.equal(out.view(32, 4), given.view(32, 4)[(lanes ^ 3) ^ 5])


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (1, {"divergent_collective", "deadlock"}),
        (2, {"divergent_collective"}),
        (3, {"race", "uninitialised_read"}),
        (4, {"race"}),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_warp_exchange_faults(machine: Machine, seed: int, fault: int, kinds: set[str]) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    report, _ = machine.run(
        "warp_exchange", words(128), out, threads=32, shared=512, fault=fault, settings=Settings(seed=seed)
    )
    assert failure_kind(report) in kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives(machine: Machine, seed: int) -> None:
    out = torch.zeros(64, dtype=torch.float32)
    report, counter = machine.run("collectives", words(1), out, threads=32, shared=0, settings=Settings(seed=seed))
    assert report.failure is None, report.failure
    assert torch.equal(out[:32], torch.full((32,), 496.0))
    assert torch.equal(out[32:].view(torch.int32), torch.full((32,), 1 + 0 + 15, dtype=torch.int32))
    assert counter == 1  # exactly one lane is elected


@pytest.mark.parametrize("seed", SEEDS)
def test_matches(machine: Machine, seed: int) -> None:
    out = torch.zeros(96, dtype=torch.int32)
    report, _ = machine.run("matches", words(1), out, threads=32, shared=0, settings=Settings(seed=seed))
    assert report.failure is None, report.failure
    same = [sum(1 << lane for lane in range(2, 32, 5))] * 32
    assert (out[:32].long() & 0xFFFFFFFF).tolist() == same
    assert (out[32:64].long() & 0xFFFFFFFF).tolist() == [0xF0000001 + 5] * 32
    assert out[64:].tolist() == [sum(range(32)) - 32 * 20] * 32


# ---- cp.async ------------------------------------------------------------------------------------------------------
TILES, COPY_THREADS = 5, 64


def copy_ring(machine: Machine, fault: int, seed: int) -> tuple[LaunchReport, torch.Tensor, torch.Tensor]:
    given = words(TILES * COPY_THREADS * 4 - 2)  # the last 8 bytes do not exist
    out = torch.zeros(TILES * COPY_THREADS * 4, dtype=torch.int32)
    report, _ = machine.run(
        "copy_ring",
        given,
        out,
        threads=COPY_THREADS,
        shared=2 * 16 * COPY_THREADS,
        fault=fault,
        size=TILES,
        settings=Settings(seed=seed),
    )
    return report, given, out


@pytest.mark.parametrize("seed", SEEDS)
def test_copy_ring(machine: Machine, seed: int) -> None:
    report, given, out = copy_ring(machine, 0, seed)
    assert report.failure is None, report.failure
    assert torch.equal(out, torch.cat([given, torch.zeros(2, dtype=torch.int32)]))


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (1, {"race"}),
        (2, {"race", "uninitialised_read"}),
        (3, {"race"}),
        (4, {"misaligned"}),
        (5, {"out_of_bounds"}),
        (6, {"race"}),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_copy_ring_faults(machine: Machine, seed: int, fault: int, kinds: set[str]) -> None:
    report, _, _ = copy_ring(machine, fault, seed)
    assert failure_kind(report) in kinds


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (0, {"none"}),
        (1, {"race", "uninitialised_read"}),  # no wait
        (2, {"race", "uninitialised_read"}),  # an arrival that does not wait for the copies
        (3, {"race", "mbarrier_misuse"}),  # more arrivals than the barrier counts
        (4, {"race", "uninitialised_read"}),  # a copy after the arrival
    ],
)
def test_arrivals_of_copies(machine: Machine, seed: int, fault: int, kinds: set[str]) -> None:
    given, out = words(256), torch.zeros(256, dtype=torch.int32)
    report, _ = machine.run(
        "copy_arrivals", given, out, threads=64, shared=1040, fault=fault, settings=Settings(seed=seed)
    )
    assert failure_kind(report) in kinds
    assert fault != 0 or out.equal(given)


# ---- mma -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "dtype"), [("product_f16", torch.float16), ("product_bf16", torch.bfloat16)])
@pytest.mark.parametrize("fault", [0, 9])
def test_warp_product(machine: Machine, name: str, dtype: torch.dtype, fault: int) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 16), (16, 8)))
    out = torch.zeros(16, 8, dtype=torch.float32)
    given = torch.cat([a.flatten(), b.flatten()])
    report, _ = machine.run(name, given, out, threads=32, shared=768, fault=fault)
    assert report.failure is None, report.failure
    expected = a.double() @ b.double()
    # Products are exact; the sum is cut 25 bits below the largest of 17 terms, and to a float.
    assert (out.double() - expected).abs().max() < 17 * 2.0**-25 * 16 + expected.abs().max() * 2.0**-23
    assert report.statistics["matrix_products"] == (2 if fault == 9 and dtype is torch.float16 else 1)


def test_misaligned_ldmatrix(machine: Machine) -> None:
    given, out = torch.zeros(384, dtype=torch.float16), torch.zeros(128, dtype=torch.float32)
    report, _ = machine.run("product_f16", given, out, threads=32, shared=768, fault=1)
    assert failure_kind(report) == "misaligned"


def test_tensor_core_models_differ_only_in_the_last_bits(machine: Machine) -> None:
    generator = torch.Generator().manual_seed(5)
    given = torch.randn(384, generator=generator).half()
    results = {}
    for name, core in TENSOR_CORES.items():
        out = torch.zeros(128, dtype=torch.float32)
        report, _ = machine.run("product_f16", given, out, threads=32, shared=768, settings=Settings(core=core))
        assert report.failure is None
        results[name] = out
    assert not torch.equal(results["t4"], results["h100"])
    assert (results["t4"] - results["h100"]).abs().max() < 1e-4


# ---- barriers, registers, atomics ----------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers(machine: Machine, seed: int) -> None:
    out = torch.zeros(4 * 32, dtype=torch.int32)
    report, _ = machine.run(
        "named_barriers", words(1), out, threads=64, shared=128, size=4, settings=Settings(seed=seed)
    )
    assert report.failure is None, report.failure
    assert torch.equal(out.view(4, 32), torch.arange(4)[:, None].int() * 100 + torch.arange(32).int())


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (1, {"race", "barrier_misuse", "deadlock"}),
        (2, {"barrier_misuse"}),
        (3, {"barrier_misuse"}),
        (4, {"deadlock"}),
        (5, {"barrier_misuse"}),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_named_barrier_faults(machine: Machine, seed: int, fault: int, kinds: set[str]) -> None:
    out = torch.zeros(4 * 32, dtype=torch.int32)
    report, _ = machine.run(
        "named_barriers", words(1), out, threads=64, shared=128, size=4, fault=fault, settings=Settings(seed=seed)
    )
    assert failure_kind(report) in kinds
    if kinds == {"deadlock"}:
        assert report.failure is not None
        assert "wait in named_barrier_sync" in report.failure.message


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "kind"), [(0, "none"), (1, "race")])
def test_a_barriers_rounds_are_not_one(machine: Machine, seed: int, fault: int, kind: str) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    report, _ = machine.run(
        "barrier_rounds", words(1), out, threads=128, shared=128, fault=fault, settings=Settings(seed=seed)
    )
    assert failure_kind(report) == kind


@pytest.mark.parametrize(("fault", "kind"), [(0, "none"), (1, "deadlock"), (2, "deadlock"), (3, "register_budget")])
def test_registers(machine: Machine, fault: int, kind: str) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    for seed in SEEDS:
        report, _ = machine.run(
            "registers", words(1), out, threads=256, shared=0, fault=fault, settings=Settings(seed=seed)
        )
        assert failure_kind(report) == kind, report.failure


@pytest.mark.parametrize("fault", [0, 1, 2])
def test_a_late_lane_may_miss_a_phase(machine: Machine, fault: int) -> None:
    """Without a warp barrier, lane 0 lets the next phase pass before lane 31 has polled."""
    for seed in SEEDS:
        out = torch.zeros(32, dtype=torch.int32)
        report, _ = machine.run(
            "phases", words(1), out, threads=64, shared=16, size=6, fault=fault, settings=Settings(seed=seed)
        )
        allowed = {"phase_lapped", "deadlock"} if fault == 1 else {"none"}
        assert failure_kind(report) in allowed, report.failure


def test_counter_over_blocks(machine: Machine) -> None:
    out = torch.zeros(20, dtype=torch.int32)
    report, counter = machine.run("draw", words(1), out, threads=32, shared=0, grid=4, size=20)
    assert report.failure is None, report.failure
    assert counter == 24
    assert torch.equal(out, words(20))


@pytest.mark.parametrize(("fault", "kind"), [(0, "none"), (1, "global_race"), (2, "global_race")])
def test_dependent_launch(machine: Machine, fault: int, kind: str) -> None:
    for seed in SEEDS:
        out = torch.zeros(64, dtype=torch.int32)
        settings = Settings(seed=seed)
        report, _ = machine.run(
            "dependent", words(64), out, threads=64, shared=0, fault=fault, settings=settings, is_dependent=True
        )
        assert failure_kind(report) == kind
        assert kind != "none" or torch.equal(out, words(64))


def test_endless_kernel(machine: Machine) -> None:
    settings = Settings(step_limit=2000)
    report, _ = machine.run(
        "draw", words(1), words(1), threads=32, shared=0, grid=2, size=1, fault=1, settings=settings
    )
    assert failure_kind(report) == "step_limit"


# ---- mbarrier, TMA, wgmma ------------------------------------------------------------------------------------------
PIPELINES = [("pipeline_f16", torch.float16), ("pipeline_bf16_registers", torch.bfloat16)]


def run_pipeline(
    machine: Machine, name: str, dtype: torch.dtype, fault: int, seed: int
) -> tuple[LaunchReport, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((64, 5 * 64), (5 * 64, 64)))
    out = torch.full((64, 64), float("nan"), dtype=dtype)
    report = machine.pipeline(name, a, b, out, fault, Settings(seed=seed))
    return report, out, a.double() @ b.double()


def is_right(out: torch.Tensor, expected: torch.Tensor) -> bool:
    unit = 2.0**-8 if out.dtype is torch.bfloat16 else 2.0**-11
    return bool(((out.double() - expected).abs() <= unit * expected.abs() + 1e-4).all())


@pytest.mark.parametrize("fault", [0, 15, 27])
@pytest.mark.parametrize(("name", "dtype"), PIPELINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_pipeline(machine: Machine, seed: int, name: str, dtype: torch.dtype, fault: int) -> None:
    report, out, expected = run_pipeline(machine, name, dtype, fault, seed)
    assert report.failure is None, report.failure
    assert is_right(out, expected)


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (1, {"race", "mbarrier_misuse"}),
        (2, {"deadlock"}),
        (3, {"transaction_count", "deadlock"}),
        (4, {"deadlock"}),
        (5, {"misaligned"}),
        (6, {"deadlock"}),
        (7, {"race", "uninitialised_read"}),
        (8, {"wgmma_misuse"}),
        (9, {"wrong result"}),  # A from registers has no descriptor of A
        (10, {"race", "uninitialised_read", "out_of_bounds", "wrong result"}),
        (11, {"accumulator_touched"}),
        (12, {"race", "async_at_exit", "accumulator_touched", "operand_touched", "wrong result"}),
        (13, {"deadlock"}),
        (14, {"race", "mbarrier_misuse", "phase_lapped", "deadlock", "transaction_count"}),
        (16, {"wrong result"}),
        (17, {"proxy_fence_missing"}),
        (18, {"race", "uninitialised_read"}),
        (19, {"async_at_exit"}),
        (20, {"mbarrier_misuse"}),
        (21, {"mbarrier_misuse"}),
        (22, {"proxy_fence_missing"}),
        (23, {"race", "mbarrier_misuse"}),
        (24, {"mbarrier_misuse"}),
        (25, {"operand_touched"}),
        (26, {"proxy_fence_missing"}),
    ],
)
@pytest.mark.parametrize(("name", "dtype"), PIPELINES)
def test_pipeline_faults(machine: Machine, name: str, dtype: torch.dtype, fault: int, kinds: set[str]) -> None:
    if fault == (9 if name.endswith("registers") else 25):  # A is in the other place
        kinds = {"none"}
    for seed in SEEDS:
        report, out, expected = run_pipeline(machine, name, dtype, fault, seed)
        kind = failure_kind(report)
        if kind == "none" and not is_right(out, expected):
            kind = "wrong result"
        assert kind in kinds, f"seed {seed}: {report.failure}"
