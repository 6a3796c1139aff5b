"""Profiles: the profiler's table, the rules applied to it, and the output without a profiler. ncu is a script here."""

import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ArgumentError, DriverError, ReportError
from flashmoe_tools.operations import problem_from_key
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.profile.collect import collect, find_ncu, last_call, ncu_command
from flashmoe_tools.profile.diagnose import diagnose, load_rules, parse_rules
from flashmoe_tools.profile.difference import render
from flashmoe_tools.profile.metrics import derive, fields, metric_names, parse_csv
from flashmoe_tools.profile.resources import build_facts, slowest_case, timing_facts
from flashmoe_tools.profile.target import WARM_UP_CALLS
from flashmoe_tools.report import Check, Report, Verdict, read_report, write_report
from tests.bench.synthetic import synthetic_report

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# name: (unit, value) as the profiler prints them; the kernel is latency bound: it waits for loads while memory is not busy.
TABLE = {
    "gpu__time_duration.sum": ("nsecond", "1,234,500"),
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": ("%", "31.50"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "12.25"),
    "lts__t_sector_hit_rate.pct": ("%", "88"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "12.4"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "12.5"),
    "launch__waves_per_multiprocessor": ("", "7.76"),
    "launch__registers_per_thread": ("register/thread", "253"),
    "launch__occupancy_limit_registers": ("block", "2"),
    "launch__occupancy_limit_shared_mem": ("block", "3"),
    "launch__occupancy_limit_warps": ("block", "16"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("", "1,000"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", "50,000"),
    "smsp__inst_executed_op_local.sum": ("inst", "0"),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ("%", "n/a"),
    STALL.format("long_scoreboard"): ("inst", "3.0"),
    STALL.format("barrier"): ("inst", "0.5"),
    STALL.format("selected"): ("inst", "1.0"),
    STALL.format("math_pipe_throttle"): ("inst", "0.5"),
}
KERNEL = "flashmoe_attention_forward_sm80_bf16_d128_full"


def table(launches: int = 1, kernels: tuple[str, ...] = (KERNEL,), **changes: str) -> str:
    """``launches`` of the kernels in turn; each takes half as long as the previous one."""
    rows = {name: (unit, changes.get(name, value)) for name, (unit, value) in TABLE.items()}
    quote = lambda words: ",".join(f'"{word}"' for word in words)  # noqa: E731
    lines = ["==PROF== Connected to process 7", '==PROF== Profiling "x": 0%....100% - 20 passes']
    lines.append(quote(["ID", "Kernel Name", *rows]))
    lines.append(quote(["", "", *(unit for unit, _ in rows.values())]))
    for number in range(launches):
        at = number % len(kernels)
        whole = float(rows["gpu__time_duration.sum"][1].replace(",", ""))
        values = {name: value for name, (_, value) in rows.items()} | {"gpu__time_duration.sum": f"{whole / 2**at}"}
        lines.append(quote([str(number), kernels[at], *values.values()]))
    return "\n".join(lines) + "\n"


def test_the_table_becomes_numbers_in_fixed_units() -> None:
    launch = parse_csv(table())[0]
    assert launch.kernel == KERNEL
    values = launch.values
    assert values["duration_us"] == pytest.approx(1234.5)
    assert values["bank_conflicts"] == 1000.0
    assert values["conflict_share"] == pytest.approx(0.02)
    assert values["limited_by_registers"] == 1.0
    assert values["limited_by_shared_memory"] == 0.0
    assert values["wave_fill"] == pytest.approx(7.76 / 8)
    assert "exp_percent" not in values  # n/a is missing, not zero
    assert sum(launch.stalls.values()) == pytest.approx(1.0)
    assert values["stall_long_scoreboard_share"] == pytest.approx(0.75)  # "selected" is not a reason to wait


@pytest.mark.parametrize(
    ("unit", "text", "expected"), [("ns", "1500", 1.5), ("usecond", "1.5", 1.5), ("msecond", "2", 2000.0)]
)
def test_time_units(unit: str, text: str, expected: float) -> None:
    csv = f'"ID","Kernel Name","gpu__time_duration.sum"\n"","","{unit}"\n"0","k","{text}"\n'
    assert parse_csv(csv)[0].values["duration_us"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "LibraryNotLoaded"),
        ('"ID","Kernel Name"\n"",""\n', "no kernel matched"),
    ],
)
def test_a_profile_without_a_launch_is_an_error(text: str, words: str) -> None:
    with pytest.raises(ReportError, match=words):
        parse_csv(text)


