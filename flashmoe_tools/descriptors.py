"""Operations as data: one descriptor per (operation, family), and the rows with its kernels' tiles.

Source: ``operations.toml`` and ``kernels.toml`` in the folder of each operation; the comments there explain every key.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flashmoe.errors import TableError
from flashmoe_tools.fields import Fields
from flashmoe_tools.smem.formulas import FormulaError, itemise

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"f16": 2, "bf16": 2, "f32": 4})
SCHEDULES = ("grid", "persistent")
TILE = ("block_m", "block_n", "stages")
OF_A_VARIANT = ("options", "why", "allow", "by_dtype")  # ``options`` are merged with those of the row
JOINED = ("tensor_maps", "shared_memory")  # for a family that is ``like`` another: merged with the other's
MAX_AXES = 4  # as in csrc/host/kernel_table.h
MAX_COSTS = 4  # as in csrc/host/kernel_table.h


@dataclass(frozen=True)
class Axis:
    """What distinguishes kernels besides dtype: a number of the row (``prefix``), or words with one entry point each."""

    name: str
    prefix: str  # of a number in names, such as d64
    argument: str  # of words: the template parameter of the entry function
    words: Mapping[str, str]  # and the template argument for each; empty for a number
    allowed: tuple[int, ...] = ()  # numbers that the kernels support; empty: any
    why: str = ""  # why no other numbers are allowed

    @property
    def is_number(self) -> bool:
        return not self.words


@dataclass(frozen=True)
class TensorMaps:
    """TMA descriptors that a kernel takes after its parameters, and the host function that describes them."""

    names: tuple[str, ...]
    header: str
    describe: str
    tile: str  # the tile values that `describe` takes after the params


@dataclass(frozen=True)
class Header:
    """A C++ name (a struct, or the namespace of enumerations) and the header that declares it."""

    name: str
    header: str


@dataclass(frozen=True)
class Descriptor:
    """How the kernels of one family of an operation are written."""

    operation: str
    family: str
    params: Header
    enums: Header | None
    axes: tuple[Axis, ...]
    tile: tuple[str, ...]
    cost: tuple[str, ...]
    header: str
    spec: str
    entry: str
    schedule: str  # "grid": one block per tile; "persistent": at most one block per multiprocessor
    options: Mapping[str, int]  # with their defaults, in the order of the spec's template parameters
    tensor_maps: TensorMaps | None
    needs_cost: bool
    shared_memory: Mapping[str, str]
    virtual: Mapping[str, str]  # by target, if the family's virtual architecture lacks an instruction

    @property
    def numbers(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.is_number)

    @property
    def word_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if not axis.is_number)


@dataclass(frozen=True)
class KernelRow:
    """One row of a kernels.toml, ``[[OPERATION.FAMILY]]``: a tile, its dtypes and its targets."""

    descriptor: Descriptor
    source: str  # where it is: "attention/kernels.toml, row 3 (attention_forward sm80 d64)"
    variant: str
    dtypes: tuple[str, ...]
    targets: tuple[str, ...]
    axes: Mapping[str, int]  # the axes that are numbers
    words: Mapping[str, tuple[str, ...]]  # for each axis, the words that have an entry point
    block_m: int  # tile values that the descriptor does not name are 1
    block_n: int
    stages: int
    warps: int
    min_blocks: int
    options: Mapping[str, int]
    cost: Mapping[str, float]  # empty: not chosen by cost
    why: str
    allow: Mapping[str, str]
    virtual: Mapping[str, str]  # the descriptor's, overridden by the row's
    by_dtype: str  # why the code depends on the 16-bit type; empty: it does not

    @property
    def operation(self) -> str:
        return self.descriptor.operation

    @property
    def family(self) -> str:
        return self.descriptor.family

    @property
    def schedule(self) -> str:
        return self.descriptor.schedule

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile(self) -> tuple[int, ...]:
        """The values that the descriptor's tile names."""
        return tuple(int(getattr(self, name)) for name in self.descriptor.tile)

    def smem_items(self, dtype: str) -> tuple[tuple[str, int], ...]:
        """The contents of a block's dynamic shared memory: (name, bytes)."""
        values = {**self.axes, **{name: int(getattr(self, name)) for name in TILE}, "warps": self.warps, **self.options}
        try:
            return itemise(self.descriptor.shared_memory, {**values, "element": ELEMENT_BYTES[dtype]})
        except FormulaError as error:
            msg = f"operations.toml: shared memory of {self.operation} {self.family}: {error}"
            raise TableError(msg) from error

    def smem_bytes(self, dtype: str) -> int:
        return sum(size for _, size in self.smem_items(dtype))


