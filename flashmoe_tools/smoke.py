"""A few small problems, compared with plain PyTorch: does the installed package compute attention on this machine?

    python -m flashmoe_tools.smoke [--quick] [--json FILE]

Sequence lengths around one tile (4 to 512, including 65: an index that ignores the tile fails there and not at 64). A
right answer only counts if a flashmoe kernel computed it.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe.errors import FlashmoeError
from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.problem import LSE_TOLERANCE, AttentionProblem
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now, write_report
from flashmoe_tools.streams import prepare_streams

LENGTHS = (4, 32, 64, 65, 128, 192, 256, 512)
QUICK_LENGTHS = (65,)
HEAD_DIM = 64
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
RAISED = "an error instead of an answer"
WHY = "an answer that differs from plain PyTorch's by more than rounding explains is wrong"


@dataclass(frozen=True)
class Case:
    """One problem: batch 1, 2 query heads, 1 key head, HEAD_DIM columns."""

    device: str
    dtype: str
    length: int
    causal: bool

    @property
    def name(self) -> str:
        return f"{self.device} {self.dtype} S={self.length} D={HEAD_DIM} {'causal' if self.causal else 'full'}"

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(self.length, self.length, HEAD_DIM, 2, 1, causal=self.causal, dtype=DTYPES[self.dtype])


def cases(devices: Sequence[tuple[str, Sequence[str]]], lengths: Sequence[int]) -> Iterator[Case]:
    for device, dtypes in devices:
        for dtype in dtypes:
            for length in lengths:
                for causal in (False, True):
                    yield Case(device, dtype, length, causal)


def judge(case: Case, outcome: Verification, kernel: str) -> Check:
    """PASS if the numbers are right and one of our kernels produced them."""
    expected = f"error at most {outcome.tolerance:.1e}, LSE within {LSE_TOLERANCE:g}"
    found = f"error {outcome.max_error:.1e}, LSE {outcome.lse_error or 0.0:.1e}, by {kernel or 'no kernel of ours'}"
    is_ours = kernel.startswith("cpu:" if case.device == "cpu" else "flashmoe_attention_")  # few rows are decoded
    if outcome.passed and is_ours:
        return Check(case.name, Verdict.PASS, found, expected)
    found = "; ".join(filter(None, (found, outcome.reason)))
    return Check(case.name, Verdict.FAIL, found, expected, WHY, "nox -s test -- tests/attention")


def available_devices() -> list[tuple[str, tuple[str, ...]]]:
    """(device, dtypes) that this machine can run."""
    import torch

    found: list[tuple[str, tuple[str, ...]]] = [("cpu", ("float32", "float16", "bfloat16"))]
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        found.append(("cuda", ("float16", "bfloat16") if capability >= (8, 0) else ("float16",)))
    return found


def solve(case: Case) -> tuple[Verification, str]:
    """Solves one problem; returns its comparison with the reference and the kernel that ran."""
    from flashmoe import _extension, attention

    inputs = case.problem.make_inputs(case.device, seed=case.length)
    reference = case.problem.make_reference(inputs)
    inputs.poison()
    out, lse = attention(inputs.q, inputs.k, inputs.v, causal=case.causal, return_lse=True)
    kernel = _extension.last_kernel()
    return reference.judge(out, lse), kernel


def check_case(case: Case) -> Check:
    try:
        return judge(case, *solve(case))
    except (FlashmoeError, RuntimeError) as error:
        from flashmoe.rules import translate

        cause = translate(error) or error
        found = f"{type(cause).__name__}: {cause}"
        return Check(case.name, Verdict.FAIL, found, "an answer", RAISED, "python -m flashmoe doctor")


def run(lengths: Sequence[int]) -> Report:
    """All cases that this machine can run; on a machine without a GPU a SKIP says so."""
    started, clock = utc_now(), time.monotonic()
    devices = available_devices()
    checks = tuple(check_case(case) for case in cases(devices, lengths))
    if all(device != "cuda" for device, _ in devices):
        checks += (Check("cuda", Verdict.SKIP, "no CUDA GPU here", "a GPU", "its kernels were not run"),)
    seconds = round(time.monotonic() - clock, 2)
    return Report(
        "smoke", checks, {"lengths": list(lengths)}, host_environment(), ("flashmoe_tools.smoke",), started, seconds
    )


def summarise(checks: Sequence[Check]) -> list[str]:
    """One line per device and dtype without errors; one per check that is not PASS."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(" ".join(check.name.split()[:2]), []).append(check)
    lines = []
    for name, group in groups.items():
        passed = sum(check.verdict is Verdict.PASS for check in group)
        if passed:
            lines.append(
                f"{Verdict.PASS}  {name}: {passed} of {len(group)} as plain PyTorch; the last: {group[-1].found}"
            )
        lines += [
            f"{check.verdict}  {check.name}: {check.found}" for check in group if check.verdict is not Verdict.PASS
        ]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_tools.smoke", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"S={QUICK_LENGTHS[0]} only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    prepare_streams()
    options = parser.parse_args(arguments)
    report = run(QUICK_LENGTHS if options.quick else LENGTHS)
    print("\n".join(summarise(report.checks)))
    if options.json:
        write_report(options.json, report)
    print(f"smoke {report.verdict}: {len(report.checks)} checks, {report.seconds:.1f} s")
    return int(report.exit_code)


if __name__ == "__main__":
    sys.exit(main())
