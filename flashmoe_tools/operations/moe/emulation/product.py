"""One grouped product for an emulated kernel: its description, parameters, and fp64 reference."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_build.emulation.compare import UNIT_ROUNDOFF, Expected
from flashmoe_tools.operations.moe.reference import activate
from flashmoe_tools.tables import Unit

DOT_COLUMNS = 128  # kDotColumns of moe/params/gemm.h
EARLY_SLOTS = 32  # most slots for which gated few-rows products get the choices themselves; the host: 1024
EXPONENT_ERROR = 4e-6  # of an activation: error of the approximate exponential, relative to its factor


ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")  # in the order of enum class Activation


@dataclass(frozen=True)
class Product:
    """``n`` and ``k`` as in GemmParams: for a gated product n counts the columns of gate and up together."""

    operation: str
    dtype: str
    counts: tuple[int, ...]  # rows of each expert
    n: int
    k: int
    weights: str = ""  # a word of the axis; "": the operation has no such axis
    activation: str = ""
    is_interleaved: bool = False
    saves: bool = False  # gated: store the preactivation
    has_bias: bool = False
    gathers: bool = False  # a (weight gradient: b) is indexed by slots; False: by rows
    top_k: int = 1
    unrouted: int = 0  # minimal number of slots without a row
    has_nan: bool = False  # NaN in a few rows, which must not affect others
    is_far: bool = False  # offsets above 2^31 elements
    has_counter: bool = True
    scale: float = 1.0  # approximate size of the products
    seed: int = 0

    @property
    def name(self) -> str:
        rows = ".".join(map(str, self.counts)) if len(self.counts) < 9 else f"{self.rows}of{len(self.counts)}"
        flags = ("is_interleaved", "saves", "has_bias", "gathers", "has_nan", "is_far")
        labels = (flag.removeprefix("is_").removeprefix("has_") for flag in flags if getattr(self, flag))
        counter = "" if self.has_counter else "nocounter"
        return "-".join(
            filter(None, (self.weights, f"r{rows}", f"n{self.n}", f"k{self.k}", self.activation, *labels, counter))
        )

    @property
    def is_gated(self) -> bool:
        return self.operation.startswith("grouped_gemm_gated") and not self.operation.endswith("backward")

    @property
    def is_backward(self) -> bool:
        return self.operation == "grouped_gemm_gated_backward"

    @property
    def is_gradient(self) -> bool:
        return self.operation.startswith("grouped_gemm_weight_gradient")

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def slots(self) -> int:
        return math.ceil((self.rows + self.unrouted) / self.top_k) * self.top_k

    @property
    def tokens(self) -> int:
        return self.slots // self.top_k

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.is_gated else 2 * self.n if self.is_backward else self.n

    @property
    def words(self) -> tuple[str, ...]:
        return (self.weights,) if self.weights else ()

    def sizes(self) -> dict[str, Any]:
        """The members of GemmParams that depend only on the problem."""
        return {
            "experts": len(self.counts),
            "slots": self.slots,
            "tokens": self.tokens,
            "top_k": self.top_k,
            "n": self.n,
            "k": self.k,
            "activation": ACTIVATIONS.index(self.activation or "swiglu"),
            "is_interleaved": self.is_interleaved,
        }

    def tiles(self, unit: Unit) -> int:
        """Upper bound of the host, which does not know the counts."""
        m, n = unit.row.block_m, unit.row.block_n
        if self.is_gradient:
            return len(self.counts) * math.ceil(self.n / m) * math.ceil(self.k / n)
        return (math.ceil(self.slots / m) + min(len(self.counts), self.slots)) * math.ceil(self.n / n)

    def experts_of_rows(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))

    def first_rows(self) -> list[int]:
        """The first row of each expert that has rows, except the first such expert."""
        starts = torch.tensor((0, *self.counts)).cumsum(0).tolist()
        return [start for start, count in zip(starts, self.counts, strict=False) if count][1:]


@dataclass(frozen=True)
class Routing:
    """The slot of each row; the experts' rows follow one another."""

    offsets: torch.Tensor  # int32 [experts + 1]
    row_slots: torch.Tensor  # int32 [slots], -1 past the last row

    def sources(self, p: Product) -> torch.Tensor:
        """For each row, its row in the (possibly gathered) tensor."""
        rows = torch.arange(p.rows)
        return self.row_slots[: p.rows].long() // p.top_k if p.gathers else rows

    def choices(self, p: Product) -> torch.Tensor:
        """The expert of each slot, int64 or int32; a slot without a row gets an id that is not in the layer."""
        ids = torch.full((p.slots,), -1 if p.seed % 2 else len(p.counts))
        ids[self.row_slots[: p.rows].long()] = p.experts_of_rows()
        return ids if p.seed % 2 else ids.int()


