"""``python -m flashmoe bench``: the command line over suites, sessions, comparisons and the ratchet."""

import argparse
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashmoe.errors import ArgumentError, DeviceError, ExitCode
from flashmoe_tools.bench.suites import DEVICES, Suite, load_suite, suite_names
from flashmoe_tools.report import Report, typed_command, write_report, write_summary

SUSTAINED_REPEATS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite", action="append", metavar="NAME|FILE.toml", help=f"known: {', '.join(suite_names())}; repeatable"
    )
    parser.add_argument("--device", choices=("auto", *DEVICES), default="auto")
    parser.add_argument("--preset", default="auto", metavar="GPU", help="auto, none, T4, L4, A100 or H100")
    parser.add_argument("--contenders", metavar="A,B", help="instead of the suite's")
    parser.add_argument("--case", action="append", metavar="KEY", help="only these cases (keys as in reports)")
    parser.add_argument("--dtype", action="append", choices=("f32", "f16", "bf16"), help="only cases of this dtype")
    parser.add_argument("--repeats", type=int, metavar="N", help="samples per contender (300 in the full suites)")
    parser.add_argument("--warm", action="store_true", help="leave L2 as it is between calls")
    parser.add_argument(
        "--sustained",
        action="store_true",
        help="each sample is 0.4 s of calls back to back, recorded with clock and power",
    )
    parser.add_argument("--quick", action="store_true", help="the suite's quick cases within its quick time limit")
    parser.add_argument(
        "--time-budget", type=float, metavar="SECONDS", help="fit the samples into this time, at least 30 per contender"
    )
    parser.add_argument("--baseline-only", action="store_true", help="leave out our extension")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and orders")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="JSON without samples, for a repository to keep")
    parser.add_argument(
        "--render",
        type=Path,
        metavar="REPORT.json",
        help="write --markdown, --html and --summary of an old report or summary; with --ratchet hold it against the marks",
    )
    parser.add_argument(
        "--index", type=Path, metavar="FOLDER", help="write a page for each report in FOLDER, and an index"
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="print changes from A to B")
    parser.add_argument("--fail-on", choices=("slower", "changed", "not-same"), help="exit 1 when a comparison says so")
    parser.add_argument(
        "--ratchet", type=Path, metavar="FILE.toml|FOLDER", help="check a run against the marks of its GPU, by its name"
    )


def run(args: argparse.Namespace) -> int:
    """Runs, compares or renders; returns an ExitCode."""
    if args.compare:
        return _compare(args)
    if args.index:
        return _index(args.index)
    if args.render:
        return _render(args)
    return _measure(args)


def _measure(args: argparse.Namespace) -> int:
    from flashmoe_tools.bench.contenders import default_registry  # imports torch, which only a measurement needs

    suites = [load_suite(name) for name in args.suite or [default_suite(args.device)]]
    device = resolve_device(args.device, suites)
    if any(suite.kind == "distributed" for suite in suites):
        return _measure_distributed(args, suites, device)
    suite = fit_suite(merge(suites), args, device)
    from flashmoe_tools.bench.session import Options, Session

    budget = args.time_budget if args.time_budget else (suite.quick_budget if args.quick else None)
    options = Options(device, args.baseline_only, budget, args.seed, typed_command())
    session = Session(suite, options, default_registry(suite.operation))
    report = session.run(lambda partial: _write(partial, args))
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the report is being written, so a second Ctrl-C must wait
    try:
        _write(report, args)
        print(_markdown(report))
    finally:
        signal.signal(signal.SIGINT, previous)
    code = ExitCode.INTERRUPTED if session.stopped == "interrupted" else report.exit_code
    if args.ratchet and code is ExitCode.OK:
        from flashmoe_tools.bench.ratchet import check_ratchet

        return check_ratchet(args.ratchet, report)
    return code


def default_suite(device: str) -> str:
    """The suite without --suite: the prefill grid on a GPU, the CPU suite elsewhere."""
    import torch

    return "cpu" if device == "cpu" or not torch.cuda.is_available() else "llm-prefill"


def resolve_device(requested: str, suites: list[Suite]) -> str:
    """The device of a run: the requested one, else cuda if there is one and the suites allow it."""
    import torch

    allowed = [device for device in DEVICES if all(device in suite.devices for suite in suites)]
    if not allowed:
        msg = f"the suites {', '.join(suite.name for suite in suites)} have no device in common; run them one by one"
        raise ArgumentError(msg)
    if requested == "auto":
        requested = "cuda" if "cuda" in allowed and torch.cuda.is_available() else allowed[0]
    if requested not in allowed:
        msg = f"this suite runs on {' or '.join(allowed)}, not on {requested}"
        raise ArgumentError(msg)
    if requested == "cuda" and not torch.cuda.is_available():
        msg = "no CUDA GPU that torch can use; `python -m flashmoe doctor` says why; --device cpu runs the CPU suites"
        raise DeviceError(msg)
    return requested


