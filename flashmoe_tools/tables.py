"""What flashmoe knows about GPUs and kernels, as frozen dataclasses.

Source: ``csrc/tables/arch.toml`` and, in the folder of each operation, ``operations.toml`` and ``kernels.toml``; an
installed package has the same files in ``flashmoe/_tables/``. Everything that must agree about kernels (C++ dispatch,
translation units, audit, shared-memory numbers, docs) reads them through this module.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import flashmoe
from flashmoe.errors import TableError
from flashmoe_tools.descriptors import Descriptor, KernelRow, read_operations, read_rows
from flashmoe_tools.fields import Fields
from flashmoe_tools.toml import tomllib

ARCH = "tables/arch.toml"
OPERATIONS, KERNELS = "operations.toml", "kernels.toml"  # in the folder of each operation
SCHEMA = 1


@dataclass(frozen=True)
class Gpu:
    """One compute capability and its limits (bytes, registers, threads)."""

    name: str
    compute_capability: tuple[int, int]
    products: str
    smem_per_block_optin: int
    smem_per_sm: int
    smem_reserved: int
    registers_per_sm: int
    registers_per_block: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    bf16: bool
    families: tuple[str, ...]  # kernel families that it supports, best first


@dataclass(frozen=True)
class Target:
    """One compilation target: machine code (``sm_90a``) or PTX (``compute_80``), and the GPUs that may load it."""

    name: str
    gpus: tuple[str, ...]

    @property
    def is_ptx(self) -> bool:
        return self.name.startswith("compute_")

    @property
    def capability(self) -> tuple[int, int]:
        digits = self.name.split("_")[1].rstrip("af")
        return int(digits[:-1]), int(digits[-1])

    @property
    def is_arch_specific(self) -> bool:
        return self.name[-1] in "af"

    @property
    def supports_bf16(self) -> bool:
        return self.capability >= (8, 0)


class Entry(NamedTuple):
    """One kernel of a unit: the words of its axes, such as ("causal",), and its symbol."""

    words: tuple[str, ...]
    symbol: str


def stem(row: KernelRow, dtype: str) -> str:
    """The common prefix of the names of a row's units and kernels."""
    numbers = (f"{axis.prefix}{row.axes[axis.name]}" for axis in row.descriptor.numbers)
    return "_".join([row.operation, row.family, dtype, *numbers, *([row.variant] if row.variant else [])])


def entries(row: KernelRow, dtype: str) -> tuple[Entry, ...]:
    """Every kernel of a row for one dtype; an operation without word axes has one."""
    chosen = product(*(row.words[axis.name] for axis in row.descriptor.word_axes))
    return tuple(Entry(words, "_".join(["flashmoe", stem(row, dtype), *words])) for words in chosen)


@dataclass(frozen=True)
class Unit:
    """One translation unit: a row for one dtype and one target."""

    row: KernelRow
    dtype: str
    target: Target
    virtual: str  # the architecture whose PTX is compiled to machine code: compute_80

    @property
    def name(self) -> str:
        """The prefix of its symbols; includes words if the row does not have all of them."""
        axes = self.row.descriptor.word_axes
        partial = (words for axis in axes if len(words := self.row.words[axis.name]) < len(axis.words))
        return "_".join([stem(self.row, self.dtype), *(word for words in partial for word in words)])

    @property
    def virtual_capability(self) -> tuple[int, int]:
        """``__CUDA_ARCH__`` at compile time: instructions of later GPUs are not used."""
        return Target(self.virtual, ()).capability

    @property
    def entries(self) -> tuple[Entry, ...]:
        return entries(self.row, self.dtype)

    def symbol(self, *words: str) -> str:
        """The kernel for these words. Raises TableError if the unit has none."""
        for entry in self.entries:
            if entry.words == words:
                return entry.symbol
        msg = f"{self.name} has no kernel for {' '.join(words) or 'no words'}; it has: {', '.join(' '.join(e.words) for e in self.entries)}"
        raise TableError(msg)

    @property
    def binary_name(self) -> str:
        return f"{self.name}.{self.target.name}.{'ptx' if self.target.is_ptx else 'cubin'}"


@dataclass(frozen=True)
class Tables:
    """All tables, checked against each other."""

    gpus: tuple[Gpu, ...]
    targets: tuple[Target, ...]
    descriptors: tuple[Descriptor, ...]
    kernels: tuple[KernelRow, ...]
    virtual: Mapping[str, Mapping[str, str]]  # by family, then by target or "default"
    smem_static_limit: int
    registers_per_thread_limit: int

    def gpu(self, name: str) -> Gpu:
        for gpu in self.gpus:
            if gpu.name == name:
                return gpu
        msg = f"no GPU architecture {name!r}; known: {', '.join(g.name for g in self.gpus)}"
        raise TableError(msg)

    def target(self, name: str) -> Target:
        for target in self.targets:
            if target.name == name:
                return target
        msg = f"no target {name!r}; known: {', '.join(t.name for t in self.targets)}"
        raise TableError(msg)

    def virtual_architecture(self, family: str, target: str) -> str:
        """The PTX architecture from which the machine code of a family's kernels for a target is compiled."""
        try:
            chosen = self.virtual[family]
            return chosen.get(target, chosen["default"])
        except KeyError as error:
            msg = f"{ARCH}: [virtual.{family}] states no virtual architecture for {target}; add a default"
            raise TableError(msg) from error

    def units(self, targets: tuple[str, ...] | None = None) -> Iterator[Unit]:
        """Every translation unit, or those of the named targets, in table order."""
        for row in self.kernels:
            for dtype in row.dtypes:
                for name in row.targets:
                    if targets is None or name in targets:
                        yield Unit(
                            row,
                            dtype,
                            self.target(name),
                            row.virtual.get(name) or self.virtual_architecture(row.family, name),
                        )


