"""One dense attention problem for an emulated kernel: shape, layout, values, inputs and the fp64 reference."""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch

from flashmoe.errors import ArgumentError
from flashmoe_build.emulation.compare import DTYPES, UNIT_ROUNDOFF, worst_element
from flashmoe_build.emulation.runner import Buffer
from flashmoe_tools.operations.attention.emulation.recurrence import exact_inputs
from flashmoe_tools.operations.attention.reference import weigh
from flashmoe_tools.tables import Unit

FAR_ROW = 2**26 + 8  # elements between rows: the 32nd row is past 2^31
_Kind = TypeVar("_Kind", bound=Enum)
_SHAPE = re.compile(r"b(\d+)\.h(\d+)\.kv(\d+)\.q(\d+)\.k(\d+)\.d(\d+)")


class Layout(str, Enum):
    """How a [batch, heads, rows, head_dim] tensor is stored."""

    BHSD = "bhsd"  # contiguous
    BSHD = "bshd"  # heads inside rows, as projections give them
    ROWS = "rows"  # every row is a separate buffer: reading one element past a row is out of bounds
    FAR = "far"  # like ROWS, with rows 2^26 elements apart: offsets exceed 2^31


class Values(str, Enum):
    """What the inputs hold."""

    NORMAL = "normal"
    SHIFTED = "shifted"  # normal + 0.5: a bias that makes wrong masks visible
    LARGE = "large"  # logits times ten: nearly one-hot rows
    OUTLIER = "outlier"  # one huge key
    LOW = "low"  # logits near -120: if a padded key scores 0, exp(0 - lse) overflows
    RISING = "rising"  # scores grow with the key index: the maximum moves with every tile, in both directions
    LEVEL = "level"  # every other row: equal scores above 2^20; rows between them: rising scores
    EXACT = "exact"  # integers whose results are known bit for bit (recurrence.py)
    NAN = "nan"  # in the last key, one value of the first, one query: they spread as in a plain softmax


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention problem."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int

    def __str__(self) -> str:
        return f"b{self.batch}.h{self.heads_q}.kv{self.heads_kv}.q{self.seq_q}.k{self.seq_k}.d{self.head_dim}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        match = _SHAPE.fullmatch(text)
        if match is None:
            msg = f"shape {text!r}: write b<batch>.h<heads>.kv<key heads>.q<rows>.k<keys>.d<head dim>, as b1.h2.kv1.q65.k65.d64"
            raise ArgumentError(msg)
        return cls(*(int(group) for group in match.groups()))


@dataclass(frozen=True)
class Problem:
    """A shape and everything else that determines the inputs."""

    shape: Shape
    dtype: str
    causal: bool
    layout: Layout = Layout.BHSD
    values: Values = Values.NORMAL
    data_seed: int = 0
    splits: int = 1  # blocks that share the keys of a query tile (split kernels)
    wants_lse: bool = True  # False: params.lse is null; backward kernels: there is no gradient of lse
    has_counter: bool = True  # False: params.tile_counter is null (persistent kernels: the static schedule)
    huge: bool = False  # offsets above 2^31: only the last block runs

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def name(self) -> str:
        splits = f"-s{self.splits}" if self.splits > 1 else ""
        without = ("" if self.wants_lse else "-nolse") + ("" if self.has_counter else "-nocounter")
        layout = "huge" if self.huge else self.layout.value
        return f"{self.mask}-{self.shape}-{layout}-{self.values.value}{splits}{without}"

    @property
    def command_words(self) -> str:
        """The words of the command that repeats the problem, even if no suite has it."""
        if self.huge:
            return f"--mask {self.mask} --huge"
        splits = f" --splits {self.splits}" if self.splits > 1 else ""
        without = ("" if self.wants_lse else " --no-lse") + ("" if self.has_counter else " --no-counter")
        given = f"--layout {self.layout.value} --values {self.values.value} --data-seed {self.data_seed}"
        return f"--mask {self.mask} --shape {self.shape} {given}{splits}{without}"

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.shape.head_dim)

    @property
    def scale_log2(self) -> float:
        return self.scale * math.log2(math.e)

    @property
    def rows(self) -> tuple[int, int, int]:
        """[batch, heads, rows] of the queries."""
        return self.shape.batch, self.shape.heads_q, self.shape.seq_q

    def sizes(self) -> dict[str, Any]:
        """The members of the parameter structs that depend only on the problem."""
        return {**vars(self.shape), "scale": self.scale, "scale_log2": self.scale_log2}

    def laid_out(self, tensor: torch.Tensor, layout: Layout | None = None) -> torch.Tensor:
        """[batch, heads, rows, head_dim], stored in the layout's order."""
        if (layout or self.layout) is Layout.BSHD:
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return tensor.contiguous()

    def placed(self, tensor: torch.Tensor, *, is_output: bool = False) -> Buffer:
        """A tensor that is already laid out, as a parameter of the kernel."""
        row_stride = None
        if self.layout in (Layout.ROWS, Layout.FAR):
            row_stride = FAR_ROW if self.layout is Layout.FAR else (tensor.shape[-1] + 7) // 8 * 8 + 8
        return Buffer(tensor, writable=is_output, initialised=not is_output, row_stride=row_stride)


