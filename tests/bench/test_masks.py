"""torch's contenders compute the problem that ours computes, also where torch's is_causal would mean another mask."""

from __future__ import annotations

import pytest
import torch

from flashmoe_tools.bench.contenders import default_registry
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.operations.attention.reference import make_inputs


@pytest.mark.parametrize("heads_kv", [2, 8])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(16, 40), (40, 40)])
def test_causal_is_bottom_right_for_everyone(seq_q: int, seq_k: int, heads_kv: int) -> None:
    inputs = make_inputs(AttentionProblem(seq_q, seq_k, 64, 8, heads_kv, causal=True, dtype="f32"), "cpu", seed=0)
    registry = default_registry()
    ours = registry["flashmoe"].prepare(inputs).call()
    theirs = registry["sdpa-cpu"].prepare(inputs).call()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
