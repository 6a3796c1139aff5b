"""Tests that need a GPU: event and graph timing, forced backends, and a planted slowdown of three percent."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashmoe.__main__ import main
from flashmoe_tools.bench.ceilings import measure_ceilings
from flashmoe_tools.bench.contenders import Contender, Prepared, default_registry
from flashmoe_tools.bench.sampling import EventSampler, GraphSampler, call_time_ns, peak_bytes
from flashmoe_tools.bench.session import Options, Session
from flashmoe_tools.bench.suites import Suite, parse_suite
from flashmoe_tools.bench.verify import verify
from flashmoe_tools.operations.attention.reference import Inputs, make_inputs, make_reference
from flashmoe_tools.report import Verdict, read_report

pytestmark = pytest.mark.gpu
CYCLES = 200_000  # about 0.1 ms on any current GPU


def sdpa(inputs: Inputs) -> torch.Tensor:
    case = inputs.problem
    return torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=case.causal)


def contender(name: str, delay: int, *, ours: bool = False) -> Contender:
    """SDPA after ``delay`` cycles of a busy loop on the GPU."""

    def prepare(inputs: Inputs) -> Prepared:
        def call() -> torch.Tensor:
            torch.cuda._sleep(delay)
            return sdpa(inputs)

        return Prepared(call)

    return Contender(name, name, ("cuda",), lambda _: "", prepare, ours=ours)


def suite(contenders: list[str], **changes: object) -> Suite:
    table = {
        "schema": 1,
        "name": "gpu",
        "devices": ["cuda"],
        "contenders": contenders,
        "baseline": contenders[-1],
        "cases": [{"dtype": "f16", "head_dim": 64, "batch": 1, "heads": 8, "seq": 256}],
    }
    return parse_suite({**table, **changes}, "gpu")


@pytest.mark.parametrize(("delay", "verdicts"), [(1.03, {"SLOWER"}), (1.0, {"SAME", "AMBIGUOUS"})])
def test_three_percent_of_busy_loop_are_found_and_nothing_is_not(delay: float, verdicts: set[str]) -> None:
    registry = {
        one.name: one for one in (contender("ours", round(CYCLES * delay), ours=True), contender("base", CYCLES))
    }
    report = Session(suite(["ours", "base"]), Options("cuda"), registry).run(lambda _: None)
    row = report.data["cells"][0]["comparisons"][0]
    assert row["verdict"] in verdicts, row
    assert row["ratio"] == pytest.approx(1 / delay, abs=0.02)


@pytest.mark.parametrize("sampler", [EventSampler(flush=False), GraphSampler()], ids=["events", "graph"])
def test_samples_are_the_time_on_the_gpu(sampler: EventSampler | GraphSampler) -> None:
    value = torch.zeros(1, device="cuda")

    def call(cycles: int) -> Callable[[], torch.Tensor]:
        def one() -> torch.Tensor:
            torch.cuda._sleep(cycles)
            return value.add_(1)

        return one

    # Minima, repeated until both are undisturbed: tests running in parallel take time slices of the GPU, and a graph's
    # 10 ms span several slices.
    expected = pytest.approx(4.0, rel=0.1 if isinstance(sampler, EventSampler) else 0.4)
    prepared = [sampler.prepare(call(cycles)) for cycles in (CYCLES, 4 * CYCLES)]
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(20):
        for one, found in zip(prepared, samples, strict=True):
            found.extend(sampler.slot(one, 8))
        ratio = min(samples[1]) / min(samples[0])
        if ratio == expected:
            break
    assert ratio == expected


def test_the_call_is_timed_apart_from_the_gpu() -> None:
    def long_kernel() -> torch.Tensor:
        torch.cuda._sleep(100 * CYCLES)
        return torch.empty(0)

    assert (
        sorted(call_time_ns(long_kernel, "cuda"))[4] < 1_000_000
    )  # the kernel takes milliseconds, its launch does not


def test_peak_memory_is_that_of_one_call() -> None:
    size = 64 * 2**20

    def call() -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    assert peak_bytes(call, "cuda") == pytest.approx(size, rel=0.01)


def test_ceilings_are_plausible() -> None:
    found = measure_ceilings("cuda", ["f16"])
    assert 5.0 < found.matmul_tflops["f16"] < 20_000.0
    assert 100.0 < found.copy_gbps < 50_000.0


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math"])
def test_a_forced_backend_is_right_or_refuses(name: str) -> None:
    inputs = make_inputs(suite(["sdpa-math"]).cases[0], "cuda", seed=0)
    one = default_registry()[name]
    with one.context():
        try:
            outcome = verify(one.prepare(inputs), inputs, make_reference(inputs))
        except RuntimeError as error:
            pytest.skip(f"{name} refuses on this GPU: {error}")
    assert outcome.passed, outcome


@pytest.mark.parametrize("timing", ["events", "graph"])
def test_the_program_times_ours_beside_torch(tmp_path: Path, timing: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        f'schema = 1\nname = "mine"\ndevices = ["cuda"]\ntiming = "{timing}"\nrepeats = 30\nblock = 3\n'
        'contenders = ["flashmoe", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient"]\n'
        '[[cases]]\ndtype = "f16"\nhead_dim = 64\ncausal = [false, true]\nbatch = 2\nheads = 4\nseq = [128, 1024]\n'
    )
    outputs = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert main(["bench", "--suite", str(path), "--device", "cuda", *outputs]) == 0
    report = read_report(tmp_path / "a.json")
    assert report.verdict in (Verdict.PASS, Verdict.WARN)
    for cell in report.data["cells"]:
        assert cell["timing"] == timing
        assert cell["summaries"]["flashmoe"]["samples"] == 30
        assert cell["comparisons"]
        assert cell["call_cpu_ns"]["flashmoe"]
        assert cell["peak_bytes"]["flashmoe"] > 0
    assert report.environment["gpu"]["name"]
