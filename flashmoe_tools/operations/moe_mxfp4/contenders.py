"""The layer with mxfp4 weights, and our 16-bit layer with the same weights in bfloat16. torch has no product of 4 bits on this GPU, and
its composition would read the number of each expert's rows on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch

from flashmoe_tools.bench.contenders import Contender, Prepared, flashmoe_available
from flashmoe_tools.operations.moe.contenders import BOTH, flashmoe_layer
from flashmoe_tools.operations.moe_mxfp4.reference import ACTIVATION, LAYOUT, Mxfp4Inputs

Call = Callable[[torch.Tensor], Any]


def _ours(inputs: Mxfp4Inputs, *, is_dequantized: bool) -> Call:
    w13, w2 = inputs.dequantized if is_dequantized else (inputs.w13, inputs.w2)
    scales = {} if is_dequantized else {"w13_scale": inputs.w13_scale, "w2_scale": inputs.w2_scale}
    options = {"b13": inputs.b13, "b2": inputs.b2, "activation": ACTIVATION, "layout": LAYOUT}
    layer = partial(flashmoe_layer(), **options, **scales)
    return lambda ids: layer(inputs.x, w13, w2, inputs.topk_weights, ids)


def _in_turn(bind: Callable[[Mxfp4Inputs], Call]) -> Callable[[Mxfp4Inputs], Prepared]:
    """Each call takes the next routing."""

    def prepare(inputs: Mxfp4Inputs) -> Prepared:
        layer, ids = bind(inputs), cycle(inputs.routings)
        return Prepared(lambda: layer(next(ids)))

    return prepare


def contenders() -> tuple[Contender, ...]:
    ours = partial(_ours, is_dequantized=False)
    in_sixteen_bits = partial(_ours, is_dequantized=True)
    return (
        Contender("flashmoe", "flashmoe", BOTH, flashmoe_available, _in_turn(ours), ours=True),
        Contender("flashmoe-bf16", "flashmoe, bf16", BOTH, flashmoe_available, _in_turn(in_sixteen_bits)),
    )
