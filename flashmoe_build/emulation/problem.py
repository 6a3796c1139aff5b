"""One attention problem for an emulated kernel: shape, layout, values, inputs and the fp64 reference."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum

import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.operations.attention.reference import weigh
from flashmoe_tools.operations.dtypes import TORCH_DTYPES

DTYPES = {name: TORCH_DTYPES[name] for name in ("f16", "bf16")}
# Half a unit in the last place, relative: what rounding to the type may cost.
UNIT_ROUNDOFF = {"f16": 2.0**-11, "bf16": 2.0**-8}
_SHAPE = re.compile(r"b(\d+)\.h(\d+)\.kv(\d+)\.q(\d+)\.k(\d+)\.d(\d+)")


class Layout(str, Enum):
    """How a [batch, heads, rows, head_dim] tensor lies in memory."""

    BHSD = "bhsd"  # contiguous
    BSHD = "bshd"  # heads inside rows, as projections give them
    ROWS = "rows"  # every row a buffer of its own: reading one element past a row is out of bounds
    FAR = "far"  # as ROWS, the rows 2^26 elements apart: offsets pass 2^31


class Values(str, Enum):
    """What the inputs hold."""

    NORMAL = "normal"
    SHIFTED = "shifted"  # normal + 0.5: a bias that wrong masks show
    LARGE = "large"  # logits times ten: nearly one-hot rows
    OUTLIER = "outlier"  # one huge key
    LOW = "low"  # logits near -120: where a padded key scores 0, exp(0 - lse) overflows
    RISING = "rising"  # scores grow with the key index: the maximum moves with every tile, upwards and downwards
    LEVEL = "level"  # every other row: equal scores of over 2^20; between them: scores that rise
    NAN = "nan"  # in the last key, in one value of the first, in one query: they go where a plain softmax takes them


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
    """A shape with everything else that decides the inputs."""

    shape: Shape
    dtype: str
    causal: bool
    layout: Layout = Layout.BHSD
    values: Values = Values.NORMAL
    data_seed: int = 0
    splits: int = 1  # blocks that share the keys of a query tile (split kernels)
    wants_lse: bool = True  # False: params.lse is null
    has_counter: bool = True  # False: params.tile_counter is null (persistent kernels: the static schedule)
    huge: bool = False  # offsets past 2^31: only the last block runs (huge.py)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.shape.head_dim)

    @property
    def scale_log2(self) -> float:
        return self.scale * math.log2(math.e)


@dataclass(frozen=True)
class NamedProblem:
    """A problem of an operation other than attention: the suite of its kernel knows it by name."""

    name: str

    @property
    def causal(self) -> bool:
        return False

    @property
    def huge(self) -> bool:
        return False


@dataclass(frozen=True)
class Inputs:
    """Logical tensors [batch, heads, rows, head_dim], contiguous."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """fp64 results and the error bounds that a 16-bit kernel must keep."""

    out: torch.Tensor
    lse: torch.Tensor
    bound: torch.Tensor  # of |out - reference|, elementwise


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
        # Integers: the scores of the level rows are exact, and equal.
        q, k = torch.full_like(q, 384.0), torch.full_like(k, 384.0)
        k[..., 0] = torch.arange(s.seq_k) % 256
        q[..., 0] = 0.0
        q[:, :, 1::2] = 0.0
        q[:, :, 1::2, 0] = 8.0
    elif problem.values is Values.NAN:
        nan = float("nan")
        k[-1, -1, -1, s.head_dim // 2] = nan
        v[-1, -1, 0, s.head_dim - 1] = nan
        q[0, 0, s.seq_q // 2, 3] = nan
    dtype = DTYPES[problem.dtype]
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype))


def reference(problem: Problem, inputs: Inputs) -> Reference:
    """NaN where a NaN of the inputs reaches; elsewhere attention in fp64, and how far a kernel that rounds P and the output to 16 bits may be from it.

    |error| <= u * (sum_j p_j |v_j|) for P rounded to the type, + u * |out| for the output, + 2e-5 * (sum_j p_j |v_j|) for
    fp32 accumulation and the approximate exponential, with p normalised; + 2^-25 |v| a key for f16 weights below 2^-14.
    """
    s = problem.shape
    repeat = s.heads_q // s.heads_kv
    q = inputs.q.double()
    k, v = (t.double().repeat_interleave(repeat, dim=1) for t in (inputs.k, inputs.v))
    scores = (q @ k.transpose(-1, -2)) * problem.scale
    is_level = scores.amax(dim=-1, keepdim=True) == scores.amin(dim=-1, keepdim=True)
    weights, lse = weigh(scores, causal=problem.causal)  # masks the scores
    out = weights @ v  # 0 * NaN is NaN: so says a plain softmax of a masked key, too
    spread = weights @ v.abs()
    unit = UNIT_ROUNDOFF[problem.dtype]
    # Scores of size 100 carry an fp32 error of about 1e-5 into the exponent, relative to p; unless all of a row carry the same.
    exponent = 4e-7 * scores.masked_fill(scores == float("-inf"), 0.0).abs().amax(dim=-1, keepdim=True)
    if problem.splits == 1:  # the splits of a row are weighed by their lse, rounded each
        exponent = exponent.masked_fill(is_level, 0.0)
    small = s.seq_k * 2.0**-25 * float(v.nan_to_num(0).abs().max()) if problem.dtype == "f16" else 0.0
    bound = (unit + 2e-5 + exponent) * spread + unit * out.abs() + 1e-6 + small
    return Reference(out, lse, bound)


def worst_place(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> list[str]:
    """Where a result is furthest outside its bound, [batch, head, row, column], in words; empty when nowhere."""
    error = (actual.double() - expected).abs()
    wrong = ~((error <= bound) | (torch.isnan(actual) & torch.isnan(expected)))
    if not wrong.any():
        return []
    worst = (error - bound).nan_to_num(float("inf")).where(wrong, float("-inf"))
    index = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    axes = ", ".join(("batch", "head", "row", "column")[: len(index)])
    text = (
        f"{name} is wrong at {int(wrong.sum())} of {wrong.numel()} places; worst at [{axes}] {list(index)}: "
        f"{float(actual[index]):.6g} instead of {float(expected[index]):.6g} (bound {float(bound[index]):.2e})"
    )
    return [text]


def disagreements(problem: Problem, expected: Reference, out: torch.Tensor, lse: torch.Tensor) -> list[str]:
    """What is wrong with a kernel's results; empty when nothing is."""
    found = worst_place("out", out, expected.out, expected.bound)
    if not problem.wants_lse:
        return found
    tolerance = 2e-4 + 1e-6 * expected.lse.masked_fill(torch.isinf(expected.lse), 0.0).abs()
    same_infinity = torch.isinf(expected.lse) & (lse.double() == expected.lse)
    both_nan = torch.isnan(expected.lse) & torch.isnan(lse)
    bad = ~(((lse.double() - expected.lse).abs() <= tolerance) | same_infinity | both_nan)
    if bad.any():
        first = tuple(int(i) for i in bad.nonzero()[0])
        found.append(
            f"lse is wrong at {int(bad.sum())} of {bad.numel()} rows; first at [batch, head, row] {list(first)}: "
            f"{float(lse[first]):.6g} instead of {float(expected.lse[first]):.6g}"
        )
    return found
