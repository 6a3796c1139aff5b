"""Attention's operators, as data for torch's dispatcher (see flashmoe/operator.py)."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from flashmoe.attn import autograd, backward, bias_gradient, fake, flops, refusals, varlen_backward
from flashmoe.attn.options import Varlen, is_slopes, positions
from flashmoe.errors import ArgumentError
from flashmoe.operator import Operator

NO_TRANSFORM_APPENDS = (
    "new keys are appended in place, which torch.func's transforms (vmap, functionalize) do not support; make the mapped "
    "dimension part of the batch, with a cache for each sequence, or append before the transform"
)


def raise_no_vmap_append(*_: Any) -> NoReturn:
    raise ArgumentError(NO_TRANSFORM_APPENDS)


_CAST = positions(Varlen._fields, "q k v mask")  # autocast gives all of them one dtype, an additive mask included


def _is_cast(argument: Any) -> bool:
    """ALiBi's slopes, which are passed as a mask, stay in float32."""
    return argument is not None and not is_slopes(argument)


_varlen = partial(Operator, counts_raw=True, autocast=_CAST, is_cast=_is_cast)  # forward operators of ragged attention

OPERATORS = (
    Operator(
        "flash_attention_forward",
        fake=fake.forward,
        flops=flops.forward_flops,
        autocast=3,
        # torch.library.register_autograd's rule fails under torch.func and silently drops forward-mode tangents.
        impls={"Autograd": autograd.dense_rule, "FuncTorchDynamicLayerFrontMode": autograd.dense_under_transforms},
    ),
    Operator("_flash_attention_inference", fake=fake.inference, flops=flops.forward_flops, autocast=3),
    Operator("_flash_attention_drop_in", fake=fake.drop_in, flops=flops.forward_flops, autocast=3),
    Operator(
        "flash_attention_backward",
        schema=backward.SCHEMA,
        impls={"CPU": backward.backward_by_kernels, "CUDA": backward.backward_by_kernels},
        fake=fake.backward,
        flops=flops.backward_flops,
        vmap=autograd.dense_backward.vmap,
        gradient=autograd.raise_double_backward,
    ),
    _varlen(
        "attention_varlen_forward",
        fake=fake.varlen_forward,
        flops=flops.varlen_flops,
        vmap=autograd.varlen.vmap,
        gradient=autograd.varlen_gradient,
        setup_context=autograd.save_varlen,
    ),
    _varlen(
        "_attention_varlen_inference",
        fake=fake.varlen_inference,
        flops=flops.varlen_flops,
        vmap=autograd.vmap_varlen_inference,
    ),
    Operator(
        "_attention_varlen_out",
        fake=fake.varlen_out,
        flops=flops.out_flops,
        counts_raw=True,
        vmap=refusals.raise_no_vmap_out,
    ),
    Operator(
        "attention_varlen_backward",
        schema=varlen_backward.SCHEMA,
        impls={"CPU": varlen_backward.backward_by_kernels, "CUDA": varlen_backward.backward_by_kernels},
        fake=fake.varlen_backward,
        flops=flops.varlen_backward_flops,
        counts_raw=True,
        vmap=autograd.varlen_backward.vmap,
        gradient=autograd.raise_double_backward,
    ),
    Operator(
        "_attention_varlen_backward", fake=fake.varlen_kernels, flops=flops.varlen_backward_flops, counts_raw=True
    ),
    Operator(
        "attention_mask_backward",
        schema=varlen_backward.MASK_SCHEMA,
        impls={"CPU": bias_gradient.mask_backward, "CUDA": bias_gradient.mask_backward},
        fake=fake.mask_backward,
        flops=flops.mask_backward_flops,
        counts_raw=True,
        vmap=autograd.mask_backward.vmap,
        gradient=autograd.raise_double_backward,
    ),
    Operator("_attention_mask_backward", fake=fake.mask_kernels, flops=flops.mask_backward_flops, counts_raw=True),
    _varlen(
        "attention_dropout_forward",
        fake=fake.dropout_forward,
        flops=flops.prefix_flops,
        vmap=autograd.dropout.vmap,
        gradient=autograd.dropout_gradient,
        setup_context=autograd.save_dropout,
    ),
    Operator(
        "attention_dropout_backward",
        schema=varlen_backward.DROPOUT_SCHEMA,
        impls={"CPU": varlen_backward.backward_by_kernels, "CUDA": varlen_backward.backward_by_kernels},
        fake=fake.dropout_backward,
        flops=flops.dropout_backward_flops,
        counts_raw=True,
        vmap=autograd.dropout_backward.vmap,
        gradient=autograd.raise_double_backward,
    ),
    Operator(
        "_attention_dropout_backward", fake=fake.dropout_kernels, flops=flops.dropout_backward_flops, counts_raw=True
    ),
    Operator(
        "attention_bias_gradient",
        schema=bias_gradient.SCHEMA,
        impls={"CPU": bias_gradient.bias_gradient, "CUDA": bias_gradient.bias_gradient},
        fake=fake.bias_gradient,
        flops=flops.bias_gradient_flops,
        counts_raw=True,
        vmap=autograd.bias_gradient.vmap,
        gradient=autograd.raise_double_backward,
    ),
    Operator("_attention_bias_gradient", fake=fake.bias_kernels, flops=flops.bias_kernels_flops, counts_raw=True),
    Operator(
        "attention_e4m3_forward",
        fake=fake.e4m3_forward,
        flops=flops.prefix_flops,
        counts_raw=True,
        vmap=refusals.raise_no_vmap,
        gradient=refusals.raise_no_gradient,
    ),
    Operator(
        "_attention_e4m3_inference",
        fake=fake.e4m3_inference,
        flops=flops.prefix_flops,
        counts_raw=True,
        vmap=refusals.raise_no_vmap,
    ),
    Operator(
        "_attention_e4m3_out",
        fake=fake.e4m3_out,
        flops=flops.out_flops,
        counts_raw=True,
        vmap=refusals.raise_no_vmap_out,
    ),
    Operator(
        "attention_fp8_forward",
        fake=fake.fp8_forward,
        flops=flops.forward_flops,
        vmap=refusals.raise_no_vmap,
        gradient=refusals.raise_no_gradient,
    ),
    Operator(
        "attention_fp8_varlen_forward",
        fake=fake.fp8_varlen_forward,
        flops=flops.fp8_varlen_flops,
        vmap=refusals.raise_no_vmap,
        gradient=refusals.raise_no_gradient,
    ),
    Operator("attention_append_e4m3_", fake=fake.e4m3_append, flops=lambda *_, **__: 0, vmap=raise_no_vmap_append),
    Operator("_attention_merge", fake=lambda *_: None, flops=lambda *_, **__: 0),
    Operator("attention_append_", fake=fake.append, flops=lambda *_, **__: 0, vmap=raise_no_vmap_append),
)
