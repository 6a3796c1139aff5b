"""The tensors and the reference are those of the backward pass."""

from flashmoe_tools.operations.serving_backward.reference import make_inputs, make_reference

__all__ = ["make_inputs", "make_reference"]
