"""A training step with our drop-in and with torch's attention, each eager and compiled."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

import torch
from torch import Tensor

from flashmoe_tools.bench.contenders import Contender, Prepared, always, flashmoe_available, forced
from flashmoe_tools.operations.train_step.reference import Attention, StepInputs


def _sdpa() -> Attention:
    return torch.nn.functional.scaled_dot_product_attention


def _flashmoe() -> Attention:
    return cast("Attention", import_module("flashmoe").scaled_dot_product_attention)


def _step(attention: Callable[[], Attention], *, compiled: bool) -> Callable[[StepInputs], Prepared]:
    def prepare(inputs: StepInputs) -> Prepared:
        function = attention()

        def loss(tokens: Tensor) -> Tensor:
            return cast("Tensor", inputs.model(tokens, function))

        run = torch.compile(loss, fullgraph=True, dynamic=False) if compiled else loss
        return Prepared(lambda: inputs.step(run))

    return prepare


def contenders() -> tuple[Contender, ...]:
    """Ours, torch's default choice of a backend, and one backend selected by name."""
    both = ("cpu", "cuda")
    return (
        Contender("flashmoe", "flashmoe", both, flashmoe_available, _step(_flashmoe, compiled=False), ours=True),
        Contender(
            "flashmoe-compiled",
            "flashmoe, compiled",
            both,
            flashmoe_available,
            _step(_flashmoe, compiled=True),
            ours=True,
        ),
        Contender("sdpa", "SDPA default", both, always, _step(_sdpa, compiled=False)),
        Contender("sdpa-compiled", "SDPA default, compiled", both, always, _step(_sdpa, compiled=True)),
        Contender("sdpa-flash", "SDPA FLASH", both, always, _step(_sdpa, compiled=False), forced("FLASH_ATTENTION")),
        Contender(
            "sdpa-cudnn", "SDPA cuDNN", ("cuda",), always, _step(_sdpa, compiled=False), forced("CUDNN_ATTENTION")
        ),
    )
