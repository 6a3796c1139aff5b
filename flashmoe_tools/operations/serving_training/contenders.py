"""The backward pass's contenders with the forward pass in the same call, which a CUDA graph can then capture."""

from flashmoe_tools.bench.contenders import Contender
from flashmoe_tools.operations.serving_backward import contenders as backward


def contenders() -> tuple[Contender, ...]:
    return backward.contenders(both=True)
