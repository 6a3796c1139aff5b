"""The kernels before and after the fused backward kernel of ragged attention, on the emulated machine."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from flashmoe_build.emulation.compare import UNIT_ROUNDOFF
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, output
from flashmoe_tools.operations.serving.emulation.forward import strides
from flashmoe_tools.operations.serving.emulation.problem import Keys, Rows, VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import NAN, build
from flashmoe_tools.operations.serving_backward.emulation.backward import SCORE_UNIT, disagreements, expect
from flashmoe_tools.operations.serving_backward.emulation.fused import RaggedPartials
from flashmoe_tools.tables import Unit


def problems(unit: Unit) -> Iterator[VarlenProblem]:
    dim = unit.row.axes["head_dim"]
    # Sequences without rows, without keys, of complete partials and one row more, of rows that see no key.
    lengths = ((65, 0, 64, 130, 3), (200, 7, 0, 4, 7))
    yield VarlenProblem("ragged", unit.dtype, *lengths, 2, 1, dim // 2 + 8, dim // 2 - 8, right=0)
    if unit.dtype == "bf16":  # the float16 kernel with other conversions
        return
    dense = VarlenProblem("dense", unit.dtype, (70, 70), (130, 9), 2, 2, 64, 40, left=3, right=0, wants_lse=False)
    yield replace(dense, rows_layout=Rows.DENSE, keys_layout=Keys.DENSE)
    # More sequences than the lanes that search: two steps.
    rows = tuple((index % 7 == 0) + 66 * (index == 90) for index in range(100))
    yield VarlenProblem("many", unit.dtype, rows, (1,) * 100, 1, 1, 16, 16)


def trial(unit: Unit, p: VarlenProblem) -> Trial:
    tensors = build(p)
    given, expected = expect(p, tensors, shares_weights=False, score_unit=SCORE_UNIT["sm90"])
    width = 64 if max(p.head_dim, p.head_dim_v) <= 64 else 128  # of the fused kernel
    partials = RaggedPartials.of(p, tensors, width)
    writes_dq = unit.row.operation.endswith("convert")
    partials.all.prepare(writes_zeros=not writes_dq, tiles=partials.expected_ranks(p), seed=7)
    results = {"row_dot": torch.full_like(given.row_dot, NAN), "dq": torch.full_like(tensors.q, NAN)}
    named = {"out": given.out, "dout": given.dout, "dq": results["dq"]}
    values = {
        **named,
        **{f"{name}_stride": strides(p, tensor, is_query=True) for name, tensor in named.items()},
        "lse": given.lse,
        "dlse": given.dlse,
        **{name: output(tensor) for name, tensor in results.items()},
        "sums": Buffer(partials.memory, writable=not writes_dq, initialised=writes_dq, name="partials of dq"),
        "cu_seqlens_q": tensors.cu_seqlens_q,
        "rows_total": tensors.q.shape[0] if p.rows_layout is Rows.RAGGED else 0,
        "batch": len(p.rows),
        "heads": p.heads_q,
        "rows": p.max_rows,
        "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v,
        "width": width,
        "scale": p.scale,
    }

    def check() -> list[str]:
        if not writes_dq:
            wrong = disagreements(p, tensors, "row_dot", results["row_dot"], expected)
            return [*wrong, "the ranks are not all zero"] if partials.all.ranks.any() else wrong
        dq = [p.scale * partials.rows_of(p, sequence).double() for sequence in range(len(p.rows))]
        bounded = [{"dq": (value, UNIT_ROUNDOFF[p.dtype] * value.abs() + 1e-6)} for value in dq]
        return disagreements(p, tensors, "dq", results["dq"], bounded)

    return Trial([Launch(values, partials.all.ranks.numel())], check, results)


RUNNER = Runner(problems, trial)
