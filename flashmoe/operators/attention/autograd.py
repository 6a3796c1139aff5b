"""The gradient of the forward operators: in the dispatcher, in plain eager calls, and under torch.func.

The forward pass keeps q, k, v, out and lse; the backward pass is an operator of its own (``backward.py``), so that compiled
graphs hold one node for it whatever the lengths.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

from flashmoe.errors import DifferentiationError, FlashmoeError
from flashmoe.operator import keep_nothing
from flashmoe.operators.attention.shapes import bits
from flashmoe.rules import translate
from flashmoe.transforms import has_tangent, merge_batches, split_batch

NO_FORWARD_MODE = (
    "attention has no forward-mode derivative; use reverse mode, or torch's scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


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
        grad_out, grad_lse, q, k, v, out, lse, ctx.scale, ctx.causal, bits(needed)
    )
    wanted = (gradient if need else None for gradient, need in zip(gradients, needed, strict=True))
    return (*wanted, None, None)


def refuse_double_backward(ctx: Any, *_: Any) -> NoReturn:
    msg = (
        "flashmoe attention can be differentiated once; this asked for a second derivative. Use "
        "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for it"
    )
    raise DifferentiationError(msg)


def operator_rule(keyset: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """What the operator does in the dispatcher's Autograd layer, for those who call it by its name and for compilers."""
    if has_tangent(q, k, v):
        raise DifferentiationError(NO_FORWARD_MODE)
    try:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):  # any may be None here
            result: tuple[Tensor, Tensor] = DispatchedForward.apply(keyset, q, k, v, scale, causal)  # type: ignore[no-untyped-call]
            return result
        return _below_autograd(keyset, q, k, v, scale, causal)
    except RuntimeError as error:
        typed = translate(error)
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
        needed = ctx.needs_input_grad[:3]
        gradients = TransformedBackward.apply(  # type: ignore[no-untyped-call]
            grad_out, grad_lse, q, k, v, out, lse, ctx.scale, ctx.causal, bits(needed)
        )
        return (*(gradient if need else None for gradient, need in zip(gradients, needed, strict=True)), None, None)

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

    setup_context = staticmethod(keep_nothing)
    backward = staticmethod(refuse_double_backward)
    jvp = staticmethod(refuse_double_backward)


def vmap_backward(
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
    size = info.batch_size
    return tuple(
        split_batch(gradient, size, *arguments[q], *in_dims[q]) if gradient.dim() > 1 else gradient.expand(size, 0)
        for gradient in gradients
    )
