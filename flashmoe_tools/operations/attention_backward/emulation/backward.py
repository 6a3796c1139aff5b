"""The dense backward kernels on the emulated machine: for dq, for dk and dv, and the fused one for all three."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashmoe_build.emulation.compare import UNIT_ROUNDOFF, Expected, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, counter, output
from flashmoe_tools.operations.attention.emulation.problem import (
    Layout,
    Problem,
    Shape,
    Values,
    custom,
    drawn_lengths,
    make_inputs,
)
from flashmoe_tools.operations.attention.reference import weigh
from flashmoe_tools.operations.attention_backward.emulation.fused import make_partials, rows_of_partials, tiles_of_rows
from flashmoe_tools.tables import Unit

RESULTS = {
    "attention_backward_dq": ("dq",),
    "attention_backward_dkv": ("dk", "dv"),
    "attention_backward_fused": ("dk", "dv"),  # plus the partials of dq
}
# The problems that a bfloat16 kernel of a family without tensor maps is run on: it is the float16 kernel with other
# conversions, and its targets share the source.
FEW_PROBLEMS = (0, 3, 7)
# Error of a score per unit of its size. Turing's products sum 8 columns at a time and truncate at each of the 32 steps
# of D=256.
SCORE_UNIT = {"sm90": 4e-7, "sm80": 4e-7, "sm75": 2e-6}


def problems(unit: Unit) -> Iterator[Problem]:
    """The edges of the kernel's own tile and stream, both masks, grouped heads, narrow head dims, every layout."""
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]
    sizes: tuple[tuple[int, int, int, int, int, int, Layout, Values], ...] = (
        # seq_q, seq_k, head dim, heads, key heads, batch, layout, values
        (m + 1, 2 * n + 1, dim, 2, 1, 1, Layout.BSHD, Values.SHIFTED),  # one past a tile both ways; grouped heads
        (m, n, dim, 1, 1, 2, Layout.BHSD, Values.NORMAL),  # complete tiles, two batches, a gradient of lse
        (3, n + 3, dim // 2 + 8, 2, 2, 1, Layout.ROWS, Values.LARGE),  # fewer columns than the kernel has
        (m + 7, 5, dim, 1, 1, 1, Layout.BHSD, Values.NORMAL),  # causal rows without a key
        (5, n + 70, dim, 1, 1, 1, Layout.BHSD, Values.NORMAL),  # fewer queries than keys
        (1, 2 * n - 1, dim, 4, 2, 2, Layout.BSHD, Values.OUTLIER),  # one query, grouped heads; without a tile counter
        (36, 40, dim, 2, 1, 1, Layout.FAR, Values.NORMAL),  # offsets above 2^31 elements
        (70, n + 9, dim, 1, 1, 1, Layout.ROWS, Values.LOW),  # logits near -120: exp(0 - lse) of a padded key is inf
        (2 * m + 70, 2 * n + 30, dim, 3, 1, 1, Layout.BHSD, Values.SHIFTED),  # more tiles than blocks; a group of three
    )
    is_fused = unit.row.operation == "attention_backward_fused"  # always takes its tiles from a counter
    if is_fused:  # eight tiles per block: six heads from the last keys on; causal, seven descending. The first tile's keys end with a block's last row
        sizes += ((m + 9, n + 9, dim, 13, 13, 1, Layout.BSHD, Values.NORMAL),)
    sizes += ((*drawn_lengths(unit), dim, 1, 1, 1, Layout.BHSD, Values.NORMAL),)
    for causal in (mask == "causal" for mask in unit.row.words["mask"]):
        for index, (seq_q, seq_k, columns, heads, key_heads, batch, layout, values) in enumerate(sizes):
            if unit.row.schedule == "grid" and unit.dtype == "bf16" and index not in FEW_PROBLEMS:
                continue
            shape = Shape(batch, heads, key_heads, seq_q, seq_k, columns)
            problem = Problem(shape, unit.dtype, causal, layout, values, index)
            yield replace(problem, wants_lse=index == 1, has_counter=is_fused or index != 5)


@dataclass(frozen=True)
class Scores:
    """What the gradients are computed from, in fp64.

    [..., heads of queries, rows, keys or columns]; keys are repeated for each query head.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor
    magnitude: torch.Tensor  # of the exponents
    derivative: torch.Tensor | float = 1.0  # of the score options between the products and the softmax
    factors: torch.Tensor | float = 1.0  # dropout's

    def gradients(
        self,
        dout: torch.Tensor,
        row_dot: torch.Tensor,
        scale: float,
        heads_kv: int,
        dtype: str,
        *,
        score_unit: float,
        shares_weights: bool,
    ) -> Expected:
        """dq, dk and dv, with bounds.

        Bounds: u for P and dS rounded to the type and for the result; 2e-5 and ``score_unit`` per unit of score,
        relative to P, for the approximate exponential of an fp32 score; 1e-5 of the sums of magnitudes for fp32
        accumulation; 2^-25 per term for f16 weights below 2^-14. ``shares_weights``: dS is computed from P rounded to
        the type (a warpgroup gets it from another one).
        """
        unit, small = UNIT_ROUNDOFF[dtype], 2.0**-25 if dtype == "f16" else 0.0
        exponent = 2e-5 + score_unit * self.magnitude
        d_weights = self.factors * (dout @ self.v.mT)
        d_scores = self.weights * self.derivative * (d_weights - row_dot[..., None])
        reach = self.factors * (dout.abs() @ self.v.abs().mT) + row_dot.abs()[..., None]
        error = unit * d_scores.abs() + self.weights * (1e-5 + exponent) * reach
        if shares_weights:
            error = error + unit * d_scores.abs() + small * (d_weights.abs() + row_dot.abs()[..., None])

        def of_keys(tensor: torch.Tensor) -> torch.Tensor:
            summed: torch.Tensor = tensor.unflatten(-3, (heads_kv, -1)).sum(-3)
            return summed

        found = {
            "dq": (scale * d_scores @ self.k, scale * (error + small) @ self.k.abs()),
            "dk": (scale * of_keys(d_scores.mT @ self.q), scale * of_keys((error + small).mT @ self.q.abs())),
            "dv": (
                of_keys((self.weights * self.factors).mT @ dout),
                of_keys((((unit + exponent) * self.weights + small) * self.factors).mT @ dout.abs()),
            ),
        }
        return {name: (value, bound + unit * value.abs() + 1e-6) for name, (value, bound) in found.items()}


def shares_weights(unit: Unit) -> bool:
    """Whether dS is computed from P rounded to the type: another warp computed P, or P is kept as the operand of dV."""
    if not unit.row.operation.endswith("_dkv"):
        return False
    is_tight = 2 * unit.row.axes["head_dim"] - unit.row.options.get("narrower", 0) > 256
    return unit.row.block_n == 64 or is_tight if unit.row.family == "sm90" else unit.row.options.get("roles") != 1


def trial(unit: Unit, problem: Problem) -> Trial:
    """Runs one problem.

    Parameters that the kernel does not use are null, but the host describes tensor maps for all tensors of its kind.
    """
    shape, names = problem.shape, RESULTS[unit.row.operation]
    inputs = make_inputs(problem)
    is_fused, writes_row_dot = unit.row.operation == "attention_backward_fused", "dq" in names
    q, (k, v) = (
        inputs.q,
        (t.double().repeat_interleave(shape.heads_q // shape.heads_kv, 1) for t in (inputs.k, inputs.v)),
    )
    generator = torch.Generator().manual_seed(problem.data_seed + 31)
    dout = torch.randn(q.shape, generator=generator).to(q.dtype)
    dlse = torch.randn(problem.rows, generator=generator) if problem.wants_lse else None
    products = (q.double() @ k.mT) * problem.scale
    magnitude = products.abs()
    weights, lse = weigh(products, causal=problem.causal)
    out = (weights @ v).to(q.dtype)
    expected_dot = (dout.double() * out.double()).sum(-1) - (0.0 if dlse is None else dlse.double())
    expected_dot = expected_dot.masked_fill(torch.isinf(lse), 0.0)
    row_dot = torch.full(problem.rows, math.nan) if writes_row_dot else expected_dot.float()
    results = {name: problem.laid_out(torch.full_like(q if name == "dq" else inputs.k, math.nan)) for name in names}
    given = {"q": q, "k": inputs.k, "v": inputs.v, "out": out}
    # Different from out's layout wherever both are contiguous buffers, so mixing up their strides shows.
    unlike = {Layout.BSHD: Layout.BHSD, Layout.BHSD: Layout.BSHD}.get(problem.layout)
    partials = make_partials(problem, unit.row.axes["head_dim"])
    values = {
        **problem.sizes(),
        **{name: problem.placed(tensor, is_output=True) for name, tensor in results.items()},
        **{name: problem.placed(problem.laid_out(tensor)) for name, tensor in given.items()},
        "dout": problem.placed(problem.laid_out(dout, unlike)),
        "lse": lse.float(),
        "dlse": dlse,
        "row_dot": output(row_dot) if writes_row_dot else row_dot,
        "tile_counter": counter() if problem.has_counter else None,
    }
    if is_fused:
        strides = dict.fromkeys(("batch", "head", "row"), 0)
        values |= {"dq": Buffer(partials.memory, writable=True, name="partials of dq"), "dq_stride": strides}

    def check() -> list[str]:
        expected = Scores(q.double(), k, v, weights, magnitude).gradients(
            *(dout.double(), expected_dot, problem.scale, shape.heads_kv, problem.dtype),
            score_unit=SCORE_UNIT[unit.row.family],
            shares_weights=shares_weights(unit),
        )
        found = dict(results)
        wrong = []
        if is_fused:
            found["dq"] = problem.scale * rows_of_partials(problem, partials)
            if not partials.ranks.eq(tiles_of_rows(problem)).all():
                wrong.append("some tile that the rows of a partial see has not added to it")
        for name, tensor in found.items():
            wrong += worst_element(name, tensor, *expected[name])
        error = 1e-5 * dout.double().abs().mul(out.double().abs()).sum(-1) + 1e-6
        return wrong + worst_element("row_dot", row_dot, expected_dot.float().double(), error)

    rows, keys = math.ceil(shape.seq_q / unit.row.block_m), math.ceil(shape.seq_k / unit.row.block_n)
    tiles = shape.batch * (rows * shape.heads_q if writes_row_dot else keys * shape.heads_kv)
    return Trial([Launch(values, tiles, (problem.mask,))], check, {**results, "row_dot": row_dot})


RUNNER = Runner(problems, trial, custom)
