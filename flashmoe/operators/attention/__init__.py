"""Attention: the operators, and what is said about them in Python.

arguments   the rules for the arguments, and why a call failed
shapes      what a call returns where there is no data, and its operation count
drop_in     where scaled_dot_product_attention means what the operators compute
autograd    the gradient of the forward operators, under torch.func too
backward    the backward operator: its kernels, and torch operations where there are none
varlen      the operators of ragged, paged and banded attention; varlen_arguments, their rules
"""

from __future__ import annotations

from flashmoe.operator import Operator
from flashmoe.operators.attention import autograd, backward, shapes, varlen

OPERATORS = (
    Operator(
        "flash_attention_forward",
        fake=shapes.forward,
        flops=shapes.forward_flops,
        autocast=3,
        # torch.library.register_autograd's rule fails under torch.func and drops forward-mode tangents without a word.
        impls={"Autograd": autograd.operator_rule, "FuncTorchDynamicLayerFrontMode": autograd.under_transforms},
    ),
    Operator("_flash_attention_inference", fake=shapes.inference, flops=shapes.forward_flops, autocast=3),
    Operator("_flash_attention_drop_in", fake=shapes.drop_in, flops=shapes.forward_flops, autocast=3),
    Operator(
        "flash_attention_backward",
        schema=backward.SCHEMA,
        impls={"CPU": backward.backward_by_kernels, "CUDA": backward.backward_by_kernels},
        fake=shapes.backward,
        flops=shapes.backward_flops,
        vmap=autograd.vmap_backward,
        gradient=autograd.refuse_double_backward,
    ),
    *varlen.OPERATORS,
)