def test_the_diagnosis_names_its_rule_and_its_numbers() -> None:
    found = diagnose(parse_csv(table())[0].values)
    assert found[0].rule == "load-latency"
    assert "stall_long_scoreboard_share 0.75 > 0.3" in found[0].evidence
    assert [one.rule for one in found] == ["load-latency", "occupancy-registers"]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"local_requests": 4.0, "tensor_percent": 90.0}, "spills"),
        ({"spill_bytes": 8.0}, "spills-built"),
        ({"duration_us": 4.0}, "launch-bound"),
        ({"waves": 0.5}, "tail"),
        ({"waves": 1.1, "wave_fill": 0.55}, "last-wave"),
        ({"tensor_percent": 80.0}, "tensor-bound"),
        ({"exp_percent": 75.0}, "exp-bound"),
        ({"memory_percent": 85.0}, "memory-bound"),
        ({"conflict_share": 0.3}, "bank-conflicts"),
        ({"stall_barrier_share": 0.4}, "barrier-stalls"),
        ({"stall_math_share": 0.4}, "tensor-latency"),
        ({"stall_wait_share": 0.6}, "fixed-latency"),
        ({"occupancy_possible_percent": 25.0, "limited_by_shared_memory": 1.0}, "occupancy-shared-memory"),
        ({"share_of_matmul": 0.2, "share_of_copy": 0.1, "on_gpu": 1.0}, "far-from-both-ceilings"),
        ({"share_of_matmul": 0.2, "share_of_copy": 0.1, "on_gpu": 0.0}, "far-from-both-ceilings-cpu"),
        ({"share_of_matmul": 0.9, "share_of_copy": 0.1}, "near-the-product"),
        ({"share_of_matmul": 1.57, "share_of_copy": 0.1}, "past-the-product"),
        ({"share_of_matmul": 0.1, "share_of_copy": 0.8}, "near-the-copy"),
    ],
)
def test_each_rule_fires_on_its_numbers_alone(values: dict[str, float], rule: str) -> None:
    assert [found.rule for found in diagnose(values)][0] == rule  # noqa: RUF015
    assert diagnose({}) == ()


def test_every_rule_speaks_of_numbers_that_exist_and_can_fire() -> None:
    known = {field.name for field in fields()}
    known |= {"spill_bytes", "share_of_matmul", "share_of_copy", "on_gpu"}
    known |= set(
        derive({"shared_wavefronts": 1.0, "waves": 1.0, "limit_registers": 1.0, "limit_shared_memory": 1.0}, {"a": 1.0})
    )
    for rule in load_rules():
        assert {name for name, _, _ in rule.when} <= known, rule.id
        steps = {"<": -1e-3, ">": 1e-3, "=": 0.0}
        assert rule.fires({name: bound + steps[sign] for name, sign, bound in rule.when}), rule.id
        assert rule.says
        assert rule.do
    with pytest.raises(ArgumentError, match="conditions are"):
        parse_rules({"rule": [{"id": "x", "when": [["a", "~", 1]], "says": "", "do": ""}]})


@pytest.fixture
def fake_ncu(tmp_path: Path) -> Callable[[str], str]:
    """A fake ncu: it checks its arguments, then prints the given text."""

    def make(body: str) -> str:
        path, program = tmp_path / "ncu", tmp_path / "ncu.py"
        program.write_text(f"import sys\nassert '--clock-control' in sys.argv, sys.argv\n{body}\n")
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')  # a shebang allows no spaces
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def test_the_last_call_is_taken_after_warm_up(fake_ncu: Callable[[str], str]) -> None:
    launches = collect(fake_ncu(f"print({table(8)!r})"), "bf16-d64-full-b1-h8-s128")
    assert len(launches) == 8 // (WARM_UP_CALLS + 1)
    assert len(last_call(launches[:1])) == 1


def test_a_metric_that_the_profiler_does_not_know_is_left_out(fake_ncu: Callable[[str], str]) -> None:
    missing = metric_names()[2]
    refuse = f"print('==ERROR== Failed to find metric {missing}'); sys.exit(1)"
    body = f"if {missing!r} in sys.argv[sys.argv.index('--metrics') + 1].split(','):\n    {refuse}\nprint({table(4)!r})"
    assert collect(fake_ncu(body), "bf16-d64-full-b1-h8-s128")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('==ERROR== ERR_NVGPUCTRPERM'); sys.exit(1)", "only administrators"),
        ("print('==ERROR== out of luck', file=sys.stderr); sys.exit(9)", "ended with 9: ==ERROR== out of luck"),
    ],
)
def test_a_profiler_that_fails_is_quoted(fake_ncu: Callable[[str], str], body: str, words: str) -> None:
    with pytest.raises(DriverError, match=words):
        collect(fake_ncu(body), "bf16-d64-full-b1-h8-s128")


