"""``python -m flashmoe_build.emulation``: the suite, or one kernel on one problem for a person who hunts a bug."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from flashmoe.errors import ExitCode, FlashmoeError
from flashmoe.tools.progress import Progress
from flashmoe.tools.report import Check, Report, Verdict, host_environment, utc_now, write_report
from flashmoe.tools.tables import load_tables
from flashmoe_build.emulation.attention import Outcome
from flashmoe_build.emulation.build import Options, compiler, jobs, kernel_library
from flashmoe_build.emulation.cases import Case, kernels, matching, run_case, suite
from flashmoe_build.emulation.machine import TENSOR_CORES, AsyncPolicy
from flashmoe_build.emulation.problem import Layout, Problem, Shape, Values

POLICIES = {
    "seed": AsyncPolicy.FROM_SEED,
    "lazy": AsyncPolicy.LAZY,
    "eager": AsyncPolicy.EAGER,
    "random": AsyncPolicy.RANDOM,
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m flashmoe_build.emulation", description=__doc__)
    made.add_argument("--kernel", default="", metavar="TEXT", help="the label of a kernel, or a part of some (all)")
    made.add_argument("--list", action="store_true", help="print the labels and stop")
    made.add_argument("--mask", choices=("full", "causal"), help="one mask only")
    made.add_argument("--shape", type=Shape.parse, help="one problem instead of the suite, as b1.h2.kv1.q65.k65.d64")
    made.add_argument("--problem", metavar="NAME", help="one problem of a mixture-of-experts kernel's suite")
    made.add_argument("--layout", choices=[layout.value for layout in Layout], default="bhsd", help="with --shape")
    made.add_argument("--values", choices=[values.value for values in Values], default="normal", help="with --shape")
    made.add_argument("--data-seed", type=int, default=0, metavar="N", help="with --shape: of the random inputs")
    made.add_argument("--splits", type=int, help="with --shape: blocks that share a query tile's keys (split kernels)")
    made.add_argument("--huge", action="store_true", help="the last block of a problem whose offsets pass 2^31")
    made.add_argument("--no-lse", action="store_true", help="with --shape: nobody wants the log-sum-exp")
    made.add_argument("--no-counter", action="store_true", help="with --shape: no tile counter (persistent kernels)")
    made.add_argument("--seed", type=int, help="interleaving and timing (the suite: each case has its own)")
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="N seeds, from --seed on")
    made.add_argument("--async-policy", choices=list(POLICIES), default="seed", help="when work in flight takes effect")
    made.add_argument("--core", choices=list(TENSOR_CORES), help="whose tensor cores add (the family's own)")
    made.add_argument("--blocks", type=int, default=2, metavar="N", help="thread blocks that run interleaved")
    made.add_argument("--no-races", action="store_true", help="no race reports: see what the wrong result would be")
    made.add_argument("--sanitize", default="", metavar="WORDS", help="address, undefined or address,undefined")
    made.add_argument("--json", type=Path, help="write a report")
    return made


def selected_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the arguments name, every seed of them."""
    masks = (False, True) if arguments.mask is None else (arguments.mask == "causal",)
    if arguments.shape is None:
        cases = [
            case
            for case in suite(load_tables(), arguments.kernel, masks, whole=arguments.problem is not None)
            if (case.problem.huge or not arguments.huge)
            and (arguments.problem is None or case.problem_name == arguments.problem)
        ]
    else:
        cases = [
            Case(kernel, _problem(arguments, kernel.unit.dtype, causal, bool(kernel.unit.row.options.get("split"))), 0)
            for kernel in matching(load_tables(), arguments.kernel)
            if arguments.shape.head_dim <= kernel.unit.row.axes["head_dim"]
            for causal in masks
            if ("causal" if causal else "full") in kernel.unit.row.words.get("mask", ("causal", "full"))
        ]
    return [
        Case(case.kernel, case.problem, (case.seed if arguments.seed is None else arguments.seed) + offset)
        for case in cases
        for offset in range(arguments.seeds)
    ]


def _problem(arguments: argparse.Namespace, dtype: str, causal: bool, is_split: bool) -> Problem:
    splits = arguments.splits or (2 if is_split else 1)
    return Problem(
        arguments.shape,
        dtype,
        causal,
        Layout(arguments.layout),
        Values(arguments.values),
        arguments.data_seed,
        splits,
        wants_lse=not arguments.no_lse,
        has_counter=not arguments.no_counter,
    )


