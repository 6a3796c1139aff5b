"""The backward pass only, by each library's own operator from a saved output and log-sum-exp.

Autograd is avoided because it costs up to 0.1 ms per call.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import Contender, Prepared, flashmoe_available, installed, setting
from flashmoe_tools.operations.attention import contenders as attention
from flashmoe_tools.operations.attention.reference import Inputs
from flashmoe_tools.operations.attention_backward.reference import BackwardInputs

aten = torch.ops.aten


def _flashmoe(inputs: BackwardInputs) -> Prepared:
    from flashmoe import _extension

    _extension.load()
    problem, operators = inputs.problem, torch.ops.flashmoe
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = operators.flash_attention_forward(q, k, v, inputs.scale, problem.causal)

    def call() -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = operators.flash_attention_backward(
            inputs.dout, None, q, k, v, out, lse, inputs.scale, problem.causal
        )
        return result

    return Prepared(call)


def _flashmoe_ragged(inputs: BackwardInputs) -> Prepared:
    """The same tensors as one ragged batch of equal sequences; layout bshd needs no copy."""
    from flashmoe import _extension

    _extension.load()
    problem, operators = inputs.problem, torch.ops.flashmoe
    q, k, v, dout = (one.transpose(1, 2).flatten(0, 1) for one in (inputs.q, inputs.k, inputs.v, inputs.dout))
    numbers = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device)
    cu_seqlens = (numbers * problem.seq_q, numbers * problem.seq_k)
    absent = (None, None, None)  # seqused_k, sinks and mask
    sizes = (problem.seq_q, problem.seq_k, inputs.scale, -1, 0 if problem.causal else -1, 0.0)
    out, lse = operators.attention_varlen_forward(q, k, v, *cu_seqlens, None, *absent, *sizes, 0)

    def call() -> tuple[torch.Tensor, ...]:
        found = operators._attention_varlen_backward(dout, None, q, k, v, *cu_seqlens, *absent, out, lse, *sizes)
        return tuple(one.unflatten(0, (problem.batch, -1)).transpose(1, 2) for one in found[:3])

    return Prepared(call)


def _flash_attn_3(*, deterministic: bool) -> Callable[[BackwardInputs], Prepared]:
    def prepare(inputs: BackwardInputs) -> Prepared:
        operators = attention.fa3_operators()
        q, k, v, dout = attention.in_rows(inputs, inputs.dout)
        out, lse = attention.fa3_forward(operators, q, k, v, inputs)[:2]
        options = {"softmax_scale": inputs.scale, "is_causal": inputs.problem.causal, "deterministic": deterministic}

        def call() -> tuple[torch.Tensor, ...]:
            gradients = tuple(torch.empty_like(one) for one in (q, k, v))
            operators.bwd(dout, q, k, v, out, lse, *gradients, **options)
            return tuple(one.transpose(1, 2) for one in gradients)

        return Prepared(call)

    return prepare


def _sdpa_cudnn(inputs: BackwardInputs) -> Prepared:
    given, causal, scale = (inputs.q, inputs.k, inputs.v), _square_mask(inputs), inputs.scale
    kept = aten._scaled_dot_product_cudnn_attention(*given, None, True, 0.0, causal, False, scale=scale)
    out, lse, cu_q, cu_k, longest_q, longest_k, seed, offset, _ = kept
    rest = (out, lse, seed, offset, None, cu_q, cu_k, longest_q, longest_k, 0.0, causal)
    call = aten._scaled_dot_product_cudnn_attention_backward
    return Prepared(lambda: call(inputs.dout, *given, *rest, scale=scale))


def _sdpa_flash(inputs: BackwardInputs) -> Prepared:
    given, causal, scale = (inputs.q, inputs.k, inputs.v), _square_mask(inputs), inputs.scale
    kept = aten._scaled_dot_product_flash_attention(*given, 0.0, causal, False, scale=scale)
    out, lse, cu_q, cu_k, longest_q, longest_k, seed, offset, _ = kept
    rest = (out, lse, cu_q, cu_k, longest_q, longest_k, 0.0, causal, seed, offset)
    call = aten._scaled_dot_product_flash_attention_backward
    return Prepared(lambda: call(inputs.dout, *given, *rest, scale=scale))


def _square_mask(inputs: BackwardInputs) -> bool:
    problem = inputs.problem
    if problem.causal and problem.seq_q != problem.seq_k:
        msg = f"{problem.key}: torch's causal mask is aligned top-left, this problem's bottom-right"
        raise ArgumentError(msg)
    return problem.causal


def _recorded(prepare: Callable[[Inputs], Prepared]) -> Callable[[BackwardInputs], Prepared]:
    """The gradients of a forward contender; its ``context`` is active here too, so the backend is the one it names."""

    def prepare_gradients(inputs: BackwardInputs) -> Prepared:
        leaves = [tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
        out = prepare(Inputs(inputs.problem, *leaves)).call()

        def call() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

        return Prepared(call)

    return prepare_gradients


def contenders() -> tuple[Contender, ...]:
    """Ours, and the forward pass's other contenders under the same names."""
    direct = {"sdpa-cudnn": _sdpa_cudnn, "sdpa-flash": _sdpa_flash, attention.FA3: _flash_attn_3(deterministic=False)}
    others = (
        replace(one, prepare=direct.get(one.name) or _recorded(one.prepare))
        for one in attention.contenders()
        if not one.ours
    )
    split = setting("FLASHMOE_SPLIT_BACKWARD", "1")
    both, fa3 = ("cpu", "cuda"), installed(attention.FLASH_ATTN_3)
    return (
        Contender("flashmoe", "flashmoe", both, flashmoe_available, _flashmoe, ours=True),
        Contender("flashmoe-ragged", "flashmoe, ragged rows", both, flashmoe_available, _flashmoe_ragged, ours=True),
        # For comparison with the ragged kernels: the time of a dense call, and of the split form's kernels.
        Contender("flashmoe-dense", "flashmoe, dense rows", both, flashmoe_available, _flashmoe),
        *(
            Contender(
                f"flashmoe-{rows}-split",
                f"flashmoe, {rows} rows, split form",
                ("cuda",),
                flashmoe_available,
                one,
                split,
            )
            for rows, one in (("dense", _flashmoe), ("ragged", _flashmoe_ragged))
        ),
        *others,
        Contender(
            f"{attention.FA3}-deterministic", "FA3 deterministic", ("cuda",), fa3, _flash_attn_3(deterministic=True)
        ),
    )
