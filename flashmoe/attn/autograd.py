"""The gradients of attention's forward operators: in the dispatcher, in plain eager calls, and under torch.func.

The forward pass saves q, k, v, out and lse. The backward pass is a separate operator (``backward.py``, ``varlen_backward.py``), so that
compiled graphs hold one node for it at any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

from flashmoe.attn.bias_gradient import BiasGradient, mask_only_arguments
from flashmoe.attn.bias_gradient import bias_gradient as bias_gradient_by_kernels
from flashmoe.attn.bias_gradient import mask_backward as mask_backward_by_kernels
from flashmoe.attn.fake import bits
from flashmoe.attn.options import Dense, DenseBackward, Varlen, VarlenBackward, is_slopes, positions
from flashmoe.attn.varlen_backward import backward_by_kernels
from flashmoe.errors import DifferentiationError
from flashmoe.operator import save_nothing
from flashmoe.rules import translate
from flashmoe.transforms import function_under_transforms, has_tangent, merge_batches, split_batch

NO_FORWARD_MODE = (
    "attention has no forward-mode derivative; use reverse mode, or torch's scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)
NO_SECOND_DERIVATIVE = (
    "flashmoe attention can be differentiated once; a second derivative was requested. Use "
    "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for it"
)
NO_SLOPES_GRADIENT = (
    "attention has no gradient for alibi_slopes; detach them, or pass the bias itself as attn_mask, which has one"
)
NO_RAGGED_MASK_GRADIENT = (
    "attention over packed sequences, or with seqused_k, has no gradient for attn_mask; detach it, or pad the sequences"
)
NO_PAGE_GRADIENT = "attention over pages has no gradient; gather the keys, or call it under torch.no_grad()"
Gradients = tuple[Tensor | None, ...]
_operators = torch.ops.flashmoe
_SAVED = 10  # tensors that save_varlen saves
_DIFFERENTIABLE = positions(Varlen._fields, "q k v sinks mask")


def raise_double_backward(ctx: Any, *_: Any) -> NoReturn:
    raise DifferentiationError(NO_SECOND_DERIVATIVE)


# Dense attention: the arguments q, k, v, scale, causal.


def save_dense(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.scale, ctx.causal = scale, causal
    ctx.set_materialize_grads(False)  # an unused lse costs nothing in the backward pass


def _dense_gradient(
    call: Callable[..., Gradients], ctx: Any, grads: tuple[Tensor | None, ...], needed: tuple[bool, ...]
) -> Gradients:
    """Gradients of q, k and v, each None if not ``needed``, and two None for scale and causal. ``grads``: those of out and lse."""
    if grads[0] is None and grads[1] is None:
        return (None,) * 5
    gradients = call(*DenseBackward._make((*grads, *ctx.saved_tensors, ctx.scale, ctx.causal, bits(needed))))
    return (*(gradient if need else None for gradient, need in zip(gradients, needed, strict=True)), None, None)


def dense_forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """``flash_attention_forward`` in eager mode; ``scale`` None is 1 / sqrt(D).

    The autograd rule is Python, and the dispatcher's call to it costs several us; it is skipped when no gradient can be requested.
    Under torch.func a tensor's outer levels cannot be seen from here, so nothing is skipped.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if transforms_are_active():
        return dense_under_transforms(q, k, v, scale, causal)
    if has_tangent(q, k, v):
        raise DifferentiationError(NO_FORWARD_MODE)
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        # A mode or torch.jit.trace must see the operator itself, not what the rule does.
        if num_dispatch_modes() > 0 or is_tracing():
            result: tuple[Tensor, Tensor] = _operators.flash_attention_forward.default(q, k, v, scale, causal)
        else:
            result = EagerForward.apply(q, k, v, scale, causal)  # type: ignore[no-untyped-call]
        return result
    with torch._C._AutoDispatchBelowAutograd():
        result = _operators.flash_attention_forward.default(q, k, v, scale, causal)
    return result


def dense_rule(keyset: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The operator's rule in the dispatcher's Autograd layer, for calls by the operator's name and for compilers."""
    if has_tangent(q, k, v):
        raise DifferentiationError(NO_FORWARD_MODE)
    try:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):  # any may be None here
            result: tuple[Tensor, Tensor] = DispatchedForward.apply(keyset, q, k, v, scale, causal)  # type: ignore[no-untyped-call]
            return result
        return _below_autograd(keyset, q, k, v, scale, causal)
    except RuntimeError as error:
        typed = translate(error)
        if typed is None:
            raise
        raise typed from error