def check_of(case: Case, outcome: Outcome) -> Check:
    if outcome.passed:
        return Check(case.identity, Verdict.PASS)
    return Check(
        case.identity,
        Verdict.FAIL,
        found=outcome.explain(),
        expected="no failure of the machine, and results within the fp64 bounds",
        why="the kernel is wrong, or correct only by luck of timing",
        next_step=case.command(),
    )


def summarised(cases: Sequence[Case], checks: Sequence[Check]) -> list[Check]:
    """Of many seeds: one check for all runs of a kernel that passed, and every run that failed."""
    runs = Counter(
        case.kernel.label for case, check in zip(cases, checks, strict=True) if check.verdict is Verdict.PASS
    )
    passed = [Check(label, Verdict.PASS, found=f"{count} runs without a failure") for label, count in runs.items()]
    return passed + [check for check in checks if check.verdict is not Verdict.PASS]


def run_cases(
    cases: Sequence[Case], options: Options, changes: dict[str, object]
) -> tuple[list[Check], dict[str, int]]:
    """Compiles what is new, ``jobs()`` at a time, then runs the cases one after another."""
    units = {case.kernel.label: case.kernel.unit for case in cases}
    with Progress("compiling for the CPU", len(units)) as progress, ThreadPoolExecutor(jobs()) as pool:
        futures = {pool.submit(kernel_library, unit, options): label for label, unit in units.items()}
        for future in as_completed(futures):
            future.result()
            progress.advance(futures[future])
    checks: list[Check] = []
    totals = {"matrix_products": 0, "warpgroup_products": 0, "multiply_adds": 0, "launch_microseconds": 0}
    with Progress("emulating", len(cases)) as progress:
        for case in cases:
            outcome = run_case(case, options, **changes)
            checks.append(check_of(case, outcome))
            for name in totals:
                totals[name] += outcome.report.statistics.get(name, 0)
            totals["launch_microseconds"] += int(outcome.report.seconds * 1e6)
            progress.advance(case.kernel.label)
            if not outcome.passed:
                print(f"FAIL {case.identity}\n{outcome.explain()}\nrepeat: {case.command()}", flush=True)
    return checks, totals


def with_sanitizer(words: str) -> None:
    """AddressSanitizer's runtime must be loaded before everything else: starts this program again with it."""
    if "address" not in words or os.environ.get("FLASHMOE_EMULATION_ASAN"):
        return
    path, _ = compiler()
    names = ("libasan.so", "libubsan.so") if "undefined" in words else ("libasan.so",)
    found = [
        subprocess.run([path, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in names
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:use_sigaltstack=0:handle_segv=0",
        "FLASHMOE_EMULATION_ASAN": "1",
    }
    command = [sys.executable, "-m", "flashmoe_build.emulation", *sys.argv[1:]]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(words)
    if arguments.list:
        print("\n".join(kernel.label for kernel in kernels(load_tables())))
        return ExitCode.OK
    with_sanitizer(arguments.sanitize)
    started, begin = utc_now(), time.monotonic()
    changes: dict[str, object] = {
        "policy": POLICIES[arguments.async_policy],
        "resident_blocks": arguments.blocks,
        "check_races": not arguments.no_races,
    }
    if arguments.core is not None:
        changes["core"] = TENSOR_CORES[arguments.core]
    try:
        cases = selected_cases(arguments)
        if not cases:
            print(f"no kernel matches {arguments.kernel!r}; --list prints the labels", file=sys.stderr)
            return ExitCode.NOTHING_CHECKED
        checks, totals = run_cases(cases, Options(sanitize=arguments.sanitize), changes)
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    seconds = time.monotonic() - begin
    failed = sum(check.verdict is Verdict.FAIL for check in checks)
    rate = totals["multiply_adds"] / max(1, totals["launch_microseconds"])
    print(
        f"{len(checks)} runs, {failed} failed, {seconds:.0f} s; {rate:.0f} million emulated multiply-adds a second and core"
    )
    report = Report(
        "emulation",
        tuple(checks if arguments.seeds == 1 else summarised(cases, checks)),
        data={"runs": len(checks), "totals": totals, "compiler": compiler()[1], "sanitize": arguments.sanitize},
        environment=host_environment(),
        command=tuple(Path(word).name if os.sep in word else word for word in sys.argv),
        started=started,
        seconds=seconds,
    )
    if arguments.json is not None:
        write_report(arguments.json, report)
    return report.exit_code
