"""Hunts bugs by rule in any file, Python or C++, with a command as the judge: a bug that the command passes has survived.

python -m flashmoe_build.emulation.mutation.anywhere flashmoe/checks.py --oracle 'python -m pytest -q -x tests/attention/test_validation.py'

The command runs in a copy of the checkout's tracked files, and of build/lib, with one bug at a time. For C++ it has to build:
'python -m flashmoe_build --library-only && python -m pytest ...'.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashmoe.errors import ExitCode
from flashmoe_build.emulation.build import REPOSITORY
from flashmoe_build.emulation.mutation.operators import edits
from flashmoe_build.emulation.mutation.site import Edit
from flashmoe_build.emulation.mutation.source import Source

_SHIFTED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}


def edits_of(path: Path) -> list[Edit]:
    """Every edit that a rule makes of the file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return list(_python_edits(text))
    source = Source(text)
    return [edit for function in source.functions for edit in edits(source, function)]


def _python_edits(text: str) -> Iterator[Edit]:
    """Conditions are forced, comparisons shifted, one side of ``and``, ``or``, + and - is dropped, raises become nothing."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()

    def edit(operator: str, node: ast.expr | ast.stmt, replacement: str) -> Edit:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = len(data[: starts[node.lineno - 1] + node.col_offset].decode())
        end = len(data[: starts[node.end_lineno - 1] + node.end_col_offset].decode())
        return Edit(operator, begin, end, replacement, f"line {node.lineno}: {operator}: {ast.unparse(node)[:80]}", 1)

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If | ast.IfExp):
            yield edit("condition-true", node.test, "True")
            yield edit("condition-false", node.test, "False")
        elif isinstance(node, ast.Raise):
            yield edit("remove-raise", node, "pass")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SHIFTED:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield edit("boundary", node, f"({left} {_SHIFTED[type(node.ops[0])]} {right})")
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                rest = [ast.unparse(other) for other in node.values if other is not value]
                word = " and " if isinstance(node.op, ast.And) else " or "
                yield edit("drop-predicate", node, f"({word.join(rest)})")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Mod):
            yield edit("drop-operand", node, ast.unparse(node.left))


def copy_checkout(target: Path) -> None:
    """The tracked files, and the library that was built last."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
    if (REPOSITORY / "build" / "lib").is_dir():
        shutil.copytree(REPOSITORY / "build" / "lib", target / "build" / "lib")


def survivors(checkout: Path, names: Sequence[str], oracle: str, most: int, seconds: int) -> Iterator[tuple[str, Edit]]:
    """Of at most ``most`` edits, spread over the files, those that the command passes."""
    sites = [(name, edit) for name in names for edit in edits_of(checkout / name)]
    chosen = random.Random(0).sample(sites, min(most, len(sites)))
    for number, (name, edit) in enumerate(chosen, start=1):
        path = checkout / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text[: edit.start] + edit.replacement + text[edit.end :], encoding="utf-8")
        passed = _passes(checkout, oracle, seconds)
        path.write_text(text, encoding="utf-8")
        print(f"{number}/{len(chosen)} {'SURVIVED' if passed else 'killed'} {name} {edit.what}", flush=True)
        if passed:
            yield name, edit


def _passes(checkout: Path, oracle: str, seconds: int) -> bool:
    try:
        done = subprocess.run(oracle, shell=True, cwd=checkout, capture_output=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashmoe_build.emulation.mutation.anywhere", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="relative to the checkout")
    parser.add_argument("--oracle", required=True, metavar="COMMAND", help="exits with 0 when it finds nothing wrong")
    parser.add_argument("--most", type=int, default=20, metavar="N", help="bugs to plant, drawn from all (default 20)")
    parser.add_argument("--seconds", type=int, default=600, metavar="S", help="of the command; longer is a kill")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="flashmoe-hunt-") as folder:
        checkout = Path(folder)
        copy_checkout(checkout)
        if not _passes(checkout, arguments.oracle, arguments.seconds):
            print("the command fails without a bug; it can judge nothing", file=sys.stderr)
            return ExitCode.USAGE
        left = list(survivors(checkout, arguments.files, arguments.oracle, arguments.most, arguments.seconds))
    print(f"{len(left)} survived")
    return ExitCode.FAILED if left else ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
