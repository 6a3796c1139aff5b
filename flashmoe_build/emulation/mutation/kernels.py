"""Which kernels must notice a bug in a file: those that include it, the cheapest of each kind."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import takewhile
from pathlib import PurePosixPath

from flashmoe_build.compile.cache import include_closure
from flashmoe_build.emulation.build import CSRC, Options, unit_text
from flashmoe_build.emulation.cases import Kernel, kernels
from flashmoe_tools.tables import load_tables

WEIGHTS = {"operation": 9, "scores": 4, "warp_rows": 4}  # per feature that a kernel adds to those before it; else 1


@lru_cache(maxsize=1)
def _variants() -> tuple[tuple[Kernel, frozenset[str]], ...]:
    """The smallest kernel of each operation, family, tile, set of options and masks, with the files that it includes."""
    headers: dict[str, frozenset[str]] = {}
    found: dict[tuple[object, ...], tuple[Kernel, frozenset[str]]] = {}
    for kernel in kernels(load_tables()):
        row = kernel.unit.row
        header = row.descriptor.header
        if header not in headers:
            closure = include_closure(unit_text(kernel.unit, Options()), (CSRC,))
            headers[header] = frozenset(path.relative_to(CSRC).as_posix() for path in closure if CSRC in path.parents)
        key = tuple(_features(kernel))
        found.setdefault(key, (kernel, headers[header]))
    return tuple(found.values())


@lru_cache(maxsize=512)
def noticing_kernels(file: str) -> tuple[str, ...]:
    """Labels of all kernels that include the file, one of each kind, in the order in which they are tried: kernels whose header is
    nearest in the tree first, then whichever adds the most features that those before it lack."""
    candidates = [kernel for kernel, files in _variants() if file in files]
    if not candidates:
        return ()
    shared = {kernel.label: _shared(file, kernel) for kernel in candidates}
    features = {kernel.label: frozenset(_features(kernel)) for kernel in candidates}
    order: list[str] = []
    seen: set[tuple[str, object]] = set()
    while candidates:
        best = max(
            candidates,
            key=lambda kernel: (
                shared[kernel.label],
                sum(WEIGHTS.get(name, 1) for name, _ in features[kernel.label] - seen),
                -_size(kernel),
            ),
        )
        candidates.remove(best)
        seen |= features[best.label]
        order.append(best.label)
    return tuple(order)


def _shared(file: str, kernel: Kernel) -> int:
    """Number of leading folders that the file and the kernel's header have in common."""
    one, other = PurePosixPath(file).parent.parts, PurePosixPath(kernel.unit.row.descriptor.header).parent.parts
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _features(kernel: Kernel) -> Iterator[tuple[str, object]]:
    row = kernel.unit.row
    yield "operation", row.operation
    yield "family", row.family
    yield from (("block_m", row.block_m), ("block_n", row.block_n), ("warp_rows", 32 * row.block_m // row.threads))
    yield from row.axes.items()
    yield from row.options.items()
    for name, values in row.words.items():
        yield from ((name, value) for value in values)


def _size(kernel: Kernel) -> int:
    row = kernel.unit.row
    return int(row.axes.get("head_dim", 1)) * row.block_m
