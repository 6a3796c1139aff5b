"""4-bit weights in the order in which Hopper's kernel reads them: each warp reads only the words from which it makes its operands.

A block is 64 weight rows by 64 k. Thread t of a warpgroup's 128, with warp w = t / 32, g = t % 32 / 4 and q = t % 4, makes
operands for the rows 16w + g and 16w + g + 8, and of every 16 k for 2q, 2q + 1, 2q + 8 and 2q + 9. It has four words, two per 32
k. Two words hold eight pairs of codes: each word holds three, which one rotation and a mask extract; the other two are in the bits
that remain of both words (``spread_packed`` in csrc/moe/grouped_gemm/mxfp4.cuh).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flashmoe.errors import ArgumentError, DtypeError, ShapeError
from flashmoe.moe import errors
from flashmoe.moe.options import LAYOUTS, Layout

SIDE = 64  # weight rows, and k, per block
BLOCK = 32  # weights of a row per scale
BLOCK_BYTES = SIDE * SIDE // 2 + SIDE * SIDE // BLOCK
CAPABILITY = (9, 0)  # of the GPUs whose kernels read packed weights
_THREADS = 128
# Bits of a pair: magnitude and sign of the first code; those of the second code are 16 higher.
_BIT_POSITIONS = (6, 7, 8, 15)
_ROTATIONS = (0, 6, 26)  # rotations to the left that extract the three pairs of a word
_LEFT = (3, 4, 10, 11)  # the bits of either half of a word that these pairs leave free
_SECOND_ROTATION = 2  # rotation of the second word's free bits, so that they do not overlap the first word's
_LAST_TURNS = (28, 2)  # rotations for the two pairs that are split over both words


def pack_mxfp4(codes: Tensor, scales: Tensor, *, gated: Layout | None = None) -> Tensor:
    """Reorders mxfp4 weights into the layout that the kernels of compute capability 9.0 read fastest, for :func:`flashmoe.fused_moe`.

    Call it once, when a model is loaded. ``fused_moe(x, pack_mxfp4(w13, w13_scale, gated=layout), pack_mxfp4(w2, w2_scale), ...,
    layout=layout)``, without scales, then returns the same bits as with the unpacked weights.

    Args:
        codes: uint8 [E, N, K / 2], or a checkpoint's blocks [E, N, K / 32, 16]; e2m1 codes, two per byte, the first in the low four bits.
            N and K are multiples of 64.
        scales: uint8 [E, N, K / 32], each 2^(b - 127) for 32 values of a row.
        gated: for w13 the layout of its rows, "concat" or "interleaved", so that gate and up rows can be packed side by side; None for w2.

    Returns:
        uint8 [E, N / 64, K / 64, 2176]: the codes and scales of 64 by 64 weights. As many bytes as codes and scales together.

    Raises:
        ArgumentTypeError, ArgumentError, DtypeError, ShapeError: an argument breaks a rule above; the message says which.
    """
    for name, tensor in (("codes", codes), ("scales", scales)):
        errors.check_tensor(name, tensor)
        if tensor.dtype is not torch.uint8:
            msg = f"{name} is {str(tensor.dtype).removeprefix('torch.')}; uint8 is needed; view the bytes with .view(torch.uint8)"
            raise DtypeError(msg)
    if gated is not None and gated not in LAYOUTS:
        msg = f"gated is {gated!r}; supported: None, {', '.join(map(repr, LAYOUTS))}; use one of them"
        raise ArgumentError(msg)
    if codes.dim() == 4 and codes.shape[3] == BLOCK // 2:
        codes = codes.flatten(2)
    if codes.dim() != 3 or codes.shape[1] % SIDE or codes.shape[2] % (SIDE // 2) or 0 in codes.shape:
        msg = (
            f"codes has shape {list(codes.shape)}; [E, N, K / 2] with N and K multiples of {SIDE} is needed; leave the weights unpacked, "
            "or pad them, their scales and x with zeros"
        )
        raise ShapeError(msg)
    experts, n, k = codes.shape[0], codes.shape[1], 2 * codes.shape[2]
    needed = [experts, n, k // BLOCK]
    if list(scales.shape) != needed or scales.device != codes.device:
        msg = f"scales has shape {list(scales.shape)} on {scales.device}; {needed} on {codes.device} is needed, one scale per {BLOCK} values"
        raise ShapeError(msg)
    packed = codes.new_empty((experts, n // SIDE, k // SIDE, BLOCK_BYTES))
    rows = _row_order(n, gated).to(codes.device)
    for expert in range(experts):  # one at a time: the intermediate tensors are eight times as large
        _pack_codes(codes[expert][rows], packed[expert, ..., : SIDE * SIDE // 2])
        _pack_scales(scales[expert][rows], packed[expert, ..., SIDE * SIDE // 2 :])
    return packed


def unpack_mxfp4(packed: Tensor, *, gated: Layout | None = None) -> tuple[Tensor, Tensor]:
    """The codes uint8 [E, N, K / 2] and scales uint8 [E, N, K / 32] that ``pack_mxfp4`` packed into ``packed`` with the same ``gated``."""
    experts, n, k = packed.shape[0], packed.shape[1] * SIDE, packed.shape[2] * SIDE
    codes, scales = packed.new_empty((experts, n, k // 2)), packed.new_empty((experts, n, k // BLOCK))
    rows = _row_order(n, gated).to(packed.device)
    for expert in range(experts):
        codes[expert, rows] = _unpack_codes(packed[expert, ..., : SIDE * SIDE // 2])
        scales[expert, rows] = _unpack_scales(packed[expert, ..., SIDE * SIDE // 2 :])
    return codes, scales


def is_packed(weights: object) -> bool:
    return isinstance(weights, Tensor) and weights.dim() == 4 and weights.shape[3] == BLOCK_BYTES


def can_pack(device: torch.device, *sizes: int) -> bool:
    """Whether a layer of these sizes (H and I) on ``device`` runs faster packed: the GPU has the kernels, and they support the sizes."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == CAPABILITY
        and all(size % SIDE == 0 for size in sizes)
    )


