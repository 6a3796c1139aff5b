"""``python -m flashmoe audit PATH``: prove the symbols and resources of an extension, ours or foreign."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from flashmoe.audit.engine import Options, audit, exit_is_empty
from flashmoe.audit.render import show
from flashmoe.errors import ExitCode
from flashmoe.report import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a shared object, a wheel, or a folder that holds one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report to this file too")
    parser.add_argument(
        "--torch-version",
        metavar="X",
        help="the torch whose shims may be used (ours: 2.10.0; foreign: the installed one)",
    )
    parser.add_argument("--foreign", action="store_true", help="judge it as a foreign extension, even if it is ours")
    parser.add_argument("--objects", type=Path, metavar="DIR", help="object files to search for duplicate definitions")
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="sources to search for declarations (default: csrc of the checkout)"
    )
    parser.add_argument(
        "--targets", metavar="A,B", help="targets that it must hold (default: as its provenance declares, else all)"
    )


def run(args: argparse.Namespace) -> int:
    targets = tuple(t.strip() for t in args.targets.split(",") if t.strip()) if args.targets else None
    options = Options(args.torch_version, args.foreign, args.objects, args.source, targets)
    report = replace(audit(args.path, options), command=tuple(Path(word).name for word in sys.argv))
    show(report)
    if args.json is not None:
        write_report(args.json, report)
    return ExitCode.NOTHING_CHECKED if exit_is_empty(report) else report.exit_code