def table_directory() -> Path:
    """The folder of the tables: inside an installed package, or csrc/ of the checkout around it."""
    package = Path(flashmoe.__file__).resolve().parent
    installed = package / "_tables"
    return installed if installed.is_dir() else package.parent / "csrc"


def table_files(directory: Path) -> tuple[Path, ...]:
    """Every table under a folder: the architectures', and two in each operation's folder."""
    folders = sorted({path.parent for name in (OPERATIONS, KERNELS) for path in directory.glob(f"*/{name}")})
    return (directory / ARCH, *(folder / name for folder in folders for name in (OPERATIONS, KERNELS)))


@lru_cache(maxsize=4)
def load_tables(directory: Path | None = None) -> Tables:
    """Reads and checks all tables. Raises TableError with the file, row and key that is wrong."""
    folder = directory if directory is not None else table_directory()
    arch_file, *files = table_files(folder)
    arch = Fields(_read(arch_file, ARCH), ARCH)
    arch.take("schema", int)
    families = arch.table("rows")
    unstated = {family: families.table(family).plain for family in families}
    descriptors: dict[tuple[str, str], Descriptor] = {}
    rows: list[KernelRow] = []
    for path in files:
        name = path.relative_to(folder).as_posix()
        table = _read(path, name)
        if path.name == KERNELS:
            rows += read_rows(table, name, descriptors, unstated)
            continue
        for found in read_operations(table, name):
            if (found.operation, found.family) in descriptors:
                msg = f"{name}: another folder describes {found.operation} {found.family} too"
                raise TableError(msg)
            descriptors[found.operation, found.family] = found
    tables = Tables(
        gpus=tuple(_gpu(row) for row in arch.take("gpu", list)),
        targets=tuple(_target(Fields(row, f"{ARCH}: [[target]]")) for row in arch.take("target", list)),
        descriptors=tuple(descriptors.values()),
        kernels=tuple(rows),
        virtual=arch.take("virtual", dict),
        smem_static_limit=arch.take("smem_static_limit", int),
        registers_per_thread_limit=arch.take("registers_per_thread_limit", int),
    )
    arch.done()
    check_tables(tables)
    return tables


def check_tables(tables: Tables) -> None:
    """Checks that every name resolves, entry points are unique, and no row needs what a GPU lacks."""
    for target in tables.targets:
        for name in target.gpus:
            tables.gpu(name)
    if not tables.kernels:
        msg = f"no folder of {ARCH} holds an {OPERATIONS}; nothing could be built"
        raise TableError(msg)
    seen: set[tuple[str, str]] = set()
    for unit in tables.units():
        for _, symbol in unit.entries:
            if (symbol, unit.target.name) in seen:
                msg = f"{unit.row.source} states {symbol} for {unit.target.name}, and a row before it too; give one a variant or drop it"
                raise TableError(msg)
            seen.add((symbol, unit.target.name))
        _check_unit(tables, unit)


def _check_unit(tables: Tables, unit: Unit) -> None:
    if unit.dtype == "bf16" and not unit.target.supports_bf16:
        msg = f"{unit.name}: bf16 needs compute capability 8.0; {unit.target.name} has none"
        raise TableError(msg)
    _check_virtual(unit)
    needed = unit.row.smem_bytes(unit.dtype)
    for name in unit.target.gpus:
        limit = tables.gpu(name).smem_per_block_optin
        if needed > limit:
            msg = (
                f"{unit.row.source}: {unit.name} for {unit.target.name} needs {needed} bytes of shared memory, but a block on "
                f"{name} has at most {limit}; `python -m flashmoe smem --arch {name} --head-dim D` shows what fits"
            )
            raise TableError(msg)


def _check_virtual(unit: Unit) -> None:
    """ptxas compiles PTX for its own and later capabilities; arch-specific PTX (90a) only for its own."""
    source, target = Target(unit.virtual, ()), unit.target
    if not source.is_ptx or (target.is_ptx and source.name != target.name):
        fits = False
    elif source.is_arch_specific:
        fits = target.name == f"sm_{source.name.removeprefix('compute_')}"
    else:
        fits = source.capability <= target.capability
    if not fits:
        stated = unit.row.source if target.name in unit.row.virtual else f"{ARCH}: [virtual.{unit.row.family}]"
        msg = f"{stated} makes {target.name} from {unit.virtual}, which cannot be"
        raise TableError(msg)


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            table: dict[str, Any] = tomllib.load(stream)
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror}"
        raise TableError(msg) from error
    except tomllib.TOMLDecodeError as error:
        msg = f"{name} is not TOML: {error}"
        raise TableError(msg) from error
    if table.get("schema") != SCHEMA:
        msg = f"{name} has schema {table.get('schema')!r}; this flashmoe reads {SCHEMA}"
        raise TableError(msg)
    return table


def _target(fields: Fields) -> Target:
    found = Target(fields.take("name", str), fields.words("gpus"))
    fields.done()
    return found


def _gpu(row: Mapping[str, Any]) -> Gpu:
    fields = dict(row)
    try:
        major, minor = fields.pop("compute_capability")
        families = tuple(fields.pop("families"))
        return Gpu(compute_capability=(major, minor), families=families, **fields)
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{ARCH}: [[gpu]] {row.get('name')!r}: {error}"
        raise TableError(msg) from error
