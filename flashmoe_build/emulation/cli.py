"""``python -m flashmoe_build.emulation``: the suite, or one kernel on one problem when debugging."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashmoe.errors import ArgumentError, ExitCode, FlashmoeError
from flashmoe_build.emulation.build import Options, compiler
from flashmoe_build.emulation.cases import Case, is_causal, is_huge, kernels, matching, suite
from flashmoe_build.emulation.changed import find_changes, quick_cases, stamp, variants
from flashmoe_build.emulation.machine import TENSOR_CORES, AsyncPolicy
from flashmoe_build.emulation.runs import Runs, run_cases, summarised
from flashmoe_tools.bench.stopping import stop_signals
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now, write_report
from flashmoe_tools.tables import load_tables

POLICIES = {
    "seed": AsyncPolicy.FROM_SEED,
    "lazy": AsyncPolicy.LAZY,
    "eager": AsyncPolicy.EAGER,
    "random": AsyncPolicy.RANDOM,
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False, prog="python -m flashmoe_build.emulation", description=__doc__)
    made.add_argument("--kernel", default="", metavar="TEXT", help="the label of a kernel, or a part of some (all)")
    made.add_argument("--list", action="store_true", help="print the labels and stop")
    made.add_argument("--mask", choices=("full", "causal"), help="one mask only")
    made.add_argument("--problem", metavar="NAME", help="one problem of a kernel's suite")
    made.add_argument("--huge", action="store_true", help="the last block of a problem whose offsets pass 2^31")
    dense = made.add_argument_group("one problem of dense attention instead of the suite")
    dense.add_argument("--shape", metavar="SHAPE", help="sizes, as b1.h2.kv1.q65.k65.d64")
    dense.add_argument("--layout", choices=("bhsd", "bshd", "rows", "far"), default="bhsd", help="of the tensors")
    dense.add_argument("--values", default="normal", metavar="NAME", help="what the tensors hold (normal)")
    dense.add_argument("--data-seed", type=int, default=0, metavar="N", help="of the random inputs")
    dense.add_argument("--splits", type=int, help="blocks that share a query tile's keys (split kernels)")
    dense.add_argument("--no-lse", action="store_true", help="the log-sum-exp is not wanted")
    dense.add_argument("--no-counter", action="store_true", help="no tile counter (persistent kernels)")
    made.add_argument("--seed", type=int, help="seed of interleaving and timing (in the suite each case has its own)")
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="N seeds, from --seed on")
    made.add_argument("--async-policy", choices=list(POLICIES), default="seed", help="when work in flight takes effect")
    made.add_argument("--core", choices=list(TENSOR_CORES), help="whose tensor cores add (the family's own)")
    made.add_argument("--blocks", type=int, default=2, metavar="N", help="thread blocks that run interleaved")
    made.add_argument("--no-races", action="store_true", help="no race reports: see what the wrong result would be")
    made.add_argument("--sanitize", default="", metavar="WORDS", help="address, undefined or address,undefined")
    made.add_argument(
        "--changed", nargs="?", const="", metavar="COMMIT", help="kernels that differ from COMMIT (the upstream branch)"
    )
    made.add_argument("--quick", action="store_true", help="every second problem, on one kernel of each variant")
    made.add_argument("--seconds", type=float, metavar="S", help="start no run after this long; say what was left out")
    made.add_argument("--json", type=Path, help="write a report")
    return made


def selected_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the arguments name, with every seed."""
    masks = (False, True) if arguments.mask is None else (arguments.mask == "causal",)
    if arguments.shape is None:
        cases = [
            case
            for case in suite(load_tables(), arguments.kernel, masks, whole=arguments.problem is not None)
            if (is_huge(case.problem) or not arguments.huge)
            and (arguments.problem is None or case.problem.name == arguments.problem)
        ]
    else:
        cases = [case for case in _custom_cases(arguments) if is_causal(case.problem) in masks]
    return [
        Case(case.kernel, case.problem, (case.seed if arguments.seed is None else arguments.seed) + offset)
        for case in cases
        for offset in range(arguments.seeds)
    ]