def test_ncu_is_asked_to_leave_the_clocks_alone() -> None:
    command = ncu_command("ncu", "KEY", ["a", "b"])
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[-1] == "KEY"
    assert "a,b" in command
    assert find_ncu("no-such-profiler") is None


@pytest.mark.parametrize("key", ["", "bf16", "fp8-d64-full-b1-h8-s128", "bf16-d64-maybe-b1-h8-s128"])
def test_a_name_that_is_no_case_is_refused(key: str) -> None:
    with pytest.raises(ArgumentError, match="is not a case key"):
        AttentionProblem.from_key(key)


BUILD = {
    "units": [
        {
            "name": f"u{head_dim}",
            "target": target,
            "kernels": [
                {
                    "symbol": f"flashmoe_attention_forward_sm80_bf16_d{head_dim}_{mask}",
                    "registers": 100 + head_dim,
                    "stack": 0,
                    "spill_stores": 0,
                    "spill_loads": 16 if head_dim == 256 else 0,
                    "static_shared": 0,
                }
                for mask in ("full", "causal")
            ],
        }
        for head_dim in (64, 128, 256)
        for target in ("sm_80", "sm_90a")
    ]
}


def test_the_resource_table_gives_the_narrowest_kernel_that_holds_the_case() -> None:
    symbol, facts = build_facts(BUILD, AttentionProblem.from_key("bf16-d80-causal-b1-h8-s128"))
    assert symbol == "flashmoe_attention_forward_sm80_bf16_d128_causal"
    assert facts["registers"] == 228.0
    assert build_facts(BUILD, AttentionProblem.from_key("bf16-d80-causal-b1-h8-s128"), "sm_75") == ("", {})
    assert (
        diagnose(build_facts(BUILD, AttentionProblem.from_key("bf16-d256-full-b1-h8-s128"))[1])[0].rule
        == "spills-built"
    )


def test_timings_of_the_slowest_case() -> None:
    bench = synthetic_report(speeds={"flashmoe": 0.2, "sdpa-flash": 0.5}).data
    case = slowest_case(bench)
    facts = timing_facts(bench, case)
    worst = next(row for row in bench["aggregates"])
    assert case.key == worst["worst_case"]
    assert facts["ratio"] == pytest.approx(worst["worst"])
    assert facts["call_cpu_us"] == 12.5
    assert 0.0 < facts["launch_share"] <= 1.0
    with pytest.raises(ReportError, match="--case"):
        slowest_case(synthetic_report(speeds={"sdpa-flash": 0.5, "sdpa-cudnn": 0.5}).data)


def profile(folder: Path, *words: str) -> int:
    return main(["profile", "--bench", str(folder / "bench.json"), "--build", str(folder / "build.json"), *words])


