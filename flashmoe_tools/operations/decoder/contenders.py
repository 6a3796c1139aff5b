"""A batch-invariant step of ours, our default kernels with cuBLAS, and a batch-invariant stack in Triton."""

from collections.abc import Callable
from importlib import import_module

from flashmoe_tools.bench.contenders import Contender, Prepared, flashmoe_available, installed
from flashmoe_tools.operations.decoder.model import CONSISTENT, DEFAULT, Stack
from flashmoe_tools.operations.decoder.reference import Inputs


def _triton() -> Stack:
    rooms = "flashmoe_tools.operations"
    linear = import_module(f"{rooms}.linear.triton_linear").linear
    return Stack(linear, CONSISTENT.ragged, import_module(f"{rooms}.decoder.triton_attention").cached)


def _step(make: Callable[[], Stack]) -> Callable[[Inputs], Prepared]:
    def prepare(inputs: Inputs) -> Prepared:
        stack = make()
        return Prepared(lambda: inputs.step(stack))

    return prepare


def contenders() -> tuple[Contender, ...]:
    both = ("cpu", "cuda")
    return (
        Contender("flashmoe", "flashmoe, consistent", both, flashmoe_available, _step(lambda: CONSISTENT), ours=True),
        Contender("flashmoe-default", "flashmoe and cuBLAS", both, flashmoe_available, _step(lambda: DEFAULT)),
        Contender("triton-invariant", "Triton, invariant", ("cuda",), installed("triton"), _step(_triton)),
    )
