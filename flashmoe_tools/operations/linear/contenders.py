"""Our linear, torch's (cuBLAS on a GPU), and a product in Triton with one tile for every number of rows."""

import itertools
from collections.abc import Callable
from importlib import import_module

import torch

from flashmoe_tools.bench.contenders import Contender, Prepared, always, flashmoe_available, installed
from flashmoe_tools.operations.linear.reference import Inputs

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _flashmoe() -> Linear:
    import flashmoe

    return flashmoe.linear


def _triton() -> Linear:
    found: Linear = import_module("flashmoe_tools.operations.linear.triton_linear").linear
    return found


def _in_turn(make: Callable[[], Linear]) -> Callable[[Inputs], Prepared]:
    """Each call takes the next copy of the weights."""

    def prepare(inputs: Inputs) -> Prepared:
        call, weights = make(), itertools.cycle(inputs.weights)
        return Prepared(lambda: call(inputs.x, next(weights)))

    return prepare


def contenders() -> tuple[Contender, ...]:
    both = ("cpu", "cuda")
    return (
        Contender("flashmoe", "flashmoe", both, flashmoe_available, _in_turn(_flashmoe), ours=True),
        Contender("torch", "torch's linear", both, always, _in_turn(lambda: torch.nn.functional.linear)),
        Contender("triton-one-tile", "Triton, one tile", ("cuda",), installed("triton"), _in_turn(_triton)),
    )
