"""The kernel of an additive mask's gradient on the emulated machine, with all its sums: over batch, heads, rows, keys."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_build.emulation.compare import UNIT_ROUNDOFF, worst_element
from flashmoe_build.emulation.runner import Launch, Runner, Trial, output
from flashmoe_tools.operations.attention import philox
from flashmoe_tools.operations.serving.emulation.forward import sizes, strides, with_loadable_mask
from flashmoe_tools.operations.serving.emulation.problem import Keys, MaskTensor, Rows, VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import NAN, build
from flashmoe_tools.operations.serving_backward.emulation.backward import SCORE_UNIT, expect, score_gradient
from flashmoe_tools.tables import Unit

OPERATION = "attention_bias_gradient"
REDUCED = ("batch", "rows")  # those of a bf16 kernel


@dataclass(frozen=True)
class BiasProblem(VarlenProblem):
    """Dense, with an additive mask.

    ``splits``: number of partial sums of each element. Rows are folded if the mask is broadcast over them.
    """

    folds_keys: bool = False

    @property
    def is_float(self) -> bool:
        return self.splits > 1 or self.folds_keys or self.mask_broadcast[2]


def problems(unit: Unit) -> Iterator[BiasProblem]:
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]

    def base(name: str, batch: int, rows: int, keys: int) -> BiasProblem:
        sizes = ((rows,) * batch, (keys,) * batch, 2, 1, dim, dim)
        return BiasProblem(name, unit.dtype, *sizes, Rows.DENSE, Keys.DENSE, mask=MaskTensor.ADDITIVE)

    found = [
        replace(
            base("batch", 3, m + 9, 2 * n + 5), mask_broadcast=(True, False, False), heads_q=4, heads_kv=2, right=0
        ),
        # Splits that begin and end in the middle of a sequence; a softcap, whose slope is not included.
        replace(
            base("heads", 2, m, n + 3), mask_broadcast=(True, True, False), heads_q=3, heads_kv=3, splits=4, softcap=7.0
        ),
        # Fewer columns than the kernel's, another number for values; complete tiles that no row sees, and one of which
        # the first row sees only the last key.
        replace(base("own", 2, 9, 5 * n + 1), head_dim=dim // 2 + 8, head_dim_v=dim // 2 - 8, left=n - 7, right=0),
        # More rows than keys: row tiles without a key are skipped.
        replace(base("rows", 2, 2 * m + 7, n), mask_broadcast=(False, False, True), right=0, splits=2),
        base("whole chunks", 2, m + 9, 2 * n + 24),  # stored in groups of eight keys
        replace(base("keys", 1, m + 1, 2 * n + 1), folds_keys=True, softcap=7.0, wants_lse=False),
        replace(base("rows and keys", 2, m + 5, n + 1), mask_broadcast=(True, False, True), folds_keys=True, left=n),
        replace(base("one row", 3, 1, n + 9), mask_broadcast=(True, False, False), heads_q=4),
    ]
    for seed, problem in enumerate(found):
        if unit.row.family == "sm90" and (problem.folds_keys or problem.mask_broadcast[2]):
            continue  # these run on sm80's kernel
        if unit.dtype == "f16" or problem.name in REDUCED:
            dropout_p = 0.3 if unit.row.options.get("dropout") else 0.0
            yield replace(problem, data_seed=seed, dropout_p=dropout_p)


def trial(unit: Unit, p: BiasProblem) -> Trial:
    tensors = build(p)
    if unit.row.family == "sm90":
        tensors = with_loadable_mask(tensors, p)
    given, _ = expect(p, tensors, shares_weights=False, score_unit=SCORE_UNIT[unit.row.family])
    m, n, rows, keys = unit.row.block_m, unit.row.block_n, p.rows[0], p.keys[0]
    is_shared, is_of_heads, folds_rows = p.mask_broadcast
    batches, heads = 1 if is_shared else len(p.rows), 1 if is_of_heads else p.heads_q
    shape = (p.splits, batches, heads, m if folds_rows else rows, n if p.folds_keys else keys)
    sums = torch.full(shape, NAN, dtype=torch.float32 if p.is_float else tensors.q.dtype)
    named = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "dout": given.dout}
    own = {f"{name}_stride": strides(p, t, is_query=name in ("q", "dout")) for name, t in named.items()}
    backward: dict[str, Any] = {**sizes(p, tensors), **named, **own, "lse": given.lse, "row_dot": given.row_dot}
    dropout = {
        "rng_state": torch.tensor(p.rng_state) if p.dropout_p > 0 else None,
        "threshold": philox.threshold(p.dropout_p),
        "scale": 1.0 / (1.0 - p.dropout_p),
    }
    values = {
        "launched": {"backward": backward, "dropout": dropout},
        "sums": output(sums),
        "splits": p.splits,
        "batches": batches,
        "heads": heads,
        "rows": shape[3],
        "keys": shape[4],
        "folds_rows": int(folds_rows),
        "folds_keys": int(p.folds_keys),
        "is_float": int(p.is_float),
    }
    expected = [score_gradient(p, tensors, given, sequence, unit) for sequence in range(len(p.rows))]
    value, bound = (_folded(torch.stack(tensors_of), shape, (m, n)) for tensors_of in zip(*expected, strict=True))
    if not p.is_float:
        bound = bound + UNIT_ROUNDOFF[p.dtype] * value.abs()

    def check() -> list[str]:
        return worst_element("sums", sums.double().sum(0), value, bound + 1e-6)

    parts = math.ceil(shape[3] / m) * math.ceil(shape[4] / n) * p.splits * batches * heads
    blocks = min(parts, 3) if unit.row.family == "sm90" else parts  # fewer blocks than tiles: each block has several
    return Trial([Launch(values, blocks)], check, {"sums": sums})


def _folded(tensor: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """[batch, heads, rows, keys] summed to ``shape`` without splits.

    Folded rows or keys are added up by their number within the tile.
    """
    if shape[1] == 1:
        tensor = tensor.sum(0, keepdim=True)
    if shape[2] == 1:
        tensor = tensor.sum(1, keepdim=True)
    for dim, size in ((2, block[0]), (3, block[1])):
        if tensor.shape[dim] != shape[dim + 1]:
            missing = -tensor.shape[dim] % size
            padding = [0, 0, 0, missing] if dim == 2 else [0, missing]
            tensor = torch.nn.functional.pad(tensor, padding).unflatten(dim, (-1, size)).sum(dim)
    return tensor


RUNNER = Runner(problems, trial)
