"""Gradients of attention, recomputed in blocks from the log-sum-exp with torch operations.

The forward pass keeps q, k, v, out and lse; nothing of size Sq x Sk is stored. The backward pass is an operator of its
own, ``flashmoe::flash_attention_backward``, so that compiled graphs hold one node for it whatever the lengths. It is
written in torch operations until a kernel does it: right, bounded in memory, and no faster than its matrix products in
float32.

With P = exp(scale * q k^T - lse), the gradients (Dao et al., FlashAttention-2, section 3.2, with a term for lse) are
    dV = P^T dO        dP = dO V^T        dS = P * (dP - rowsum(dO * O) + dLSE)
    dQ = scale * dS K          dK = scale * dS^T Q
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

from flashmoe import checks
from flashmoe.errors import DifferentiationError, FlashmoeError
from flashmoe.transforms import has_tangent, merge_batches, split_batch

NO_FORWARD_MODE = (
    "attention has no forward-mode derivative; use reverse mode, or torch's scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


@dataclass(frozen=True)
class BlockSize:
    """Keys of one block, and the bytes that its scores may take: float32 [batch, heads, rows, keys].

    About three such blocks live at once. On the CPU they should fit the second-level cache: 128 keys and 1 MiB took 0.7 of
    the time of 512 keys and 8 MiB (one core, S = 2048, D = 64, causal).
    """

    keys: int
    bytes: int


BLOCKS = {"cpu": BlockSize(128, 1 << 20), "cuda": BlockSize(512, 256 << 20)}
MIN_ROWS_PER_BLOCK = 64

_registrations: list[torch.library.Library] = []
SCHEMA = (
    "flash_attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float scale, bool causal) -> (Tensor, Tensor, Tensor)"
)


def register() -> None:
    """Called once by ``_extension.load``."""
    library = torch.library.Library("flashmoe", "FRAGMENT")
    library.define(SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("flash_attention_backward", backward, "CPU")
    library.impl("flash_attention_backward", backward, "CUDA")
    torch.library.register_fake("flashmoe::flash_attention_backward", _fake_backward, lib=library)
    torch.library.register_vmap("flashmoe::flash_attention_backward", _vmap_backward, lib=library)
    torch.library.register_autograd(
        "flashmoe::flash_attention_backward", _refuse_double_backward, setup_context=_keep_nothing, lib=library
    )
    # torch.library.register_autograd's rule fails under torch.func and drops forward-mode tangents without a word.
    library.impl("flash_attention_forward", _operator_rule, "Autograd", with_keyset=True)
    library.impl("flash_attention_forward", under_transforms, "FuncTorchDynamicLayerFrontMode")
    _registrations.append(library)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.scale, ctx.causal = scale, causal
    ctx.set_materialize_grads(False)  # an unused lse costs nothing in the backward pass


def _forward_gradients(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """For q, k and v, each None where it is not ``needed``, and two None for scale and causal."""
    if grad_out is None and grad_lse is None:
        return None, None, None, None, None
    q, k, v, out, lse = ctx.saved_tensors
    gradients = torch.ops.flashmoe.flash_attention_backward.default(
        grad_out, grad_lse, q, k, v, out, lse, ctx.scale, ctx.causal
    )
    wanted = (gradient if need else None for gradient, need in zip(gradients, needed, strict=True))
    return (*wanted, None, None)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    return None


def _refuse_double_backward(ctx: Any, *_: Any) -> NoReturn:
    msg = (
        "flashmoe attention can be differentiated once; this asked for a second derivative. Use "
        "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for it"
    )
    raise DifferentiationError(msg)


def _operator_rule(keyset: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """What the operator does in the dispatcher's Autograd layer, for those who call it by its name and for compilers."""
    if has_tangent(q, k, v):
        raise DifferentiationError(NO_FORWARD_MODE)
    try:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):  # any may be None here
            result: tuple[Tensor, Tensor] = DispatchedForward.apply(keyset, q, k, v, scale, causal)  # type: ignore[no-untyped-call]
            return result
        return _below_autograd(keyset, q, k, v, scale, causal)
    except RuntimeError as error:
        typed = checks.translate(error)
        if typed is None or isinstance(error, FlashmoeError):
            raise
        raise typed from error