def _named(kind: type[_Kind], text: str) -> _Kind:
    if text not in [one.value for one in kind]:
        msg = f"{text!r} is not a known {kind.__name__.lower()}: {', '.join(one.value for one in kind)}"
        raise ArgumentError(msg)
    return kind(text)


def custom(unit: Unit, arguments: argparse.Namespace) -> Iterator[Problem]:
    """The problem described by a command line, for each mask of the kernel; an ArgumentError if the words describe none."""
    shape = Shape.parse(arguments.shape)
    layout, values = _named(Layout, arguments.layout), _named(Values, arguments.values)
    if shape.head_dim > unit.row.axes.get("head_dim", shape.head_dim):
        return
    for mask in unit.row.words.get("mask", ("full", "causal")):
        yield Problem(
            shape,
            unit.dtype,
            mask == "causal",
            layout,
            values,
            arguments.data_seed,
            arguments.splits or (2 if unit.row.options.get("split") else 1),
            wants_lse=not arguments.no_lse,
            has_counter=not arguments.no_counter,
        )


@dataclass(frozen=True)
class Inputs:
    """Logical tensors [batch, heads, rows, head_dim], contiguous."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """fp64 results and the error bounds for a 16-bit kernel."""

    out: torch.Tensor
    lse: torch.Tensor
    bound: torch.Tensor  # of |out - reference|, per element

    def disagreements(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> list[str]:
        """What is wrong with a kernel's results; empty if nothing is."""
        found = worst_element("out", out, self.out, self.bound)
        if not problem.wants_lse:
            return found
        return found + worst_element("lse", lse, self.lse, lse_bound(self.lse))


def lse_bound(lse: torch.Tensor) -> torch.Tensor:
    """The allowed error of a kernel's log-sum-exp."""
    return 2e-4 + 1e-6 * lse.masked_fill(torch.isinf(lse), 0.0).abs()


def drawn_lengths(unit: Unit) -> tuple[int, int]:
    """Rows and keys, drawn per kernel: rows near an edge of its tiles, keys - rows from -3 to 3."""
    draw = random.Random(unit.name)
    rows = unit.row.block_m * draw.choice((1, 1, 2)) + draw.randint(-3, 3)
    return rows, rows + draw.randint(-3, 3)


