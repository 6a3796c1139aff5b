"""FlexAttention as a contender: a case's score options as score_mod and mask_mod, compiled once per case."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import Call
from flashmoe_tools.operations.attention.reference import ScoreOptions

Modifier = Callable[..., torch.Tensor]
# FlexAttention's own tiles for 512 columns do not fit into shared memory.
WIDE = {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1, "num_warps": 8}


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ScoreOptions,
    mask: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> Call:
    """Attention [B, Hq, Sq, D] of q and of k, v [B, Hkv, Sk, D].

    ``mask`` [B, 1, Sq, Sk] or [1, Hq, Sq, Sk]: bool, or added to the scores. Both the block mask and the compilation,
    which a first call triggers, are done here.
    """
    flex = import_module("torch.nn.attention.flex_attention")
    (batch, _, rows, _), keys = q.shape, k.shape[2]
    by_head = mask is not None and (mask.shape[1] > 1 or mask.shape[0] < batch)
    score_mod, mask_mod = modifiers(options, keys - rows, mask, slopes, by_head=by_head)
    block_mask = None
    if mask_mod is not None:
        masks = (None, None) if mask is None or mask.dtype != torch.bool else mask.shape[:2]
        block_mask = flex.create_block_mask(mask_mod, *masks, rows, keys, device=q.device)
    named = {
        "score_mod": score_mod,
        "block_mask": block_mask,
        "scale": options.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        "kernel_options": WIDE if q.shape[3] > 256 else None,
    }
    return compiled(flex.flex_attention, (q, k, v), named)


def modifiers(
    options: ScoreOptions, shift: int, mask: torch.Tensor | None, slopes: torch.Tensor | None, *, by_head: bool
) -> tuple[Modifier | None, Modifier | None]:
    """(score_mod, mask_mod), None if there is nothing to do. Row i's own key is i + ``shift``."""
    steps: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = []
    conditions: list[Modifier] = []
    if options.causal:
        conditions.append(lambda b, h, i, j: j <= i + shift)
    if options.window is not None:
        left, _ = options.window
        conditions.append(lambda b, h, i, j: j >= i + shift - left)
    if cap := options.softcap:
        # Replaces tanh: libdevice's branches, while a sigmoid is one exponential and one division.
        steps.append(lambda score, b, h, i, j: cap * (2 * torch.sigmoid(score * (2 / cap)) - 1))
    if slopes is not None:
        steps.append(lambda score, b, h, i, j: score - slopes[h] * (i + shift - j).abs())
    if mask is not None:
        each = mask.flatten(0, 1)  # a view, so its gradient is one too
        if mask.dtype == torch.bool:
            conditions.append(lambda b, h, i, j: each[h if by_head else b, i, j])
        else:
            steps.append(lambda score, b, h, i, j: score + each[h if by_head else b, i, j])

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        for step in steps:
            score = step(score, b, h, i, j)
        return score

    def mask_mod(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = conditions[0](b, h, i, j)
        for condition in conditions[1:]:
            seen = seen & condition(b, h, i, j)
        return seen

    return score_mod if steps else None, mask_mod if conditions else None


def compiled(function: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], named: dict[str, Any]) -> Call:
    """``function`` with these arguments, compiled for their shapes; refused if it is not compiled.

    Uncompiled, its times would be wrong by orders of magnitude. With ``fullgraph`` neither a graph break nor too many
    compilations fall back to eager. A backward pass may run again, so its buffers are not donated.
    """
    # Compilations of earlier cases count towards the limit and keep their tensors alive.
    import_module("torch._dynamo").reset()
    stats = import_module("torch._dynamo.utils").counters["stats"]
    fast = torch.compile(function, fullgraph=True, dynamic=False)
    before = stats["unique_graphs"]
    with import_module("torch._functorch.config").patch(donated_buffer=False):
        fast(*tensors, **named)
    if stats["unique_graphs"] == before:
        msg = "FlexAttention was not compiled: is torch.compile switched off?"
        raise ArgumentError(msg)
    return lambda: fast(*tensors, **named)
