"""``python -m flashmoe audit PATH``: checks the symbols and resources of an extension, ours or another project's."""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from flashmoe.errors import ArgumentError, ExitCode, TableError
from flashmoe_tools.audit.engine import Options, audit, exit_is_empty
from flashmoe_tools.audit.render import printable, show
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import write_report
from flashmoe_tools.tables import load_tables

QUIET_S = 5.0  # most audits take a second or two; a gigabyte of symbols takes half a minute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=given_path, help="a shared object, a wheel, or a folder that holds one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report to this file")
    parser.add_argument(
        "--torch-version",
        metavar="X",
        help="the torch whose shims may be used (ours: 2.10.0; foreign: the installed one)",
    )
    parser.add_argument("--details", action="store_true", help="list what passed too, and what each kernel takes")
    parser.add_argument("--no-load", action="store_true", help=argparse.SUPPRESS)  # obsolete: nothing is loaded
    parser.add_argument("--foreign", action="store_true", help="judge it as a foreign extension, even if it is ours")
    parser.add_argument("--objects", type=Path, metavar="DIR", help="object files to search for duplicate definitions")
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="sources to search for declarations (default: csrc of the checkout)"
    )
    parser.add_argument(
        "--targets", metavar="A,B", help="targets that it must hold (default: those its provenance declares, else all)"
    )


def given_path(text: str) -> Path:
    """A non-empty path; an empty one would silently mean the current folder."""
    if not text:
        msg = "an empty path; give a shared object, a wheel, or a folder (. for this one)"
        raise argparse.ArgumentTypeError(msg)
    return Path(text)


def given_targets(text: str | None) -> tuple[str, ...] | None:
    """Target names of arch.toml. Raises ArgumentError for an unknown one."""
    if text is None:
        return None
    names = tuple(word.strip() for word in text.split(",") if word.strip())
    tables = load_tables()
    try:
        for name in names:
            tables.target(name)
    except TableError as error:
        msg = f"--targets {text!r}: {error}"
        raise ArgumentError(msg) from error
    return names


def run(args: argparse.Namespace) -> int:
    if args.torch_version is not None and not re.match(r"\d+\.\d+", args.torch_version):
        msg = f"--torch-version {args.torch_version!r} is not a version; write it as 2.10.0"
        raise ArgumentError(msg)
    targets = given_targets(args.targets)
    options = Options(args.torch_version, args.foreign, args.objects, args.source, targets)
    with Progress(f"audit of {printable(args.path.name)}", quiet_for=QUIET_S):
        found = audit(args.path, options)
    report = replace(found, command=tuple(Path(word).name for word in sys.argv))
    show(report, every=args.details)
    if args.json is not None:
        write_report(args.json, report)
    return ExitCode.NOTHING_CHECKED if exit_is_empty(report) else report.exit_code
