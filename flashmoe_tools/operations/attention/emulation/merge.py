"""The kernel that merges two partial results, on the emulated machine, against the sum in fp64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashmoe_build.emulation.compare import DTYPES, UNIT_ROUNDOFF
from flashmoe_build.emulation.runner import STRIDES, Buffer, Launch, NamedProblem, Runner, Trial
from flashmoe_tools.tables import Unit

NAN = math.nan
FAR = 2**31 + 64  # elements: an offset that does not fit 32 bits


@dataclass(frozen=True)
class MergeProblem(NamedProblem):
    """The first ``first`` rows of each head stay unchanged. In place, or with a separate ``out``."""

    dtype: str
    head_dim: int
    is_float: bool = False
    in_place: bool = False
    row_begin: int = 0
    large_strides: int = 0  # this many leading dimensions have strides of at least FAR
    heads: int = 3
    rows: int = 13
    data_seed: int = 0


def problems(unit: Unit) -> Iterator[MergeProblem]:
    """Each number of lanes, columns that the last lane lacks, both accumulator types, rows of other tensors."""
    base = MergeProblem("two lanes", unit.dtype, 24)
    yield base
    yield replace(base, name="one lane, in place", head_dim=8, in_place=True, rows=70, data_seed=1)
    yield replace(base, name="float32, in place", head_dim=128, is_float=True, in_place=True, row_begin=5, data_seed=2)
    yield replace(base, name="a warp, in place", head_dim=512, in_place=True, row_begin=1, rows=4, data_seed=3)
    yield replace(base, name="float32", head_dim=80, is_float=True, heads=1, data_seed=4)
    yield replace(base, name="sequences far apart", head_dim=16, large_strides=1, data_seed=5)
    yield replace(base, name="heads of float32 far apart", is_float=True, in_place=True, large_strides=2, data_seed=6)
    yield replace(base, name="rows far apart", head_dim=8, large_strides=3, heads=2, rows=3, data_seed=7)


def _placed(tensor: torch.Tensor, large_strides: int, writable: bool) -> tuple[Buffer, dict[str, int]]:
    """The memory of [batch, heads, rows, ...], and its strides."""
    strides = list(tensor.stride()[:3])
    for axis in range(large_strides):
        strides[axis] = FAR * math.prod(tensor.shape[axis + 1 : large_strides])
    memory = tensor.reshape(math.prod(tensor.shape[:large_strides]), -1) if large_strides else tensor
    return Buffer(memory, writable, row_stride=FAR if large_strides else None), dict(zip(STRIDES, strides, strict=True))


def trial(unit: Unit, p: MergeProblem) -> Trial:
    """Partial a is stored as [batch, rows, heads, head_dim].

    Some rows have no key in one partial, which then holds NaN; row 0 has none in either.
    """
    generator = torch.Generator().manual_seed(p.data_seed)
    rows, element = (2, p.heads, p.rows), DTYPES[p.dtype]
    of_sums = torch.float32 if p.is_float else element
    lse = [torch.randn(rows, generator=generator) * 4 for _ in range(2)]
    parts = [torch.randn(*rows, p.head_dim, generator=generator) for _ in range(2)]
    for one, part in zip(lse, parts, strict=True):
        empty = torch.rand(rows, generator=generator) < 0.25
        empty[0, 0, p.row_begin] = True
        one[empty], part[empty] = -math.inf, NAN
    a = parts[0].to(of_sums)
    a = a if p.large_strides else a.transpose(1, 2).contiguous().transpose(1, 2)
    b = parts[1].to(element)
    weights = torch.softmax(torch.stack(lse).double(), 0).nan_to_num(0.0)[..., None]
    terms = [weight * part.double().nan_to_num(0.0) for weight, part in zip(weights, (a, b), strict=True)]
    expected, spread = terms[0] + terms[1], terms[0].abs() + terms[1].abs()
    expected_lse = torch.logsumexp(torch.stack(lse).double(), 0)
    out = a if p.in_place else torch.full((*rows, p.head_dim), NAN, dtype=of_sums)
    total = lse[0] if p.in_place else torch.full(rows, NAN)
    kept = out[:, :, : p.row_begin].clone(), total[:, :, : p.row_begin].clone()
    tensors = {"out_a": a, "out_b": b, "lse_a": lse[0], "lse_b": lse[1]}
    if not p.in_place:
        tensors |= {"out": out, "lse": total}
    cut = {name: tensor[:, :, p.row_begin :] for name, tensor in tensors.items()}
    written = ("out_a", "lse_a") if p.in_place else ("out", "lse")
    placed = {name: _placed(tensor, p.large_strides, name in written) for name, tensor in cut.items()}
    values = {name: buffer for name, (buffer, _) in placed.items()}
    strides = {f"{name}_stride": stride for name, (_, stride) in placed.items()}
    shift = max(0, math.ceil(math.log2(p.head_dim / 16)))
    sizes = {"batch": 2, "heads": p.heads, "rows": p.rows - p.row_begin, "head_dim": p.head_dim}
    share = {"out": "out_a", "lse": "lse_a"} if p.in_place else {}
    values |= {new: values[old] for new, old in share.items()}
    strides |= {f"{new}_stride": strides[f"{old}_stride"] for new, old in share.items()}
    blocks = math.ceil(2 * p.heads * (p.rows - p.row_begin) * 2**shift / (32 * unit.row.warps))

    def check() -> list[str]:
        found, of_found = out[:, :, p.row_begin :].double(), total[:, :, p.row_begin :].double()
        roundoff = 2.0**-22 if p.is_float else UNIT_ROUNDOFF[p.dtype]
        bound = (roundoff * expected.abs() + 1e-6 * spread + 1e-7)[:, :, p.row_begin :]
        of_expected = expected_lse[:, :, p.row_begin :]
        is_wrong = ~((found - expected[:, :, p.row_begin :]).abs() <= bound).all(-1)
        is_wrong |= ~((of_found - of_expected).abs() <= 2e-6 * of_expected.abs() + 2e-6) & (of_found != of_expected)
        wrong = [f"row {row} is not the two parts' sum" for row in is_wrong.nonzero().tolist()]
        now = out[:, :, : p.row_begin], total[:, :, : p.row_begin]
        same = all(
            torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0)) for one, other in zip(now, kept, strict=True)
        )
        return wrong if same else [*wrong, "a row before the first was written"]

    launch = Launch({**values, **strides, **sizes, "lanes_shift": shift, "is_float": int(p.is_float)}, blocks)
    return Trial([launch], check, {"out": out, "lse": total})


RUNNER = Runner(problems, trial)
