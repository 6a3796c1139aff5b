"""Dropout of attention's probabilities: the seed and offset of a call, the operator's call, and the mask itself.

csrc/attention/params/dropout.h defines how seed, offset, sequence, head, row and key make the mask. Importing this module imports torch
and loads the compiled extension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe import _extension
from flashmoe.attn import arguments, autograd, philox
from flashmoe.attn.options import Varlen
from flashmoe.checks import check_size, is_number
from flashmoe.errors import ArgumentError, ArgumentTypeError, DifferentiationError
from flashmoe.rules import broken
from flashmoe.transforms import has_tangent

_extension.load()
_NAME = "attention_dropout_forward"
MOST_PROBABILITIES = 1 << 40
_operator = torch.ops.flashmoe.attention_dropout_forward.default


def check_probability(dropout_p: Any) -> float:
    if not is_number(dropout_p):
        msg = f"dropout_p must be a number; found {type(dropout_p).__name__}; use float(dropout_p), or 0.0 for none"
        raise ArgumentTypeError(msg)
    if not 0.0 <= dropout_p < 1.0:
        impossible = broken("attention.dropout_p", found=float(dropout_p))
        raise impossible
    return float(dropout_p)


def check_state(rng_state: Any) -> None:
    if rng_state is not None and not isinstance(rng_state, Tensor):
        msg = (
            f"rng_state must be an int64 tensor [2], seed and offset, or None; found {type(rng_state).__name__}; "
            "use torch.tensor((seed, offset), device=q.device)"
        )
        raise ArgumentTypeError(msg)


def draw_state(device: torch.device) -> Tensor:
    """Seed and offset, int64 [2], from the device's default generator: its state decides the mask, and a replayed CUDA graph draws anew."""
    return torch.randint(0, (1 << 63) - 1, (2,), dtype=torch.int64, device=device)


def attend(given: Varlen, dropout_p: float, rng_state: Tensor | None, return_lse: bool) -> Any:
    """``attention_dropout_forward`` on the user's arguments; ``dropout_p`` is above 0."""
    check_state(rng_state)
    if rng_state is None:
        if not isinstance(given.q, Tensor):
            arguments.check_is_dense_tensor("q", given.q)
        rng_state = draw_state(given.q.device)
    call = (*given, dropout_p, rng_state)
    if is_compiling():
        result = _operator(*call)
        return result if return_lse else result[0]
    try:
        if transforms_are_active():
            result = autograd.varlen_under_transforms(*call, has_dropout=True)
        else:
            tensors = (given.q, given.k, given.v, given.sinks, given.mask)
            if has_tangent(*tensors):
                raise DifferentiationError(autograd.NO_FORWARD_MODE)
            is_eager = autograd.needs_gradient(*tensors) and autograd.is_eager(given)
            result = (autograd.eager_dropout if is_eager else _operator)(*call)
    except Exception as error:
        cause = arguments.explain_varlen(error, given, (_NAME, call))
        if cause is error:
            raise
        raise cause from error
    return result if return_lse else result[0]


def raise_fp8_dropout() -> None:
    msg = "dropout_p is not supported with torch.float8_e4m3fn keys, which are for inference; remove dropout_p"
    raise ArgumentError(msg)


def dropout_mask(rng_state: Tensor, dropout_p: float, batch: int, heads: int, rows: int, keys: int) -> Tensor:
    """The dropout mask of a call: bool [batch, heads, rows, keys] on ``rng_state``'s device, False where key j is dropped from row i.

    ``rng_state`` is int64 [2], seed and offset, as ``flashmoe.attention`` takes it. For a ragged call ``batch`` is the number of sequences,
    and rows and keys are those of the longest. The call multiplies what it keeps by 1 / (1 - dropout_p). For inspection and tests: needs
    at least 8 bytes of memory per probability. Raises ArgumentTypeError or ArgumentError for a probability, state or size that no call accepts.
    """
    probability = check_probability(dropout_p)
    check_state(rng_state)
    state: Any = rng_state
    if state is None or state.dtype is not torch.int64 or state.shape != (2,):
        found = "None" if state is None else f"{state.dtype} {list(state.shape)}"
        msg = f"rng_state must be an int64 tensor [2], seed and offset; found {found}; pass the state used in the call"
        raise ArgumentError(msg)
    sizes = {"batch": batch, "heads": heads, "rows": rows, "keys": keys}
    batch, heads, rows, keys = (check_size(name, size, 0) for name, size in sizes.items())
    if batch * heads * rows * keys > MOST_PROBABILITIES:
        msg = f"batch * heads * rows * keys is {batch * heads * rows * keys}; supported: up to 2^40; request fewer rows"
        raise ArgumentError(msg)
    return philox.keep_mask(rng_state, probability, range(batch), range(heads), rows, keys)