def read_operations(table: Mapping[str, Any], file: str) -> Iterator[Descriptor]:
    """The descriptors of an operations.toml. Raises TableError with the file, operation and key that is wrong."""
    top = Fields(_completed(table, file), file)
    top.take("schema", int)
    for operation in top:
        if operation == "schema":
            continue
        common = top.table(operation)
        families = common.table("family")
        shared = _common(common)
        common.done()
        for family in families:
            yield _descriptor(operation, family, families.table(family), shared)


def _completed(table: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The table with the keys filled in that operations and families leave out because they are ``like`` earlier ones."""
    found: dict[str, Any] = {"schema": table.get("schema")}
    families: dict[str, Fields] = {}
    for name in [name for name in table if name != "schema"]:
        own = Fields(table[name], f"{file}, {name}")
        base = found[own.word("like", list(found)[1:])] if "like" in own else {}
        here: dict[str, Fields] = {}
        kinds = own.table("family")
        for family in kinds:
            here[family] = families[f"{name}.{family}"] = _joined(kinds.table(family), {**families, **here})
        common = {key: value for key, value in {**base, **own.plain}.items() if key != "like"}
        found[name] = {**common, "family": {family: fields.plain for family, fields in here.items()}}
    return found


def _joined(own: Fields, known: Mapping[str, Fields]) -> Fields:
    """A family with the keys filled in that it leaves out because it is ``like`` another."""
    if "like" not in own:
        return own
    other = known[own.word("like", known)]
    parts = {key: {**other.table(key).plain, **own.table(key, optional=True).plain} for key in JOINED if key in other}
    return Fields(
        {key: value for key, value in {**other.plain, **own.plain, **parts}.items() if key != "like"}, own.where
    )


def _common(fields: Fields) -> dict[str, Any]:
    axes = fields.table("axes", optional=True)
    shared: dict[str, Any] = {
        "params": _header(fields.table("params"), "type"),
        "enums": _header(fields.table("enums"), "namespace") if "enums" in fields else None,
        "axes": tuple(_axis(name, axes.table(name)) for name in axes),
        "tile": fields.words("tile", TILE),
        "cost": fields.words("cost", default=()),
    }
    for key, most in (("axes", MAX_AXES), ("cost", MAX_COSTS)):
        if len(shared[key]) > most:
            fields.fail(key, len(shared[key]), f"csrc/host/kernel_table.h has room for {most}")
    return shared


def _descriptor(operation: str, family: str, fields: Fields, shared: Mapping[str, Any]) -> Descriptor:
    maps = fields.table("tensor_maps") if "tensor_maps" in fields else None
    found = Descriptor(
        operation=operation,
        family=family,
        header=fields.take("header", str),
        spec=fields.take("spec", str),
        entry=fields.take("entry", str),
        schedule=fields.word("schedule", SCHEDULES),
        options=fields.table("options", optional=True).every(int),
        tensor_maps=_tensor_maps(maps) if maps is not None else None,
        needs_cost=fields.take("needs_cost", bool, default=False),
        shared_memory=fields.table("shared_memory", optional=True).every(str),
        virtual=fields.table("virtual", optional=True).every(str),
        **shared,
    )
    fields.done()
    return found


def _header(fields: Fields, name: str) -> Header:
    found = Header(fields.take(name, str), fields.take("header", str))
    fields.done()
    return found


def _axis(name: str, fields: Fields) -> Axis:
    if "words" in fields:
        axis = Axis(name, "", fields.take("argument", str), fields.table("words").every(str))
    else:
        allowed = tuple(fields.take("allowed", list, []))
        for value in allowed:
            if type(value) is not int:
                fields.fail("allowed", value, "int is needed")
        axis = Axis(name, fields.take("prefix", str), "", MappingProxyType({}), allowed, fields.take("why", str, ""))
    fields.done()
    return axis


def _tensor_maps(fields: Fields) -> TensorMaps:
    found = TensorMaps(
        fields.words("names"),
        fields.take("header", str),
        fields.take("describe", str),
        fields.word("tile", ("block_m", "block_n", "block_m, block_n"), default="block_n"),
    )
    fields.done()
    return found


def read_rows(
    table: Mapping[str, Any],
    file: str,
    descriptors: Mapping[tuple[str, str], Descriptor],
    unstated: Mapping[str, Mapping[str, Any]],
) -> Iterator[KernelRow]:
    """The rows of a kernels.toml. Raises TableError with the file, row and key that is wrong.

    ``unstated``: by family, the values of keys that a row leaves out.
    """
    top = Fields(table, file)
    top.take("schema", int)
    found = 0
    for operation in [name for name in table if name != "schema"]:
        families = top.table(operation)
        if operation not in (known := dict.fromkeys(name for name, _ in descriptors)):
            top.fail("operation", operation, f"known: {', '.join(known)}")
        for family in families:
            kinds = [name for of, name in descriptors if of == operation]
            if family not in kinds:
                families.fail("family", family, f"known: {', '.join(kinds)}")
            for row in families.take(family, list):
                found += 1
                for kernel in _variants(row, f"{file}, row {found}", unstated.get(family, {})):
                    yield _row(kernel, descriptors[operation, family])
    if not found:
        msg = f"{file} contains no [[OPERATION.FAMILY]] row; nothing could be built"
        raise TableError(msg)


def _variants(row: Any, where: str, unstated: Mapping[str, Any]) -> Iterator[Fields]:
    """A row, and the other kernels with its tile; each has its own keys under ``also.VARIANT``."""
    also = Fields(row, where).table("also", optional=True)
    plain = {**unstated, **{key: row[key] for key in row if key != "also"}}
    yield Fields(plain, where)
    shared = Fields(plain, where).table("options", optional=True).every(int)
    for variant in also:
        own = also.table(variant)
        for key in own:
            own.one_of("key", key, OF_A_VARIANT)
        options = {**shared, **own.table("options").every(int)}
        yield Fields({**plain, **row["also"][variant], "variant": variant, "options": options}, where)


def _row(fields: Fields, kind: Descriptor) -> KernelRow:
    variant = fields.take("variant", str, default="")
    axes = {axis.name: fields.take(axis.name, int) for axis in kind.numbers}
    names = [kind.operation, kind.family, *(f"{axis.prefix}{axes[axis.name]}" for axis in kind.numbers), variant]
    fields.where += f" ({' '.join(filter(None, names))})"
    for axis in kind.numbers:
        if axis.allowed and axes[axis.name] not in axis.allowed:
            fields.fail(axis.name, axes[axis.name], f"known: {', '.join(map(str, axis.allowed))}; {axis.why}")
    options, cost = fields.table("options", optional=True), fields.table("cost", optional=True)
    size = fields.table("tile")
    tile = {name: size.take(name, int) if name in kind.tile else 1 for name in TILE}
    row = KernelRow(
        descriptor=kind,
        source=fields.where,
        variant=variant,
        dtypes=fields.words("dtypes", ELEMENT_BYTES),
        targets=fields.words("targets"),
        axes=MappingProxyType(axes),
        words=MappingProxyType(
            {axis.name: fields.words(axis.name, axis.words, tuple(axis.words)) for axis in kind.word_axes}
        ),
        **tile,
        warps=size.take("warps", int),
        min_blocks=size.take("min_blocks", int, default=1),
        options=MappingProxyType({name: options.take(name, int, default) for name, default in kind.options.items()}),
        cost=MappingProxyType({name: cost.take(name, float) for name in kind.cost} if "cost" in fields else {}),
        why=fields.take("why", str),
        allow=fields.table("allow", optional=True).every(str),
        virtual={**kind.virtual, **fields.table("virtual", optional=True).every(str)},
        by_dtype=fields.take("by_dtype", str, default=""),
    )
    for part in (size, options, cost, fields):
        part.done()
    if kind.needs_cost and not row.cost:
        msg = f"{fields.where}: cost is missing: tiles of {kind.family} are chosen by it, and this one never would be"
        raise TableError(msg)
    return row
