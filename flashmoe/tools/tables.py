"""The architecture table and the kernel table, as frozen dataclasses.

Source: ``csrc/arch.toml`` and ``csrc/kernels.toml`` in a checkout, the same files in ``flashmoe/_tables/`` of a wheel.
Everything that must agree about kernels (C++ dispatch, units to compile, audit, shared-memory numbers, docs) reads
them through this module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flashmoe.errors import TableError
from flashmoe.tools.smem.formulas import itemise

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"f16": 2, "bf16": 2, "f32": 4})
MASKS = ("causal", "full")
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
    families: tuple[str, ...]  # kernel families that run on it, best first


@dataclass(frozen=True)
class Target:
    """One thing to compile for: machine code (``sm_90a``) or PTX (``compute_80``), and the GPUs that may load it."""

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


@dataclass(frozen=True)
class KernelRow:
    """One ``[[kernel]]`` row: a tile of a kernel family for a head dim, its dtypes and its targets."""

    operation: str
    family: str
    dtypes: tuple[str, ...]
    head_dim: int
    targets: tuple[str, ...]
    block_m: int
    block_n: int
    stages: int
    warps: int
    min_blocks: int
    schedule: str
    why: str
    variant: str
    masks: tuple[str, ...]
    options: Mapping[str, int]
    allow: Mapping[str, str]
    virtual: Mapping[str, str]  # by target, where the family's virtual architecture would lack an instruction

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def smem_items(self, dtype: str) -> tuple[tuple[str, int], ...]:
        """What the block keeps in dynamic shared memory: (name, bytes)."""
        return itemise(
            self.family if self.operation == "attention_forward" else self.operation,
            head_dim=self.head_dim,
            block_m=self.block_m,
            block_n=self.block_n,
            stages=self.stages,
            warps=self.warps,
            element_bytes=ELEMENT_BYTES[dtype],
            options=self.options,
        )

    def smem_bytes(self, dtype: str) -> int:
        return sum(size for _, size in self.smem_items(dtype))


@dataclass(frozen=True)
class Unit:
    """One translation unit: (operation, family, dtype, head dim, variant) for one target."""

    row: KernelRow
    dtype: str
    target: Target
    virtual: str  # the architecture whose PTX its machine code is made from: compute_80

    @property
    def name(self) -> str:
        row = self.row
        variant = f"_{row.variant}" if row.variant else ""
        masks = f"_{row.masks[0]}" if len(row.masks) == 1 else ""
        return f"{row.operation}_{row.family}_{self.dtype}_d{row.head_dim}{variant}{masks}"

    @property
    def virtual_capability(self) -> tuple[int, int]:
        """What ``__CUDA_ARCH__`` was when the unit was compiled: instructions of later GPUs are not in it."""
        return Target(self.virtual, ()).capability

    @property
    def entries(self) -> tuple[tuple[str, str], ...]:
        """(mask, kernel symbol) of every entry point; an unmasked operation has one, with mask ``""``."""
        row = self.row
        variant = f"_{row.variant}" if row.variant else ""
        stem = f"flashmoe_{row.operation}_{row.family}_{self.dtype}_d{row.head_dim}{variant}"
        return tuple((mask, f"{stem}_{mask}") for mask in row.masks) or (("", stem),)

    @property
    def binary_name(self) -> str:
        return f"{self.name}.{self.target.name}.{'ptx' if self.target.is_ptx else 'cubin'}"


@dataclass(frozen=True)
class Tables:
    """Both tables, checked against each other."""

    gpus: tuple[Gpu, ...]
    targets: tuple[Target, ...]
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
        """Which PTX the machine code of a family's kernels for a target is made from."""
        try:
            chosen = self.virtual[family]
            return chosen.get(target, chosen["default"])
        except KeyError as error:
            msg = f"kernels.toml: [virtual.{family}] states no virtual architecture for {target}; add a default"
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
    """Where the tables lie: inside an installed package, or in csrc/ of the checkout around it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_tables"
    return installed if installed.is_dir() else package.parent / "csrc"


@lru_cache(maxsize=4)
def load_tables(directory: Path | None = None) -> Tables:
    """Read and check both tables. Raises TableError with the row and field that is wrong."""
    folder = directory if directory is not None else table_directory()
    arch = _read(folder / "arch.toml")
    kernels = _read(folder / "kernels.toml")
    tables = Tables(
        gpus=tuple(_gpu(row) for row in arch["gpu"]),
        targets=tuple(Target(row["name"], tuple(row["gpus"])) for row in arch["target"]),
        kernels=tuple(_kernel(row) for row in kernels.get("kernel", [])),
        virtual=kernels.get("virtual", {}),
        smem_static_limit=arch["smem_static_limit"],
        registers_per_thread_limit=arch["registers_per_thread_limit"],
    )
    check_tables(tables)
    return tables


def check_tables(tables: Tables) -> None:
    """Whether every name resolves, no entry point stands twice, and no row asks a GPU for what it lacks."""
    for target in tables.targets:
        for name in target.gpus:
            tables.gpu(name)
    if not tables.kernels:
        msg = "kernels.toml holds no [[kernel]] row; nothing could be built"
        raise TableError(msg)
    seen: set[tuple[str, str]] = set()
    for unit in tables.units():
        for _, symbol in unit.entries:
            if (symbol, unit.target.name) in seen:
                msg = f"kernels.toml states {symbol} for {unit.target.name} twice; give one row a variant or drop it"
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
                f"{unit.name} for {unit.target.name}: {needed} bytes of shared memory, but a block on {name} has at "
                f"most {limit}; `python -m flashmoe smem --arch {name} --head-dim {unit.row.head_dim}` shows what fits"
            )
            raise TableError(msg)


def _check_virtual(unit: Unit) -> None:
    """ptxas assembles PTX for its own capability and later ones; arch-specific PTX (90a) for that alone."""
    source, target = Target(unit.virtual, ()), unit.target
    if not source.is_ptx or (target.is_ptx and source.name != target.name):
        fits = False
    elif source.is_arch_specific:
        fits = target.name == f"sm_{source.name.removeprefix('compute_')}"
    else:
        fits = source.capability <= target.capability
    if not fits:
        stated = f"row {unit.name}" if target.name in unit.row.virtual else f"[virtual.{unit.row.family}]"
        msg = f"kernels.toml: {stated} makes {target.name} from {unit.virtual}, which cannot be"
        raise TableError(msg)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            table: dict[str, Any] = tomllib.load(stream)
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror}"
        raise TableError(msg) from error
    except tomllib.TOMLDecodeError as error:
        msg = f"{path.name} is not TOML: {error}"
        raise TableError(msg) from error
    if table.get("schema") != SCHEMA:
        msg = f"{path.name} has schema {table.get('schema')!r}; this flashmoe reads {SCHEMA}"
        raise TableError(msg)
    return table


def _gpu(row: Mapping[str, Any]) -> Gpu:
    fields = dict(row)
    try:
        major, minor = fields.pop("compute_capability")
        families = tuple(fields.pop("families"))
        return Gpu(compute_capability=(major, minor), families=families, **fields)
    except (KeyError, TypeError, ValueError) as error:
        msg = f"arch.toml: [[gpu]] {row.get('name')!r}: {error}"
        raise TableError(msg) from error


def _kernel(row: Mapping[str, Any]) -> KernelRow:
    fields = dict(row)
    masks = tuple(fields.pop("masks", MASKS))
    try:
        parsed = KernelRow(
            dtypes=tuple(fields.pop("dtypes")),
            targets=tuple(fields.pop("targets")),
            masks=masks,
            variant=fields.pop("variant", ""),
            options=MappingProxyType(dict(fields.pop("options", {}))),
            allow=MappingProxyType(dict(fields.pop("allow", {}))),
            virtual=MappingProxyType(dict(fields.pop("virtual", {}))),
            **fields,
        )
    except (KeyError, TypeError) as error:
        msg = f"kernels.toml: row {row.get('family')!r} d{row.get('head_dim')}: {error}"
        raise TableError(msg) from error
    for dtype in parsed.dtypes:
        if dtype not in ELEMENT_BYTES:
            msg = f"kernels.toml: dtype {dtype!r}; known: {', '.join(ELEMENT_BYTES)}"
            raise TableError(msg)
    for mask in masks:
        if mask not in MASKS:
            msg = f"kernels.toml: mask {mask!r}; known: {', '.join(MASKS)}"
            raise TableError(msg)
    if parsed.schedule not in ("grid", "persistent"):
        msg = f"kernels.toml: schedule {parsed.schedule!r}; known: grid, persistent"
        raise TableError(msg)
    return parsed
