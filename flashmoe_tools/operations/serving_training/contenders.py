"""The contenders of the backward pass, which run their forward pass in the call, too: as one it can be captured in a CUDA graph."""

from flashmoe_tools.bench.contenders import Contender
from flashmoe_tools.operations.serving_backward import contenders as backward


def contenders() -> tuple[Contender, ...]:
    return backward.contenders(both=True)