def test_the_program_with_and_without_a_profiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = synthetic_report(speeds={"flashmoe": 0.2, "sdpa-flash": 0.5})
    ceilings = {**bench.data["ceilings"], "matmul_of": {"bf16": "bf16 8192 x 8192 x 8192"}}
    write_report(tmp_path / "bench.json", replace(bench, data={**bench.data, "ceilings": ceilings}))
    write_report(tmp_path / "build.json", Report("build", (Check("b", Verdict.PASS),), BUILD))
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    assert profile(tmp_path, "--ncu", "no-such-profiler", "--json", str(a)) == 0
    text = capsys.readouterr().out
    assert "SKIP profiler" in text
    assert "diagnosis: neither arithmetic nor memory" in text
    assert "of the fastest matrix product that the benchmark measured (bf16 8192 x 8192 x 8192)" in text
    (tmp_path / "raw.csv").write_text(table())
    assert profile(tmp_path, "--csv", str(tmp_path / "raw.csv"), "--json", str(b)) == 0
    assert "diagnosis: warps wait for loads although memory is not busy" in capsys.readouterr().out
    assert read_report(b).data["findings"][0]["rule"] == "load-latency"
    assert main(["profile", "--compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert "new: load-latency" in text
    assert "tensor_percent" in text


BACKWARD = (
    "flashmoe_attention_backward_dkv_sm90_bf16_d128_causal",
    "flashmoe_attention_backward_dq_sm90_bf16_d128_causal",
)
MOE = (
    "flashmoe_grouped_gemm_gated_sm90_bf16", "flashmoe_grouped_gemm_sm90_bf16", "flashmoe_moe_sort_sm80",
    "flashmoe_moe_combine_sm80_bf16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "kernels", "operation"),
    [
        ("backward-bf16-d128-causal-b4-h16-s4096", BACKWARD, "attention_backward"),
        ("training-bf16-d64-full-b1-h8-s128", (KERNEL, *BACKWARD), "attention_training"),
        ("bf16-e128k8-h2048i768-t512", MOE, "moe"),
        ("backward-bf16-e128k8-h2048i768-t8192", MOE[::-1], "moe_backward"),
    ],
)
def test_an_operation_of_several_kernels(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fake_ncu: Callable[[str], str],
    key: str,
    kernels: tuple[str, ...],
    operation: str,
) -> None:
    ncu = fake_ncu(f"assert sys.argv[-1] == {key!r}\nprint({table(len(kernels) * (WARM_UP_CALLS + 1), kernels)!r})")
    path = tmp_path / "p.json"
    assert profile(tmp_path, "--ncu", ncu, "--case", key, "--json", str(path)) == 0
    data = read_report(path).data
    assert data["case"]["operation"] == operation
    assert [row["kernel"] for row in data["launches"]] == list(kernels)
    assert data["kernel"] == kernels[0]
    assert data["values"]["duration_us"] == pytest.approx(1234.5)
    assert data["values"]["call_us"] == pytest.approx(sum(1234.5 / 2**at for at in range(len(kernels))))
    text = capsys.readouterr().out
    assert f"{len(kernels)} kernels in a call" in text
    assert all(f"{kernel}  load-latency" in text for kernel in kernels)


@pytest.mark.parametrize(
    ("key", "symbol"),
    [
        ("backward-bf16-d80-causal-b1-h8-s128", "flashmoe_attention_backward_dkv_sm80_bf16_d128_causal"),
        ("bf16-e4k2-h64i64-t16", "flashmoe_grouped_gemm_gated_sm80_bf16"),
        ("backward-bf16-e4k2-h64i64-t16", "flashmoe_grouped_gemm_weight_gradient_sm80_bf16"),
        ("step-bf16-l8-w2048-h16kv4-f5632-v32000-b2-s4096", ""),
    ],
)
def test_the_resource_table_gives_the_heaviest_kernel_of_an_operation(key: str, symbol: str) -> None:
    (first, *_) = BUILD["units"]
    numbers = {name: value for name, value in first["kernels"][0].items() if name != "symbol"}  # type: ignore[index]
    symbols = [
        *(f"attention_backward_{one}_sm80_bf16_d{dim}_{mask}" for one in ("dq", "dkv") for dim in (64, 128) for mask in ("full", "causal")),
        *(f"grouped_gemm{kind}_sm80_bf16" for kind in ("", "_gated", "_gated_backward", "_gated_few_rows", "_weight_gradient")),
    ]  # fmt: skip
    build = {"units": [{"target": "sm_80", "kernels": [{**numbers, "symbol": f"flashmoe_{name}"} for name in symbols]}]}
    assert build_facts(build, problem_from_key(key))[0] == symbol


def test_the_slowest_case_may_be_of_any_operation() -> None:
    case = slowest_case(synthetic_report("llm-train", speeds={"flashmoe": 0.2, "sdpa-flash": 0.5}).data)
    assert case.operation == "attention_backward"
    assert problem_from_key(case.key) == case
    with pytest.raises(ArgumentError, match=r"'x' is not a case key; an example .*: .*backward-.*step-"):
        problem_from_key("x")


def test_nothing_to_look_at_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(tmp_path, "--ncu", "no-such-profiler", "--case", "bf16-d64-full-b1-h8-s128") == 1
    assert (
        "FAIL numbers: no report of this case\n  next: name one (--csv, --bench or --build FILE)"
        in capsys.readouterr().out
    )


def test_a_wrong_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(tmp_path / "bench.json", Report("audit", (Check("b", Verdict.PASS),)))
    assert profile(tmp_path) == 1
    assert "expected 'bench'" in capsys.readouterr().err


def test_differences_name_what_moved() -> None:
    finding = {"rule": "tail", "says": "the grid does not fill the GPU"}
    a = {"values": {"x": 1.0, "y": 2.0, "gone": 1.0}, "findings": [finding]}
    b = {"values": {"x": 1.01, "y": 3.0}, "findings": []}
    lines = render(a, b).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["y", "gone", "gone:"]
    assert "+50.0%" in lines[1]
    assert "no number changed" in render(b, b)