def _row_order(n: int, gated: str | None) -> Tensor:
    """For each packed row, the index of the original row; for w13, eight gate rows and then the matching eight up rows."""
    rows = torch.arange(n)
    if gated is None:
        return rows
    column, is_up = rows // 16 * 8 + rows % 8, rows // 8 % 2
    return 2 * column + is_up if gated == "interleaved" else is_up * (n // 2) + column


def _pack_codes(codes: Tensor, out: Tensor) -> None:
    """[n, k / 2] to bytes [n / 64, k / 64, 2048]."""
    n, half = codes.shape
    nibbles = torch.stack((codes & 15, codes >> 4), -1).to(torch.int32)
    # [rows / 64, warp, row of a pair (+0 or +8), g, k / 64, 32 k, 16 k, 8 k, q, code of a pair]
    axes = nibbles.view(n // SIDE, 4, 2, 8, half * 2 // SIDE, 2, 2, 2, 4, 2)
    # [rows / 64, k / 64, warp, g, q, 32 k; 16 k, 8 k, row: a pair; code]
    ordered = axes.permute(0, 4, 1, 3, 8, 5, 6, 7, 2, 9).reshape(n // SIDE, half * 2 // SIDE, _THREADS, 2, 8, 2)
    words = ordered.new_zeros((*ordered.shape[:4], 2))
    for pair, code, bit, word, position in _bits():
        value = ordered[..., pair, code] >> bit & 1
        words[..., word] |= value << position
    out.copy_(words.flatten(2).view(torch.uint8))


def _unpack_codes(packed: Tensor) -> Tensor:
    """Bytes [n / 64, k / 64, 2048] to codes [n, k / 2]."""
    tiles, steps, _ = packed.shape
    words = packed.contiguous().view(torch.int32).view(tiles, steps, _THREADS, 2, 2)
    ordered = words.new_zeros((*words.shape[:4], 8, 2))
    for pair, code, bit, word, position in _bits():
        ordered[..., pair, code] |= (words[..., word] >> position & 1) << bit
    # the axes of _pack_codes, back in the order of the weights
    axes = ordered.view(tiles, steps, 4, 8, 4, 2, 2, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 6, 7, 4, 9)
    nibbles = axes.reshape(tiles * SIDE, steps * SIDE // 2, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8)


@cache
def _bits() -> tuple[tuple[int, int, int, int, int], ...]:
    """(pair, code, bit of the code, word, bit of the word) for all bits of 16 codes."""
    positions = [(code, bit, position + 16 * code) for code in range(2) for bit, position in enumerate(_BIT_POSITIONS)]
    found = []
    for code, bit, position in positions:
        for word in range(2):
            found += [
                (3 * word + i, code, bit, word, (position - rotation) % 32) for i, rotation in enumerate(_ROTATIONS)
            ]
        for i, rotation in enumerate(_LAST_TURNS):
            rest = (position - rotation) % 32  # index in the free bits of both words
            is_first = rest % 16 in _LEFT
            found.append((6 + i, code, bit, 0 if is_first else 1, rest if is_first else (rest - _SECOND_ROTATION) % 32))
    return tuple(found)


def _pack_scales(scales: Tensor, out: Tensor) -> None:
    """[n, k / 32] to bytes [n / 64, k / 64, 128]: for each warp and g, the two rows' scales of the first 32 k, then of the second."""
    n, blocks = scales.shape
    axes = scales.view(n // SIDE, 4, 2, 8, blocks // 2, 2)  # [rows / 64, warp, row, g, k / 64, 32 k]
    out.copy_(axes.permute(0, 4, 1, 3, 5, 2).reshape(n // SIDE, blocks // 2, 128))


def _unpack_scales(packed: Tensor) -> Tensor:
    """Bytes [n / 64, k / 64, 128] to scales [n, k / 32]."""
    tiles, steps, _ = packed.shape
    axes = packed.reshape(tiles, steps, 4, 8, 2, 2).permute(0, 2, 5, 3, 1, 4)
    return axes.reshape(tiles * SIDE, steps * 2)
