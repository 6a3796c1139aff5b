"""The online softmax of one row in float32, step by step: every forward kernel must match it bit for bit.

The result does not depend on the tile. Keys are processed in ascending order, in blocks of one width from key 0 on. In
each block the reference moves to the row's largest score if an exponential would exceed 2^8, and sums and output are
rescaled. Then four partial sums (columns 2t and 2t + 1 of every eight) add the exponentials in order, and O += P V
takes 16 keys at a time.

The inputs make all of this predictable: they are integers, so scores are exact, and each column of V has one 1 in every
16 keys, so a tensor core product adds a single number.
"""

from typing import Any

import numpy as np
import torch

MAX_EXPONENT = np.float32(8.0)
LOG2E = np.float32(1.44269504088896341)
LN2 = np.float32(0.693147180559945309)
FLUSHED = 1e-33  # sums of values times exponentials near the smallest normal float
STEP = 16  # keys per product
INFINITY = np.float32("inf")

_Array = np.ndarray[Any, Any]  # float32 unless stated otherwise


def exact_inputs(like: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values for q, k and v shaped like [..., rows, columns].

    In every third row all scores matter, so the order of sums shows; in the others scores rise, at different keys, so
    references move.
    """
    index, column = torch.arange(like.shape[-2])[:, None], torch.arange(like.shape[-1])
    drawn = torch.randint(0, 1 << 20, like.shape, generator=generator)
    is_own = index % STEP == column % STEP
    return (
        (drawn % 5 - 2) * (1 + index % 3) * ((index % 3 > 0) | (column < 2)),
        (drawn % 7 - 3) * (1 + index // STEP % 4),
        is_own.expand(like.shape),
    )


def _exp2(x: _Array) -> _Array:
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def _tensor_core_sum(total: _Array, term: _Array, extra_bits: int) -> _Array:
    """Truncates both to the exponent of the larger one with 24 + ``extra_bits`` bits, adds, truncates to a float.

    Neither is negative.
    """
    exponent = np.frexp(np.maximum(total, term).astype(np.float64))[1]
    unit = np.ldexp(1.0, exponent - 24 - extra_bits)
    both = (np.floor(total / unit) + np.floor(term / unit)) * unit
    unit = np.ldexp(1.0, np.frexp(both)[1] - 24)
    result: _Array = (np.floor(both / unit) * unit).astype(np.float32)
    return result


def disagreements(
    name: str,
    out: torch.Tensor,
    lse: torch.Tensor,
    scores: torch.Tensor,
    *,
    width: int,
    scale_log2: float,
    sinks: torch.Tensor | None = None,
) -> list[str]:
    """Bits of a kernel's out [rows, head_dim] and lse [rows] that differ from the recurrence.

    Exact scores [rows, keys] are -inf if a row does not see a key. ``sinks``: [rows]. Tensor core generations differ in
    the last bits of a sum; matching any of them is accepted.
    """
    found = []
    for extra_bits in range(3):
        drawn = None if sinks is None else sinks.numpy()
        found = _differences(name, out, lse, _attend(scores.numpy(), width, scale_log2, out.dtype, extra_bits, drawn))
        if not found:
            break
    return found


def _attend(
    scores: _Array, width: int, scale_log2: float, dtype: torch.dtype, extra_bits: int, sinks: _Array | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [rows, 16], lse [rows])."""
    scale = np.float32(scale_log2)
    rows, keys = scores.shape
    reference = np.full(rows, -INFINITY)
    partial = np.zeros((rows, 4), np.float32)
    out = np.zeros((rows, STEP), np.float32)
    with np.errstate(invalid="ignore"):
        for first in range(0, keys, width):
            block = scores[:, first : first + width]
            largest = np.maximum(reference, block.max(axis=1))
            following = np.where((largest - reference) * scale <= MAX_EXPONENT, reference, largest)
            shift = np.where(np.isneginf(following), np.float32(0.0), following) * scale
            rescale = _exp2(reference * scale - shift)
            reference = following
            partial *= rescale[:, None]
            out *= rescale[:, None]
            exponents = block.astype(np.float64) * np.float64(scale) - shift[:, None].astype(np.float64)
            p = _exp2(exponents.astype(np.float32))
            for column in range(block.shape[1]):
                partial[:, column % 8 // 2] += p[:, column]
            rounded = torch.from_numpy(p).to(dtype).float().numpy()
            for step in range(0, block.shape[1], STEP):
                part = rounded[:, step : step + STEP]
                part = np.pad(part, ((0, 0), (0, STEP - part.shape[1])))
                out = _tensor_core_sum(out, part, extra_bits)
        total = (partial[:, 0] + partial[:, 1]) + (partial[:, 2] + partial[:, 3])
        shift = reference * scale
        factor = np.ones(rows, np.float32)
        if sinks is not None:
            sink = sinks * LOG2E
            shift, before = np.maximum(shift, sink), shift
            factor = _exp2(before - shift)
            total = (total.astype(np.float64) * factor + _exp2(sink - shift)).astype(np.float32)
        is_empty = total == 0.0
        inverse = factor * np.where(is_empty, 0.0, 1.0 / np.where(is_empty, 1.0, total).astype(np.float64)).astype(
            np.float32
        )
        logarithm = np.log2(total.astype(np.float64), where=~is_empty, out=np.zeros(rows)).astype(np.float32)
        lse = np.where(is_empty, -INFINITY, (logarithm + shift) * LN2)
    return torch.from_numpy(out * inverse[:, None]).to(dtype), torch.from_numpy(lse)


def _differences(
    name: str, out: torch.Tensor, lse: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]
) -> list[str]:
    whole = expected[0].repeat(1, -(-out.shape[1] // STEP))[:, : out.shape[1]]
    found = []
    for what, actual, wanted in ((f"out{name}", out, whole), (f"lse{name}", lse, expected[1])):
        # Kernels flush subnormal exponentials to zero, which affects results this small.
        is_tiny = (actual.abs() < FLUSHED) & (wanted.abs() < FLUSHED)
        wrong = ((actual != wanted) & ~is_tiny).nonzero()
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            values = f"{float(actual[at])!r} instead of {float(wanted[at])!r}"
            found.append(
                f"{what} is not the recurrence's bit for bit at {len(wrong)} of {actual.numel()} elements; first at {list(at)}: {values}"
            )
    return found
