"""The kernels that read and write 8-bit float caches, on the emulated machine."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES, different
from flashmoe_build.emulation.runner import Launch, Runner, Trial, output
from flashmoe_tools.operations.serving.emulation import append, decode, forward
from flashmoe_tools.operations.serving.emulation.append import AppendProblem
from flashmoe_tools.operations.serving.emulation.cases import MIN_SPLIT, SMALLEST, chunks
from flashmoe_tools.operations.serving.emulation.forward import values_of
from flashmoe_tools.operations.serving.emulation.problem import Keys, VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import NAN, Tensors, build
from flashmoe_tools.tables import Unit

E4M3 = torch.float8_e4m3fn
BASE = 0.25  # divides values before rounding; not the scales: how a cache was quantised does not matter to the kernels
LEAST_PAGE = 16  # smallest page size that can have a scale
NAN_CODE = 0x7F
FACTOR = 2.0  # constant factor next to scales in memory
COPIED_KEYS = 32  # keys that a block of threads copies at a time


class Scales(str, Enum):
    """What a cache has scales for."""

    NUMBER = "number"
    HEADS = "heads"
    SEQUENCES = "sequences"
    PAGES = "pages"


@dataclass(frozen=True)
class E4m3Problem(VarlenProblem):
    """``exponents``: scales are powers of two with these exponents; None: scales have any value.

    ``choices``: the scales themselves instead. ``has_every_code``: both caches hold every code except NaN.
    """

    scales: Scales = Scales.NUMBER
    exponents: tuple[int, int] | None = (-4, 2)
    choices: tuple[float, ...] = ()
    has_every_code: bool = False
    has_signs: bool = False  # scales below zero and equal to zero


@dataclass(frozen=True)
class Scale:
    """``values`` [1 or sequences or pages, key heads], and the struct that the kernel gets."""

    values: torch.Tensor
    scales: Scales

    def of_key(self, sequence: int, page: int) -> torch.Tensor:
        """[key heads]"""
        index = {Scales.SEQUENCES: sequence, Scales.PAGES: page}.get(self.scales, 0)
        return self.values[index]

    @property
    def struct(self) -> dict[str, Any]:
        if self.scales is Scales.NUMBER:
            return {"factor": float(self.values[0, 0])}
        own = self.scales in (Scales.SEQUENCES, Scales.PAGES)
        return {
            "values": self.values / FACTOR,
            "stride": self.values.stride(0) if own else 0,
            "head_stride": 1,
            "factor": FACTOR,
            "is_of_pages": self.scales is Scales.PAGES,
        }


def problems(unit: Unit) -> Iterator[E4m3Problem]:
    """The 16-bit kernel's problems with all kinds of scales, then problems specific to scales."""
    n, dim = unit.row.block_n, unit.row.axes["head_dim"]
    every = [E4m3Problem(**{one.name: getattr(p, one.name) for one in fields(p)}) for p in decode.problems(unit)]
    for index, problem in enumerate(every):
        kind = tuple(Scales)[index % len(Scales)]
        if kind is Scales.PAGES and not (problem.keys_layout is Keys.PAGED and problem.page_size % LEAST_PAGE == 0):
            kind = Scales.SEQUENCES
        if problem.head_dim != problem.head_dim_v:  # rows must be multiples of 16 bytes
            problem = replace(problem, head_dim=dim // 2 + 16, head_dim_v=dim // 2 - 16)
        yield replace(problem, scales=kind)
    base = replace(every[0], keys=(5 * n + 7, 3, 0, n, 2 * n + 1), scales=Scales.PAGES, data_seed=90)
    # Enough tiles in one segment that converting bf16 queries pays off; those of one sequence hold what f16 cannot.
    long = replace(base, name="long segments", rows=(1,), keys=(17 * n + 5,), splits=1, scales=Scales.HEADS)
    if unit.dtype == "bf16" and dim > SMALLEST:
        if dim == 256:  # its queries are in shared memory
            yield long
        return
    # The window begins inside a warp's 16 keys; the first visible key selects their page.
    yield replace(base, name="page scales, window", left=n + 5, right=0, page_size=48)
    yield replace(base, name="any page scales", exponents=None, page_size=32)
    # Scales in whose units the output cannot be kept: zero, and for bf16 a distant one.
    yield replace(base, name="no units", choices=(0.0, 1.0, 1.0) if unit.dtype == "f16" else (0.0, 32.0, 2.0**41))
    yield replace(base, name="far page scales", exponents=(-20, 4 if unit.dtype == "f16" else 20), splits=1)
    yield replace(base, name="every code", scales=Scales.HEADS, exponents=(-6, -6), has_every_code=True)
    yield long
    # bf16 weights that f16 cannot represent: the references of some tiles lag far behind.
    yield replace(base, name="wide scores", scales=Scales.HEADS, magnitude=6.0)


def coded_chunks(unit: Unit) -> Iterator[E4m3Problem]:
    """The problems of the 16-bit kernel with every kind of scale; every code, and scales of every sign."""
    n, dim = unit.row.block_n, unit.row.axes["head_dim"]
    every = [E4m3Problem(**{one.name: getattr(p, one.name) for one in fields(p)}) for p in chunks(unit)]
    for index, problem in enumerate(every):
        if problem.head_dim != problem.head_dim_v:  # rows must be multiples of 16 bytes
            problem = replace(problem, head_dim=dim // 2 + 16, head_dim_v=dim // 2 - 16)
        kind = (Scales.NUMBER, Scales.HEADS, Scales.SEQUENCES)[index % 3]
        if problem.keys_layout is Keys.PAGED and problem.page_size % LEAST_PAGE == 0:
            kind = Scales.PAGES
        yield replace(problem, scales=kind, exponents=(-2, -2) if problem.is_exact else problem.exponents)
    base = replace(every[1], splits=1, keys=(2 * n + 9, n, 5, 1), data_seed=70)
    yield replace(base, name="every code", scales=Scales.HEADS, exponents=(-6, -6), has_every_code=True)
    yield replace(base, name="any scales", scales=Scales.SEQUENCES, exponents=None)
    yield replace(base, name="signs", scales=Scales.HEADS, has_signs=True)
    # Several blocks per split, with one page or many per block; a window that has dropped pages.
    paged = replace(base, name="page scales", scales=Scales.PAGES, keys_layout=Keys.PAGED, page_size=48)
    yield replace(paged, keys=(5 * n + 9, 2 * n, 5, 1))
    yield replace(paged, name="page scales, window", keys=(5 * n + 9, n, 5, 1), page_size=16, left=n + 70, right=0)
    yield replace(paged, name="page scales, shares", keys=(6 * MIN_SPLIT + 9, 2 * n, 5, 1), splits=2, has_signs=True)


def _scale(p: E4m3Problem, pages: int, generator: torch.Generator) -> Scale:
    rows = {Scales.SEQUENCES: len(p.rows), Scales.PAGES: pages}.get(p.scales, 1)
    heads = 1 if p.scales is Scales.NUMBER else p.heads_kv
    if p.choices:
        values = torch.tensor(p.choices)[torch.randint(len(p.choices), (rows, heads), generator=generator)]
    elif p.exponents is None:
        values = torch.rand(rows, heads, generator=generator) + 0.1
    else:
        values = 2.0 ** torch.randint(p.exponents[0], p.exponents[1] + 1, (rows, heads), generator=generator).float()
    if p.has_signs:
        values *= torch.arange(heads) - 1
    return Scale(values.expand(rows, p.heads_kv).contiguous(), p.scales)


def _codes(p: E4m3Problem, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    codes = (tensor.float() / BASE).to(E4M3)
    if not p.has_every_code:
        return codes
    drawn = torch.randint(0, 256, codes.shape, generator=generator, dtype=torch.uint8)
    drawn = torch.where((drawn & NAN_CODE) == NAN_CODE, 0, drawn)
    return torch.where(torch.isnan(tensor), codes.view(torch.uint8), drawn).view(E4M3)


def _rows(p: E4m3Problem, tensors: Tensors, codes: torch.Tensor, scale: Scale, sequence: int) -> torch.Tensor:
    """[key heads, keys, columns] of a sequence in float32; zero for pages that a window has left behind."""
    rows = []
    for key in range(p.keys[sequence]):
        if tensors.block_table is not None:
            page = int(tensors.block_table[sequence, key // p.page_size])
            if not 0 <= page < codes.shape[0]:
                rows.append(torch.zeros(p.heads_kv, codes.shape[-1]))
                continue
            row = codes[page, key % p.page_size]
        elif tensors.cu_seqlens_k is not None:
            page, row = 0, codes[int(tensors.cu_seqlens_k[sequence]) + key]
        else:
            page, row = 0, codes[sequence, :, key]
        rows.append(row.float() * scale.of_key(sequence, page)[:, None])
    return torch.stack(rows, dim=1) if rows else torch.zeros(p.heads_kv, 0, codes.shape[-1])


def quantize(p: E4m3Problem, tensors: Tensors) -> tuple[Tensors, Scale, Scale]:
    """Replaces k and v by codes, and ``sequences`` by the codes times their scales."""
    generator = torch.Generator().manual_seed(p.data_seed * 31 + 7)
    k, v = (_codes(p, tensor, generator) for tensor in (tensors.k, tensors.v))
    k_scale, v_scale = (_scale(p, tensors.k.shape[0], generator) for _ in range(2))
    sequences = tuple(
        (q, _rows(p, tensors, k, k_scale, index), _rows(p, tensors, v, v_scale, index))
        for index, (q, _, _) in enumerate(tensors.sequences)
    )
    return replace(tensors, k=k, v=v, sequences=sequences), k_scale, v_scale


def dequantize(p: E4m3Problem, tensors: Tensors, k_scale: Scale, v_scale: Scale) -> Tensors:
    """The 16-bit caches of ``quantize``'s codes; not for per-sequence scales if sequences share pages."""

    def whole(codes: torch.Tensor, scale: Scale) -> torch.Tensor:
        values = scale.values
        if p.keys_layout is Keys.DENSE:
            values = values[:, :, None, None]
        elif p.keys_layout is Keys.PAGED:
            values = values[:, None, :, None]
        else:
            values = values[:1, :, None]
        return (codes.float() * values).to(tensors.q.dtype)

    return replace(tensors, k=whole(tensors.k, k_scale), v=whole(tensors.v, v_scale))


def trial(unit: Unit, problem: E4m3Problem) -> Trial:
    tensors, k_scale, v_scale = quantize(problem, build(problem))
    return trial_on(unit, problem, tensors, k_scale, v_scale)


def trial_on(unit: Unit, p: E4m3Problem, tensors: Tensors, k_scale: Scale, v_scale: Scale) -> Trial:
    made = decode.trial_on(unit, p, tensors)
    (launch,) = made.launches
    values = {"forward": launch.values, "k_scale": k_scale.struct, "v_scale": v_scale.struct}
    return replace(made, launches=[replace(launch, values=values)])


def coded_chunk_trial(unit: Unit, p: E4m3Problem) -> Trial:
    tensors, k_scale, v_scale = quantize(p, build(p))
    made = forward.trial_on(unit, p, tensors)
    (launch,) = made.launches
    scales = forward.all_preceding({"k_scale": k_scale.struct, "v_scale": v_scale.struct})
    return replace(made, launches=[replace(launch, values={"forward": launch.values, **scales})])


# Values at the edges of rounding: ties, the largest code and beyond, subnormals.
EDGES = (448.0, 463.9, 465.0, 1e4, -1e4, math.inf, -math.inf, NAN, 2.0**-10, 3 * 2.0**-10, 2.0**-11, 1.0625, 1.1875)


class StoredCodes(append.Stored):
    """Stores rows divided by the scale and rounded."""

    def __init__(self, p: AppendProblem) -> None:
        self.p = p
        self.generator = torch.Generator().manual_seed(p.data_seed + 9)
        self.scales: dict[str, Scale] = {}

    def prepare(self, name: str, cache: torch.Tensor, new: torch.Tensor, *, is_paged: bool) -> torch.Tensor:
        kind = Scales.HEADS if name == "k" else Scales.PAGES if is_paged else Scales.SEQUENCES
        rows = {Scales.PAGES: cache.shape[0], Scales.SEQUENCES: len(self.p.held)}.get(kind, 1)
        self.scales[name] = Scale(torch.rand(rows, append.HEADS, generator=self.generator) + 0.5, kind)
        self.scales[name].values[:, 0] = 1.0
        count = min(len(EDGES), new.numel())
        new.transpose(1, 2).view(-1)[:count] = torch.tensor(EDGES[:count]).to(new.dtype)
        return cache.to(E4M3)

    def row(self, name: str, row: torch.Tensor, sequence: int, page: int) -> torch.Tensor:
        divided = row.float() / self.scales[name].of_key(sequence, page)[:, None]
        codes = divided.clamp(-448, 448).to(E4M3).view(torch.uint8)
        return codes.masked_fill(torch.isnan(divided), NAN_CODE).view(E4M3)

    def values(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"append": values, **{f"{name}_scale": scale.struct for name, scale in self.scales.items()}}


def append_trial(unit: Unit, p: AppendProblem) -> Trial:
    return append.trial_on(unit, p, StoredCodes(p))


def dequantize_problems(unit: Unit) -> Iterator[E4m3Problem]:
    """Every layout and kind of scale; shared pages, tails, different numbers of columns for K and V."""
    base = E4m3Problem(
        "pages", unit.dtype, (1,) * 4, (70, 0, 33, 16), 2, 2, 64, 48, keys_layout=Keys.PAGED, page_size=16, slack=5
    )
    yield replace(base, scales=Scales.PAGES, exponents=None)
    yield replace(base, name="large pages", page_size=32, scales=Scales.PAGES, keys=(70, 0, 33, 32))
    yield replace(base, name="odd pages", page_size=7, scales=Scales.SEQUENCES, heads_kv=1, head_dim=16, head_dim_v=256)
    yield replace(base, name="dense", keys_layout=Keys.DENSE, page_size=0, spare_keys=3, scales=Scales.HEADS)
    yield replace(base, name="every code", scales=Scales.NUMBER, exponents=(-6, -6), has_every_code=True)
    window = replace(base, name="window", keys=(134, 0, 33, 49), left=20, right=0)  # pages before the window are gone
    yield from (window, replace(window, name="window, large pages", page_size=32))


def dequantize_trial(unit: Unit, p: E4m3Problem) -> Trial:
    tensors, k_scale, v_scale = quantize(p, build(p))
    values = values_of(p, tensors, torch.empty(0))
    read_keys = min(values["seq_k"], max(p.rows) + p.left + COPIED_KEYS)
    named = ("k", "v", "k_stride", "v_stride", "batch", "heads_kv", "seq_k", "head_dim", "head_dim_v", "sequences")
    outs, expected = {}, {}
    for index, (name, columns) in enumerate((("k_out", p.head_dim), ("v_out", p.head_dim_v)), start=1):
        outs[name] = torch.full((len(p.keys), p.heads_kv, values["seq_k"], columns), NAN, dtype=DTYPES[p.dtype])
        expected[name] = outs[name].clone()
        for whole, own in zip(expected[name], tensors.sequences, strict=True):
            keys = own[index].shape[1]
            begin = max(0, keys - read_keys) // COPIED_KEYS * COPIED_KEYS
            whole[:, begin:keys] = own[index][:, begin:].to(whole.dtype)

    def check() -> list[str]:
        pairs = ((name, out.view(torch.int16), expected[name].view(torch.int16)) for name, out in outs.items())
        return [line for pair in pairs for line in different(*pair)]

    given = {name: values[name] for name in named}
    given |= {
        "read_keys": read_keys,
        "k_scale": k_scale.struct,
        "v_scale": v_scale.struct,
        **{name: output(out) for name, out in outs.items()},
    }
    return Trial([Launch(forward.all_preceding(given), blocks=3)], check, outs)


RUNNER = Runner(problems, trial)
CHUNK_RUNNER = Runner(coded_chunks, coded_chunk_trial)
APPEND_RUNNER = Runner(append.problems, append_trial)
DEQUANTIZE_RUNNER = Runner(dequantize_problems, dequantize_trial)