def _below_autograd(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator's next layer: what stands above autograd (autocast, modes) has had its turn."""
    with torch._C._AutoDispatchBelowAutograd():
        result: tuple[Tensor, Tensor] = torch.ops.flashmoe.flash_attention_forward.default.redispatch(
            keyset & torch._C._after_autograd_keyset, *arguments
        )
    return result


class DispatchedForward(torch.autograd.Function):
    """The operator's own gradient."""

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = _below_autograd(keyset, q, k, v, scale, causal)
        _keep_for_backward(ctx, (q, k, v, scale, causal), (out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_forward_gradients(ctx, grad_out, grad_lse, ctx.needs_input_grad[1:4])


class EagerForward(torch.autograd.Function):
    """The forward operator with a gradient, outside torch.func and dispatch modes. The operator's own rule does the same for a
    fifth more CPU time (15.3 us against 12.5 on one core), as the dispatcher calls it from C++."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.flashmoe.flash_attention_forward.default(q, k, v, scale, causal)
        _keep_for_backward(ctx, (q, k, v, scale, causal), (out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _forward_gradients(ctx, grad_out, grad_lse, ctx.needs_input_grad[:3])


def under_transforms(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The forward operator where a torch.func transform is active, whichever it is."""
    interpreter = retrieve_current_functorch_interpreter()
    if interpreter.key() != TransformType.Functionalize:
        result: tuple[Tensor, Tensor] = TransformedForward.apply(q, k, v, scale, causal)  # type: ignore[no-untyped-call]
        return result
    layer: Any = FunctorchFunctionalizeAPI(interpreter)
    plain = layer.unwrap_tensors((q, k, v))
    with layer.redispatch_to_next():
        result = torch.ops.flashmoe.flash_attention_forward.default(*plain, scale, causal)
    wrapped: tuple[Tensor, Tensor] = layer.wrap_tensors(result)
    return wrapped


class TransformedForward(torch.autograd.Function):
    """The forward operator for torch.func, whose transforms need a Function and cannot use the operator's own rule."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.flashmoe.flash_attention_forward.default(q, k, v, scale, causal)
        return result

    setup_context = staticmethod(_keep_for_backward)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = TransformedBackward.apply(grad_out, grad_lse, q, k, v, out, lse, ctx.scale, ctx.causal)  # type: ignore[no-untyped-call]
        return (*gradients, None, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The mapped dimension becomes part of the batch."""
        merged = merge_batches((q, k, v), in_dims, info.batch_size)
        out, lse = TransformedForward.apply(*merged, scale, causal)  # type: ignore[no-untyped-call]
        return (split_batch(out, info.batch_size, q, in_dims[0]), split_batch(lse, info.batch_size, q, in_dims[0])), (
            0,
            0,
        )

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise DifferentiationError(NO_FORWARD_MODE)


class TransformedBackward(torch.autograd.Function):
    """The backward operator for torch.func; cannot be differentiated."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.flashmoe.flash_attention_backward.default(*arguments)
        return result

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
        merged = merge_batches(arguments[:7], in_dims, info.batch_size)
        gradients = TransformedBackward.apply(*merged, *arguments[7:])  # type: ignore[no-untyped-call]
        return _split_gradients(gradients, info, in_dims, arguments), (0, 0, 0)

    setup_context = staticmethod(_keep_nothing)
    backward = staticmethod(_refuse_double_backward)
    jvp = staticmethod(_refuse_double_backward)


def _fake_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _vmap_backward(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    """The operator under vmap where torch.func did not record the forward pass: ``torch.autograd.grad(is_grads_batched)``."""
    merged = merge_batches(arguments[:7], in_dims, info.batch_size)
    gradients = torch.ops.flashmoe.flash_attention_backward.default(*merged, *arguments[7:])
    return _split_gradients(gradients, info, in_dims, arguments), (0, 0, 0)


def _split_gradients(
    gradients: tuple[Tensor, ...], info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    q = slice(2, 3)  # where q stands among the backward operator's arguments
    return tuple(split_batch(gradient, info.batch_size, *arguments[q], *in_dims[q]) for gradient in gradients)


def backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, in the dtypes of q, k and v.

    q, out, grad_out [B, Hq, Sq, D]; k, v [B, Hkv, Sk, D]; lse, grad_lse [B, Hq, Sq]; a missing gradient counts as zero.
    Accumulates in float32 (float64 for float64). Memory beyond the results: float32 dq and a few blocks of scores. A row
    without a visible key (lse -inf) has zero gradients.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1], k.shape[2]
    dk = torch.zeros(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    if 0 in (q.numel(), k.numel()):
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), dk, dv

    group = heads_q // heads_kv  # query head h reads key head h // group
    grouped = (batch, heads_kv, group, seq_q)
    q_rows = q.reshape(*grouped, head_dim)
    do_rows = (torch.zeros_like(q) if grad_out is None else grad_out).reshape(*grouped, head_dim)
    # row_term is rowsum(dO * O) - dLSE; lse of a fully masked row becomes +inf, so that exp gives 0 there and not NaN.
    row_term = _row_term(grad_out, grad_lse, out, lse, work).reshape(grouped)
    safe_lse = lse.to(work).masked_fill(lse == -math.inf, math.inf).reshape(grouped)

    dq = torch.zeros((*grouped, head_dim), dtype=work, device=q.device)
    block = BLOCKS[q.device.type]
    row_step = rows_per_block(batch * heads_q, min(block.keys, seq_k), block)
    for key_start in range(0, seq_k, block.keys):
        keys = slice(key_start, min(key_start + block.keys, seq_k))
        k_block = k[:, :, keys].to(work).flatten(0, 1)  # [B*Hkv, keys, D]
        v_block = v[:, :, keys].to(work).flatten(0, 1)
        dk_block, dv_block = torch.zeros_like(k_block), torch.zeros_like(v_block)
        first_row = max(0, key_start - (seq_k - seq_q)) if causal else 0
        for row_start in range(first_row, seq_q, row_step):
            rows = slice(row_start, min(row_start + row_step, seq_q))
            q_block = _flatten_rows(q_rows, rows, work)  # [B*Hkv, group*rows, D]
            do_block = _flatten_rows(do_rows, rows, work)
            scores = (q_block @ k_block.mT).mul_(scale)
            if causal:
                _mask(scores, rows, keys, seq_k - seq_q, group)
            p = scores.sub_(safe_lse[..., rows].flatten(0, 1).flatten(1).unsqueeze(-1)).exp_()
            dv_block += p.mT @ do_block
            ds = (do_block @ v_block.mT).sub_(row_term[..., rows].flatten(0, 1).flatten(1).unsqueeze(-1)).mul_(p)
            ds.mul_(scale)
            dk_block += ds.mT @ q_block
            dq[..., rows, :] += (ds @ k_block).unflatten(1, (group, -1)).unflatten(0, (batch, heads_kv))
        dk[:, :, keys] = dk_block.unflatten(0, (batch, heads_kv)).to(k.dtype)
        dv[:, :, keys] = dv_block.unflatten(0, (batch, heads_kv)).to(v.dtype)
    return dq.reshape(q.shape).to(q.dtype), dk, dv


def rows_per_block(batch_heads: int, keys: int, block: BlockSize) -> int:
    """Query rows of one block, so that [batch_heads, rows, keys] in float32 stays within ``block.bytes``."""
    return max(MIN_ROWS_PER_BLOCK, block.bytes // (4 * batch_heads * keys))


def _row_term(grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, work: torch.dtype) -> Tensor:
    """rowsum(dO * O) - dLSE, [B, Hq, Sq]."""
    term = torch.zeros(lse.shape, dtype=work, device=lse.device)
    if grad_out is not None:
        term = torch.linalg.vecdot(grad_out.to(work), out.to(work))
    return term if grad_lse is None else term - grad_lse.to(work)


def _flatten_rows(tensor: Tensor, rows: slice, work: torch.dtype) -> Tensor:
    """[B, Hkv, group, S, D] to [B*Hkv, group*rows, D]: the sum over a group of heads is then part of the product."""
    return tensor[..., rows, :].to(work).flatten(0, 1).flatten(1, 2)


def _mask(scores: Tensor, rows: slice, keys: slice, offset: int, group: int) -> None:
    """Set to -inf what query i may not see: key j with j > i + offset. scores is [B*Hkv, group*rows, keys]."""
    if keys.stop - 1 <= rows.start + offset:
        return  # the whole block is visible
    i = torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(1)
    j = torch.arange(keys.start, keys.stop, device=scores.device)
    scores.unflatten(1, (group, -1)).masked_fill_(j > i + offset, -math.inf)