def _below_autograd(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Calls the operator's next layer; the layers above autograd (autocast, modes) have already run."""
    with torch._C._AutoDispatchBelowAutograd():
        result: tuple[Tensor, Tensor] = _operators.flash_attention_forward.default.redispatch(
            keyset & torch._C._after_autograd_keyset, *arguments
        )
    return result


class DispatchedForward(torch.autograd.Function):
    """The gradient of the operator when the dispatcher calls it."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = _below_autograd(keyset, *arguments)
        save_dense(ctx, arguments, (out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        call = _operators.flash_attention_backward.default
        return None, *_dense_gradient(call, ctx, grads, ctx.needs_input_grad[1:4])


class EagerForward(torch.autograd.Function):
    """The forward operator with a gradient, outside torch.func and dispatch modes. The operator's own rule does the same but takes a
    fifth more CPU time (15.3 us against 12.5 on one core), because the dispatcher calls it from C++."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _operators.flash_attention_forward.default(q, k, v, scale, causal)
        save_dense(ctx, (q, k, v, scale, causal), (out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        return _dense_gradient(_operators.flash_attention_backward.default, ctx, grads, ctx.needs_input_grad[:3])


def dense_under_transforms(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The forward operator under any active torch.func transform."""
    interpreter = retrieve_current_functorch_interpreter()
    if interpreter.key() != TransformType.Functionalize:
        result: tuple[Tensor, Tensor] = dense.apply(q, k, v, scale, causal)
        return result
    layer: Any = FunctorchFunctionalizeAPI(interpreter)
    plain = layer.unwrap_tensors((q, k, v))
    with layer.redispatch_to_next():
        result = _operators.flash_attention_forward.default(*plain, scale, causal)
    wrapped: tuple[Tensor, Tensor] = layer.wrap_tensors(result)
    return wrapped


# Ragged, paged and windowed attention: the arguments of Varlen.


def save_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = Varlen(*inputs)
    tensors = (*given[:6], given.sinks, given.mask, *output)
    ctx.save_for_backward(*tensors)
    ctx.numbers, ctx.has_pages = given[9:15], given.block_table is not None  # max_seqlen_q to softcap
    ctx.set_materialize_grads(False)


def save_dropout(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *plain, ctx.dropout_p, state = inputs
    given = Varlen(*plain)
    ctx.save_for_backward(*given[:6], given.sinks, given.mask, *output, state)
    ctx.numbers, ctx.has_pages = given[9:15], False
    ctx.set_materialize_grads(False)


def dropout_gradient(ctx: Any, *grads: Tensor | None) -> Gradients:
    """The gradients for the arguments of ``attention_dropout_forward``."""
    calls = _operators.attention_dropout_backward.default, _operators.attention_bias_gradient.default
    return _dropout_gradient(*calls, ctx, grads)


def _dropout_gradient(
    call: Callable[..., Gradients], bias_call: Callable[..., Tensor], ctx: Any, grads: tuple[Tensor | None, ...]
) -> Gradients:
    return *_varlen_gradient(call, bias_call, ctx, grads, (ctx.dropout_p,)), None, None


def varlen_gradient(ctx: Any, *grads: Tensor | None) -> Gradients:
    """The gradients for the arguments of ``attention_varlen_forward``, None where not needed. ``grads``: those of out and lse."""
    calls = _operators.attention_varlen_backward.default, _operators.attention_mask_backward.default
    return _varlen_gradient(*calls, ctx, grads)


def _varlen_gradient(
    call: Callable[..., Gradients],
    mask_call: Callable[..., Any],
    ctx: Any,
    grads: tuple[Tensor | None, ...],
    dropout: tuple[Any, ...] = (),
) -> Gradients:
    """``mask_call``: without dropout, ``call`` that also returns the mask's gradient; with dropout, only the mask's gradient."""
    if grads[0] is None and grads[1] is None:
        return (None,) * len(Varlen._fields)
    if ctx.has_pages:
        raise DifferentiationError(NO_PAGE_GRADIENT)
    count = len(Varlen._fields)
    wanted: Any = Varlen._make(ctx.needs_input_grad[:count])
    needed = (wanted.q, wanted.k, wanted.v, wanted.sinks)
    saved = ctx.saved_tensors  # read once: a checkpoint unpacks them only once. With dropout, rng_state comes last
    given = VarlenBackward._make((*grads, *saved[:_SAVED], *ctx.numbers, bits(needed)))
    gradients: Gradients = ()
    if wanted.mask:
        _check_mask_gradient(given)
    if wanted.mask and not dropout:
        gradients = mask_call(*given)
    elif any(needed):
        gradients = call(*given, *dropout, *saved[_SAVED:])
    if wanted.mask and dropout:
        gradients = (*(gradients or (None,) * 4), mask_call(*mask_only_arguments(given, *dropout, *saved[_SAVED:])))
    found: list[Tensor | None] = [None] * count
    for at, gradient, need in zip(_DIFFERENTIABLE, gradients, (*needed, wanted.mask), strict=False):
        if need:
            found[at] = gradient
    return tuple(found)


def _check_mask_gradient(given: VarlenBackward) -> None:
    if is_slopes(given.mask):
        raise DifferentiationError(NO_SLOPES_GRADIENT)
    if any(lengths is not None for lengths in (given.cu_seqlens_q, given.cu_seqlens_k, given.seqused_k)):
        raise DifferentiationError(NO_RAGGED_MASK_GRADIENT)


def _eager(
    name: str, setup_context: Callable[..., None], gradient: Callable[..., Gradients], direct: Callable[..., Gradients]
) -> Callable[..., Any]:
    """An operator with its gradient, as in ``EagerForward``: the rule of ``torch.library.register_autograd`` takes ten times as long.

    ``direct``: ``gradient`` without the dispatcher, whose calls into Python cost 20 us more."""

    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            output: tuple[Tensor, Tensor] = getattr(_operators, name).default(*arguments)
        setup_context(ctx, arguments, output)
        return output

    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        is_plain = all(grad is None or type(grad) is Tensor for grad in grads)
        if is_grad_enabled() or transforms_are_active() or num_dispatch_modes() > 0 or not is_plain:
            return gradient(ctx, *grads)
        with torch._C._AutoDispatchBelowAutograd():
            return direct(ctx, *grads)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    apply: Callable[..., Any] = type("Eager", (torch.autograd.Function,), members).apply  # type: ignore[attr-defined]
    return apply


def is_eager(given: Varlen) -> bool:
    """Whether only autograd has to see the operator's call (no subclass, autocast, mode or tracer)."""
    is_plain = type(given.q) is type(given.k) is type(given.v) is Tensor and not torch.is_autocast_enabled(
        given.q.device.type
    )
    return is_plain and num_dispatch_modes() == 0 and not is_tracing()


def needs_gradient(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None) -> bool:
    if not is_grad_enabled():
        return False
    is_needed = q.requires_grad or k.requires_grad or v.requires_grad
    return is_needed or (sinks is not None and sinks.requires_grad) or (mask is not None and mask.requires_grad)


eager_varlen = _eager(
    "attention_varlen_forward",
    save_varlen,
    varlen_gradient,
    lambda ctx, *grads: _varlen_gradient(backward_by_kernels, mask_backward_by_kernels, ctx, grads),
)
eager_dropout = _eager(
    "attention_dropout_forward",
    save_dropout,
    dropout_gradient,
    lambda ctx, *grads: _dropout_gradient(backward_by_kernels, bias_gradient_by_kernels, ctx, grads),
)


def varlen_under_transforms(*arguments: Any, has_dropout: bool = False) -> tuple[Tensor, Tensor]:
    """``attention_varlen_forward``, or ``attention_dropout_forward``, under any active torch.func transform."""
    if retrieve_current_functorch_interpreter().key() == TransformType.Functionalize:
        call: Any = _operators.attention_dropout_forward if has_dropout else _operators.attention_varlen_forward
    else:
        call = dropout.apply if has_dropout else varlen.apply
    result: tuple[Tensor, Tensor] = call(*arguments)
    return result


# torch.func: its transforms need a Function and cannot use the operators' own rules. The vmap rules also handle calls that no transform
# recorded: ``torch.autograd.grad(is_grads_batched)``.


def _vmap_rule(
    call: Callable[..., tuple[Tensor, ...]], fields: tuple[str, ...], batched: str, without_batch: str = ""
) -> Callable[..., tuple[Any, int | tuple[int, ...]]]:
    """The mapped dimension becomes part of the batch of the arguments named in ``batched``. One call per mapped element instead if an
    argument named in ``without_batch`` is given, or if an argument without a batch is mapped."""
    batched_indices, others = positions(fields, batched), positions(fields, without_batch)
    (q,) = positions(fields, "q")

    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, int | tuple[int, ...]]:
        size = info.batch_size
        maps_others = any(dim is not None for index, dim in enumerate(in_dims) if index not in batched_indices)
        is_shared = "mask" in fields and _is_shared(arguments, in_dims, q, fields.index("mask"))
        if is_shared or maps_others or any(arguments[index] is not None for index in others):
            each = [
                call(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
                for i in range(size)
            ]
            if isinstance(each[0], Tensor):
                return torch.stack(each), 0
            return tuple(torch.stack(results) for results in zip(*each, strict=True)), (0,) * len(each[0])
        merged = list(arguments)
        chosen, dims = [arguments[index] for index in batched_indices], [in_dims[index] for index in batched_indices]
        for index, tensor in zip(batched_indices, merge_batches(chosen, dims, size), strict=True):
            merged[index] = tensor
        split = tuple(
            split_batch(result, size, arguments[q], in_dims[q])
            if result.dim() > 1
            else result.expand(size, *result.shape)
            for result in call(*merged)
        )
        return split, (0,) * len(split)

    return vmap


def _is_shared(arguments: tuple[Any, ...], in_dims: tuple[int | None, ...], q: int, mask: int) -> bool:
    """Whether the mask's batch size differs from q's, so that sequences share a mask."""
    if arguments[mask] is None:
        return False
    batches = [arguments[index].shape[1 if in_dims[index] == 0 else 0] for index in (q, mask)]
    return bool(batches[0] != batches[1])


def _operator(name: str) -> Callable[..., Any]:
    """Looked up when called: the operators written in Python are defined after this module is imported."""
    return lambda *arguments: getattr(torch.ops.flashmoe, name).default(*arguments)


class _Transformed(NamedTuple):
    """An operator's rules for torch.func: the function for its transforms, and vmap for calls that no transform recorded."""

    apply: Callable[..., Any]
    vmap: Callable[..., Any]


def _transform(
    name: str,
    fields: tuple[str, ...],
    batched: str,
    without_batch: str = "",
    setup_context: Callable[..., None] = save_nothing,
    gradient: Callable[..., Any] = raise_double_backward,
    no_forward_mode: str = NO_SECOND_DERIVATIVE,
) -> _Transformed:
    """The defaults are those of a backward operator."""

    def vmap(*given: Any) -> Any:  # transforms nest, so the function that is mapped is the transformed one
        return _vmap_rule(apply, fields, batched, without_batch)(*given)

    call = _operator(name)
    apply = function_under_transforms(call, setup_context, gradient, vmap, no_forward_mode)
    return _Transformed(apply, _vmap_rule(call, fields, batched, without_batch))


def _transformed_dense_gradient(ctx: Any, *grads: Tensor | None) -> Gradients:
    return _dense_gradient(dense_backward.apply, ctx, grads, ctx.needs_input_grad[:3])


def _transformed_varlen_gradient(ctx: Any, *grads: Tensor | None) -> Gradients:
    return _varlen_gradient(varlen_backward.apply, mask_backward.apply, ctx, grads)


def _transformed_dropout_gradient(ctx: Any, *grads: Tensor | None) -> Gradients:
    return _dropout_gradient(dropout_backward.apply, bias_gradient.apply, ctx, grads)


_BATCHED, _WITHOUT_BATCH = "q k v seqused_k mask", "cu_seqlens_q cu_seqlens_k block_table"
_SUMMED = "cu_seqlens_q cu_seqlens_k sinks"  # the gradient of sinks is summed over the batch
_DENSE_FORWARD = (save_dense, _transformed_dense_gradient, NO_FORWARD_MODE)
_VARLEN_FORWARD = (save_varlen, _transformed_varlen_gradient, NO_FORWARD_MODE)
dense_backward = _transform("flash_attention_backward", DenseBackward._fields, "grad_out grad_lse q k v out lse")
varlen_backward = _transform(
    "attention_varlen_backward", VarlenBackward._fields, f"grad_out grad_lse {_BATCHED} out lse", _SUMMED
)
dense = _transform("flash_attention_forward", Dense._fields, "q k v", "", *_DENSE_FORWARD)
varlen = _transform("attention_varlen_forward", Varlen._fields, _BATCHED, _WITHOUT_BATCH, *_VARLEN_FORWARD)
# One call per mapped element
mask_backward = _transform("attention_mask_backward", VarlenBackward._fields, "q", "mask")
bias_gradient = _transform("attention_bias_gradient", BiasGradient._fields, "q", "mask")  # one call per mapped element
# With dropout, a sequence's index in the batch is part of its random numbers, so the mapped dimension cannot join the batch.
_STATE = ("dropout_p", "rng_state")
_DROPOUT_FORWARD = (save_dropout, _transformed_dropout_gradient, NO_FORWARD_MODE)
dropout_backward = _transform(
    "attention_dropout_backward",
    (*VarlenBackward._fields, *_STATE),
    f"grad_out grad_lse {_BATCHED} out lse",
    "rng_state",
)
dropout = _transform("attention_dropout_forward", (*Varlen._fields, *_STATE), _BATCHED, "rng_state", *_DROPOUT_FORWARD)


def vmap_varlen_inference(*given: Any) -> tuple[Tensor, int]:
    return varlen.vmap(*given)[0][0], 0