def merge(suites: list[Suite]) -> Suite:
    """Merges several suites, measured as the first one says; they must all be measured in the same way."""
    first = suites[0]
    if len(suites) == 1:
        return first
    for other in suites[1:]:
        if other.operation != first.operation:
            msg = f"suites {first.name} and {other.name} are of {first.operation} and {other.operation}; run them one by one"
            raise ArgumentError(msg)
        if (other.timing, other.flush_l2, other.baseline) != (first.timing, first.flush_l2, first.baseline):
            msg = f"suites {first.name} and {other.name} measure differently; run them one by one"
            raise ArgumentError(msg)
    cases = {case.key: case for suite in suites for case in suite.cases}
    return replace(
        first,
        name="+".join(suite.name for suite in suites),
        title=" + ".join(suite.title for suite in suites),
        cases=tuple(cases.values()),
        contenders=tuple(dict.fromkeys(name for suite in suites for name in suite.contenders)),
        quick_keys=frozenset().union(*(suite.quick_keys for suite in suites)),
        quick_only=tuple(case for suite in suites for case in suite.quick_only),
    )


def fit_suite(suite: Suite, args: argparse.Namespace, device: str) -> Suite:
    """The suite after applying the options and, on a GPU, its preset."""
    from flashmoe_tools.bench.presets import apply_preset, find_preset

    if device == "cuda" and args.preset != "none":
        import torch

        suite = apply_preset(suite, find_preset(args.preset, torch.cuda.get_device_name()))
    if args.dtype:
        suite = only_dtypes(suite, args.dtype)
    if args.case:
        suite = only_cases(suite, args.case)
    if args.quick:
        suite = suite.quick()
    changes: dict[str, Any] = {}
    if args.repeats is not None:
        if args.repeats < 1:
            msg = f"--repeats {args.repeats}: at least 1"
            raise ArgumentError(msg)
        changes["repeats"] = args.repeats
    if args.warm:
        changes["flush_l2"] = False
    if args.sustained:
        if device != "cuda":
            msg = f"--sustained follows a GPU's clock and power; this run is on {device}"
            raise ArgumentError(msg)
        changes |= {"timing": "sustained", "flush_l2": False, "block": 1, "repeats": args.repeats or SUSTAINED_REPEATS}
    if args.contenders:
        changes["contenders"] = tuple(args.contenders.split(","))
    return replace(suite, **changes)


def only_dtypes(suite: Suite, dtypes: list[str]) -> Suite:
    """Only the cases of these dtypes; an ArgumentError if the suite has none."""
    cases = tuple(case for case in suite.cases if case.dtype in dtypes)
    if not cases:
        found = ", ".join(sorted({case.dtype for case in suite.cases}))
        msg = f"suite {suite.name} has no case of dtype {' or '.join(dtypes)}; it has {found}"
        raise ArgumentError(msg)
    return replace(suite, cases=cases, quick_only=tuple(case for case in suite.quick_only if case.dtype in dtypes))


def only_cases(suite: Suite, keys: list[str]) -> Suite:
    """Only the named cases; a name that the suite lacks is an ArgumentError."""
    known = {case.key: case for case in (*suite.cases, *suite.quick_only)}
    for key in keys:
        if key not in known:
            msg = f"suite {suite.name} has no case {key!r}; it has {', '.join(known)}"
            raise ArgumentError(msg)
    return replace(suite, cases=tuple(known[key] for key in keys), quick_only=())


def _measure_distributed(args: argparse.Namespace, suites: list[Suite], device: str) -> int:
    from flashmoe_tools.bench.distributed.session import as_text, measure_distributed

    if len(suites) > 1:
        msg = "a multi-GPU suite cannot be combined with other suites"
        raise ArgumentError(msg)
    suite = suites[0].quick() if args.quick else suites[0]
    suite = replace(suite, repeats=args.repeats or suite.repeats)
    report = measure_distributed(suite, device, typed_command(), args.time_budget)
    if report is None:
        return ExitCode.OK
    if args.json:
        write_report(args.json, report)
    if args.summary:
        from flashmoe_tools.report import fold_checks, rounded

        parts = [{name: value for name, value in row.items() if name != "samples"} for row in report.data["parts"]]
        kept = replace(fold_checks(report), data=rounded({**report.data, "parts": parts}))
        write_summary(args.summary, kept.to_json())
    print(as_text(report))
    return report.exit_code


def _compare(args: argparse.Namespace) -> int:
    from flashmoe_tools.bench.compare import compare_files, compare_markdown

    report = compare_files(args.compare[0], args.compare[1], args.fail_on)
    if args.json:
        write_report(args.json, report)
    text = compare_markdown(report)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    print(text)
    return report.exit_code


def _index(folder: Path) -> int:
    from flashmoe_tools.bench.index import write_index

    path, reports = write_index(folder)
    print(f"{path}: {reports} reports")
    return ExitCode.OK


def _render(args: argparse.Namespace) -> int:
    from flashmoe_tools.bench.compare import read_bench

    report = read_bench(args.render)
    args.json = None
    _write(report, args)
    if args.ratchet:
        from flashmoe_tools.bench.ratchet import check_ratchet

        return check_ratchet(args.ratchet, report)
    print(_markdown(report))
    return ExitCode.OK


def _write(report: Report, args: argparse.Namespace) -> None:
    if args.json:
        write_report(args.json, report)
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(_markdown(report), encoding="utf-8")
    if args.html:
        from flashmoe_tools.bench.page import render_page

        args.html.parent.mkdir(parents=True, exist_ok=True)
        args.html.write_text(render_page(report), encoding="utf-8")
    if args.summary:
        from flashmoe_tools.bench.summaries import summarise_bench

        write_summary(args.summary, summarise_bench(report).to_json())


def _markdown(report: Report) -> str:
    from flashmoe_tools.bench.markdown import bench_markdown

    return bench_markdown(report)