def _custom_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """The problem that --shape and similar options describe; invalid values end the program like other usage errors."""
    for kernel in matching(load_tables(), arguments.kernel):
        if kernel.runner is None or kernel.runner.custom is None:
            continue
        try:
            yield from (Case(kernel, problem, 0) for problem in kernel.runner.custom(kernel.unit, arguments))
        except ArgumentError as error:
            parser().error(str(error))


def with_sanitizer(words: str) -> None:
    """Restarts this program with AddressSanitizer's runtime preloaded, because it must be loaded before everything else."""
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


def chosen_cases(arguments: argparse.Namespace) -> tuple[list[Case], Check | None]:
    """The cases to run, and with --changed the check that explains the choice. No cases but a check: nothing differs, or all have passed."""
    if arguments.changed is None and not arguments.quick:
        return selected_cases(arguments), None
    named = matching(load_tables(), arguments.kernel)
    if arguments.changed is None:
        return list(quick_cases(variants(named))), None
    changes = find_changes(arguments.changed)
    chosen = tuple(kernel for kernel in changes.kernels if kernel in named)
    than = (
        f"from commit {changes.base}"
        if changes.base
        else "as far as is known: there is no upstream commit to compare with"
    )
    check = Check("changed kernels", Verdict.PASS, f"{len(chosen)} of {len(named)} differ {than}")
    if not arguments.quick:
        labels = {kernel.label for kernel in chosen}
        return [case for case in selected_cases(arguments) if case.kernel.label in labels], check
    new = [kernel for kernel in variants(chosen) if not stamp(kernel.unit, Options()).exists()]
    return list(quick_cases(new)), check


def checks_of(arguments: argparse.Namespace, runs: Runs, chosen: Check | None) -> tuple[Check, ...]:
    """The report's checks: one per run, or one per kernel if there are many runs; then one for what did not run."""
    many = arguments.seeds > 1 or arguments.quick or arguments.changed is not None
    checks = summarised(runs.cases, runs.checks) if many else list(runs.checks)
    if chosen is not None:
        checks.insert(0, chosen)
    left = len(runs.cases) - len(runs.checks)
    if left:
        found = f"{left} of {len(runs.cases)} runs, {len(runs.not_reached)} kernels not at all: {runs.stopped}"
        verdict = Verdict.FAIL if runs.interrupted else Verdict.WARN
        step = "./nox -s emulate" + ("" if arguments.changed is None else " -- --changed")
        checks.append(Check("not run", verdict, found, "all of them", next_step=step))
    return tuple(checks)


def print_summary(runs: Runs, seconds: float) -> None:
    for line in runs.summary():
        print(line)
    failed = sum(check.verdict is Verdict.FAIL for check in runs.checks)
    rate = runs.totals["multiply_adds"] / max(1, runs.totals["launch_microseconds"])
    left = f" of {len(runs.cases)}: {runs.stopped}" if runs.stopped else ""
    print(
        f"{len(runs.checks)} runs{left}, {failed} failed, {seconds:.0f} s; "
        f"{rate:.0f} million emulated multiply-adds a second and core"
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
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
        cases, chosen = chosen_cases(arguments)
        if not cases and chosen is None:
            print(f"no kernel matches {arguments.kernel!r}; --list prints the labels", file=sys.stderr)
            return ExitCode.NOTHING_CHECKED
        with stop_signals():
            until = None if arguments.seconds is None else begin + arguments.seconds
            runs = run_cases(cases, Options(sanitize=arguments.sanitize), changes, until)
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    if arguments.quick and not arguments.no_races:
        for case in runs.passed_kernels:
            stamp(case.kernel.unit, Options()).touch()
    seconds = time.monotonic() - begin
    if chosen is not None:
        print(f"changed kernels: {chosen.found}")
    print_summary(runs, seconds)
    report = Report(
        "emulation",
        checks_of(arguments, runs, chosen),
        data={
            "runs": len(runs.checks),
            "totals": runs.totals,
            "compiler": compiler()[1],
            "sanitize": arguments.sanitize,
        },
        environment=host_environment(),
        command=tuple(Path(word).name if os.sep in word else word for word in sys.argv),
        started=started,
        seconds=seconds,
    )
    if arguments.json is not None:
        write_report(arguments.json, report)
    return ExitCode.INTERRUPTED if runs.interrupted else report.exit_code
