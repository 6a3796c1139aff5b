"""cuDNN's 8-bit float attention: a graph of its Python package (nvidia-cudnn-frontend), run by the cuDNN of torch.

On GPUs of compute capability 9.0 its result has 8 bits too, multiplied by a scale that the caller chooses.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import Prepared
from flashmoe_tools.operations.attention.e4m3 import E4M3
from flashmoe_tools.operations.attention_fp8.reference import CodedResult

if TYPE_CHECKING:
    from flashmoe_tools.operations.attention_fp8.reference import Fp8Inputs

MODULE = "cudnn"
PROBABILITIES = (
    256.0  # P is multiplied by this before rounding: P is at most one, and this is the largest power of two below 448
)
RESULT = 64.0  # the result's factor: values of five and more fit


def prepare(inputs: Fp8Inputs) -> Prepared:
    p = inputs.problem
    if p.causal and p.seq_q != p.seq_k:
        msg = f"{p.key}: its causal mask begins at the first key; give as many rows as keys"
        raise ArgumentError(msg)
    if p.scales != "none":
        msg = f"{p.key}: on compute capability 9.0 its scales are those of whole tensors"
        raise ArgumentError(msg)
    cudnn = import_module(MODULE)
    codes, number = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(handle=handle, io_data_type=codes, intermediate_data_type=number, compute_data_type=number)
    device = inputs.q.device
    factors = {
        **dict.fromkeys(("descale_q", "descale_k", "descale_v"), 1.0),
        "descale_s": 1 / PROBABILITIES,
        "scale_s": PROBABILITIES,
        "scale_o": RESULT,
    }
    given = {
        name: graph.tensor(dim=list(one.shape), stride=list(one.stride()), data_type=codes)
        for name, one in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
    scales = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=number) for name in factors}
    o, _, *largest = graph.sdpa_fp8(
        **given, **scales, generate_stats=False, attn_scale=inputs.scale, use_causal_mask=p.causal
    )
    out = torch.empty(p.batch, p.heads_q, p.seq_q, p.head_dim, device=device, dtype=E4M3)
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(codes)
    tensors = {one: getattr(inputs, name) for name, one in given.items()} | {o: out}
    tensors |= {one: torch.full((1, 1, 1, 1), factors[name], device=device) for name, one in scales.items()}
    for one in largest:  # the maxima of P and of the result, which it always writes
        one.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(number)
        tensors[one] = torch.zeros(1, 1, 1, 1, device=device)
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(max(1, graph.get_workspace_size()), device=device, dtype=torch.uint8)

    def call() -> CodedResult:
        cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
        graph.execute(tensors, workspace, handle=handle)
        return CodedResult(out, RESULT)

    return Prepared(call)