def make_inputs(problem: Problem) -> Inputs:
    """Fresh random inputs, the same for the same problem."""
    s = problem.shape
    generator = torch.Generator().manual_seed(problem.data_seed * 7919 + 17)

    def normal(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(s.batch, heads, rows, s.head_dim, generator=generator)

    q, k, v = normal(s.heads_q, s.seq_q), normal(s.heads_kv, s.seq_k), normal(s.heads_kv, s.seq_k)
    if problem.values is Values.SHIFTED:
        q, k, v = q + 0.5, k + 0.5, v + 0.5
    elif problem.values is Values.LARGE:
        q = q * 10
    elif problem.values is Values.OUTLIER:
        k[:, :, s.seq_k // 2] *= 30
    elif problem.values is Values.LOW:
        direction = math.sqrt(120.0 / math.sqrt(s.head_dim)) * torch.ones(s.head_dim)
        q, k = 0.1 * q + direction, 0.1 * k - direction
    elif problem.values is Values.RISING:
        direction = torch.ones(s.head_dim) / math.sqrt(s.head_dim)
        ramp = torch.linspace(-1, 1, s.seq_k)[None, None, :, None] * 24
        sign = torch.where(torch.arange(s.seq_q) % 2 == 0, 1.0, -1.0)[None, None, :, None]
        k = 0.2 * k + ramp * direction
        q = 0.2 * q + sign * direction * 4
    elif problem.values is Values.LEVEL:
        # Integers, so the scores of the level rows are exact and equal.
        q, k = torch.full_like(q, 384.0), torch.full_like(k, 384.0)
        k[..., 0] = torch.arange(s.seq_k) % 256
        q[..., 0] = 0.0
        q[:, :, 1::2] = 0.0
        q[:, :, 1::2, 0] = 8.0
    elif problem.values is Values.EXACT:
        q, k, v = (exact_inputs(tensor, generator)[index].float() for index, tensor in enumerate((q, k, v)))
    elif problem.values is Values.NAN:
        nan = float("nan")
        k[-1, -1, -1, s.head_dim // 2] = nan
        v[-1, -1, 0, s.head_dim - 1] = nan
        q[0, 0, s.seq_q // 2, 3] = nan
    dtype = DTYPES[problem.dtype]
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype))


def reference(problem: Problem, inputs: Inputs) -> Reference:
    """Attention in fp64, and how far a kernel that rounds P and the output to 16 bits may be from it.

    NaN where a NaN of the inputs reaches. |error| <= u * (sum_j p_j |v_j|) for P rounded to the type, + u * |out| for
    the output, + 2e-5 * (sum_j p_j |v_j|) for fp32 accumulation and the approximate exponential, with p normalised; +
    2^-25 |v| per key for f16 weights below 2^-14.
    """
    s = problem.shape
    repeat = s.heads_q // s.heads_kv
    q = inputs.q.double()
    k, v = (t.double().repeat_interleave(repeat, dim=1) for t in (inputs.k, inputs.v))
    scores = (q @ k.transpose(-1, -2)) * problem.scale
    is_level = scores.amax(dim=-1, keepdim=True) == scores.amin(dim=-1, keepdim=True)
    weights, lse = weigh(scores, causal=problem.causal)  # masks the scores
    out = weights @ v  # 0 * NaN is NaN, as in a plain softmax for a masked key
    spread = weights @ v.abs()
    unit = UNIT_ROUNDOFF[problem.dtype]
    # Scores of size 100 add an fp32 error of about 1e-5 to the exponent, relative to p, unless all scores of a row have
    # the same error.
    exponent = 4e-7 * scores.masked_fill(scores == float("-inf"), 0.0).abs().amax(dim=-1, keepdim=True)
    if problem.splits == 1:  # the splits of a row are weighted by their lse, each of which is rounded
        exponent = exponent.masked_fill(is_level, 0.0)
    small = s.seq_k * 2.0**-25 * float(v.nan_to_num(0).abs().max()) if problem.dtype == "f16" else 0.0
    bound = (unit + 2e-5 + exponent) * spread + unit * out.abs() + 1e-6 + small
    return Reference(out, lse, bound)
