"""``flashmoe COMMAND``, or ``python -m flashmoe COMMAND``: the programs that come with the package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Container
from importlib import import_module

from flashmoe._path import leave_current_folder
from flashmoe._version import DISTRIBUTION, __version__
from flashmoe.errors import ArgumentError, ExitCode, FlashmoeError, explain_os_error
from flashmoe_tools.streams import prepare_streams

COMMANDS = {
    "demo": ("flashmoe_tools.demo", "half a minute: our attention against torch's on this machine, errors and times"),
    "doctor": ("flashmoe_tools.doctor.cli", "check this machine: Python, torch, driver, GPUs, extension"),
    "audit": ("flashmoe_tools.audit.cli", "prove the symbols and resources of an extension or a wheel"),
    "verify": ("flashmoe_tools.verify.cli", "hold a wheel against its provenance, or against a rebuild of its commit"),
    "smem": ("flashmoe_tools.smem.cli", "what a kernel tile costs in shared memory, on which GPU it fits"),
    "bench": ("flashmoe_tools.bench.cli", "time attention and mixture of experts against torch's own"),
    "profile": ("flashmoe_tools.profile.cli", "where the time of a kernel goes, and the rule that says so"),
    "completion": ("flashmoe_tools.completion", "print the completion of this command for a shell"),
}

CHECKOUT_ONLY = ("gate", "history", "bisect")  # flashmoe_build/commands.py has them; it is not in the wheel

# Optional dependencies: module -> what to install for it.
OPTIONAL = {
    **dict.fromkeys(("auditwheel", "elftools", "packaging", "shtab"), f"{DISTRIBUTION}[tools]"),
    **dict.fromkeys(("jinja2", "matplotlib", "pynvml", "scipy"), f"{DISTRIBUTION}[bench]"),
    "sigstore": f"{DISTRIBUTION}[sign]",
    "torch": "torch>=2.10",
    "tomli": "tomli>=2.0",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (see :class:`flashmoe.errors.ExitCode`)."""
    arguments = sys.argv[1:] if argv is None else argv
    if argv is None:  # run as a program
        leave_current_folder()
        prepare_streams()
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        command = arguments[0] if arguments else ""
        if module not in OPTIONAL:
            raise
        print(
            f"flashmoe {command} needs {module}, which is not installed; pip install '{OPTIONAL[module]}'",
            file=sys.stderr,
        )
        return ExitCode.FAILED


def all_commands() -> dict[str, tuple[str, str]]:
    """The commands of the wheel and, in a checkout, those that the checkout registers."""
    try:
        from flashmoe_build.commands import COMMANDS as OF_CHECKOUT
    except ModuleNotFoundError:
        return COMMANDS
    return COMMANDS | OF_CHECKOUT


def make_parser(complete: Container[str]) -> argparse.ArgumentParser:
    """The command line; only the commands in ``complete`` get their options, because that imports their modules."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="flashmoe", description=str(__doc__).replace("``", ""))
    parser.add_argument("--version", action="version", version=f"flashmoe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, summary) in all_commands().items():
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in complete:
            module = import_module(module_name)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run, refuse=sub.error)
    return parser


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command in CHECKOUT_ONLY and command not in all_commands():
        step = f"./nox -s {command}"
        print(f"flashmoe {command} works in a checkout of the sources only; there: {step}", file=sys.stderr)
        return ExitCode.FAILED
    parser = make_parser((command,))
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:  # reported with the usage of the command, which the top-level parser does not know
        getattr(namespace, "refuse", parser.error)(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status = int(namespace.run(namespace))
        sys.stdout.flush()
        return status
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, ArgumentError) else ExitCode.FAILED
    except BrokenPipeError:  # `... | head`: the reader closed the pipe
        # Otherwise the exit would flush into the same pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PIPE_CLOSED
    except OSError as error:
        message = explain_os_error(error)
        if message is None:
            raise
        print(message, file=sys.stderr)
        # Otherwise the exit would fail to flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