def route(p: Product, generator: torch.Generator) -> Routing:
    """Random slots for the rows, ascending within an expert."""
    chosen = torch.randperm(p.slots, generator=generator)[: p.rows]
    parts = [part.sort().values for part in chosen.split(list(p.counts))]
    row_slots = torch.full((p.slots,), -1, dtype=torch.int32)
    row_slots[: p.rows] = torch.cat(parts).int()
    return Routing(torch.tensor([0, *p.counts]).cumsum(0).int(), row_slots)


Sums = tuple[torch.Tensor, torch.Tensor]  # fp64, and the allowed error of a kernel's fp32 sums


def sums_of_rows(
    p: Product, a: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, roundoff: float = 1e-5
) -> Sums:
    """The product of ``a`` [rows, k], by row, with ``weights`` [experts, n, k]."""
    sums = torch.zeros((p.rows, weights.shape[1]), dtype=torch.float64)
    error = torch.zeros_like(sums)
    experts, a = p.experts_of_rows(), a.double()
    for expert in experts.unique().tolist():
        own, b = experts == expert, weights[expert].double()
        sums[own] = a[own] @ b.mT + (0.0 if bias is None else bias[expert].double())
        error[own] = a[own].abs() @ b.abs().mT
    return sums, roundoff * error


def halves(p: Product, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up."""
    gate, up = (z[:, 0::2], z[:, 1::2]) if p.is_interleaved else z.chunk(2, dim=1)
    return gate, up


def _both(p: Product, one: torch.Tensor) -> torch.Tensor:
    """The same values for gate and up, in the columns of z."""
    return one.repeat_interleave(2, dim=1) if p.is_interleaved else one.repeat(1, 2)


def _with_slopes(p: Product, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation of z and its derivatives with respect to z, by torch's autograd.

    For a clamp torch gives NaN no gradient; the kernels pass NaN on.
    """
    z = z.detach().requires_grad_()
    value = activate(z, p.activation, "interleaved" if p.is_interleaved else "concat")
    (slopes,) = torch.autograd.grad(value.sum(), z)
    return value.detach(), slopes.masked_fill(z.isnan(), torch.nan)


def _reach(p: Product, z: torch.Tensor) -> torch.Tensor:
    """Bounds the activation and its slopes, up to a constant factor."""
    gate, up = halves(p, z.abs())
    return (1 + gate) * (1 + up)


def activated(p: Product, sums: Sums) -> Sums:
    """The activation in fp64, and its allowed error in fp32."""
    value, slopes = _with_slopes(p, sums[0])
    by_gate, by_up = halves(p, slopes.abs() * sums[1])
    return value, by_gate + by_up + EXPONENT_ERROR * _reach(p, sums[0])


def rounded(p: Product, sums: Sums) -> Sums:
    """Adds the rounding error of the problem's dtype."""
    return sums[0], sums[1] + UNIT_ROUNDOFF[p.dtype] * sums[0].abs()


def forward_results(p: Product, sums: Sums) -> Expected:
    """``d``, and the preactivation if it is stored."""
    if not p.is_gated:
        return {"d": rounded(p, sums)}
    results = {"d": rounded(p, activated(p, sums))}
    return {**results, "preactivation": rounded(p, sums)} if p.saves else results


def gated_backward_results(p: Product, sums: Sums, z: torch.Tensor, row_weights: torch.Tensor) -> Expected:
    """The results of the activation's gradient, by row.

    Bounds: the sums' own, approximate exponentials, rounding.
    """
    s, s_error = sums
    value, slopes = _with_slopes(p, z.double())
    reach, w = _reach(p, z.double()), row_weights.double()[:, None]
    small = 1e-6 + (2.0**-24 if p.dtype == "f16" else 0.0)
    gradient = w * _both(p, s) * slopes
    error = w * (_both(p, s_error) * slopes.abs() + EXPONENT_ERROR * _both(p, s.abs() * reach))
    dots, dot_error = s * value, s_error * value.abs() + 2 * EXPONENT_ERROR * s.abs() * reach
    tiled = (torch.stack([part.sum(1) for part in one.split(DOT_COLUMNS, dim=1)]) for one in (dots, dot_error + 1e-7))
    return {
        "d": rounded(p, (gradient, error + small)),
        "weighted_activation": rounded(p, (w * value, EXPONENT_ERROR * w * reach + small)),
        "row_dots": tuple(tiled),  # type: ignore[dict-item]
    }


def weight_gradient(p: Product, a: torch.Tensor, b: torch.Tensor) -> Sums:
    """[experts, n, k] from both operands by row."""
    value = torch.zeros((len(p.counts), p.n, p.k), dtype=torch.float64)
    error = torch.zeros_like(value)
    experts, a, b = p.experts_of_rows(), a.double(), b.double()
    for expert in experts.unique().tolist():
        own = experts == expert
        value[expert] = a[own].mT @ b[own]
        error[expert] = 1e-5 * (a[own].abs().mT @ b[own].abs())
    value, error = rounded(p, (value, error))
    return value, error + 1e-7
