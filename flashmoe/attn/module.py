"""Attention as an ``nn.Module``: projections around :func:`flashmoe.attention`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state

from flashmoe.attn.api import attention
from flashmoe.attn.arguments import DTYPES, MAX_HEAD_DIM
from flashmoe.checks import check_flag, check_input_dtype, check_parameter_dtype, check_size, has_fx_proxies
from flashmoe.errors import ArgumentError, ArgumentTypeError, ShapeError


class Attention(nn.Module):
    """Multi-head attention with grouped key and value heads.

    Args:
        dim: size of the last dimension of the input and of the output.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``; by default equal to it. 1 is multi-query attention.
        causal: bottom-right aligned mask (see :func:`flashmoe.attention`).
        bias: whether the four projections have one.
        head_dim: size of a head, 1 to 512; by default dim // heads, and dim must then be a multiple of heads.
        device, dtype: of the parameters. On a GPU use float16 or bfloat16, or call under autocast.

    Parameters (names are stable): q_proj [heads * head_dim, dim], k_proj and v_proj [kv_heads * head_dim, dim],
    out_proj [dim, heads * head_dim], each ``.weight`` and, with ``bias``, ``.bias``.

    Raises ArgumentError for sizes that do not fit together, ArgumentTypeError for a size that is not an integer or a flag that is
    not a bool, DtypeError for a dtype without kernels.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = False,
        bias: bool = False,
        head_dim: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.kv_heads, self.head_dim = _sizes(dim, heads, kv_heads, head_dim)
        _check_options(causal, bias, dtype)
        self.causal = causal
        inner, inner_kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        dim = self.dim
        self.q_proj = nn.Linear(dim, inner, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(dim, inner_kv, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(dim, inner_kv, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(inner, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend from ``x`` to itself, or to ``context``.

        x [B, Sq, dim], context [B, Sk, dim]; returns [B, Sq, dim]. The heads are views of the projections and the result
        keeps their order of strides, so no tensor is transposed in memory. Raises ShapeError and the errors of attention.
        """
        source = x if context is None else context
        if not (
            has_fx_proxies(x, source) or _get_tracing_state() is not None
        ):  # a tracer would take every check of a size for a branch
            self._check_input("x", x)
            self._check_input("context", source)
        q = self.q_proj(x).unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_proj(source).unflatten(2, (self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(source).unflatten(2, (self.kv_heads, self.head_dim)).transpose(1, 2)
        out = attention(q, k, v, causal=self.causal)
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _check_input(self, name: str, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            msg = f"{name} must be a torch.Tensor [batch, length, {self.dim}]; found {type(tensor).__name__}"
            raise ArgumentTypeError(msg)
        if tensor.dim() != 3 or tensor.shape[2] != self.dim:
            msg = f"{name} must be [batch, length, {self.dim}]; found {list(tensor.shape)}; reshape it, or create the layer with another dim"
            raise ShapeError(msg)
        check_input_dtype(name, tensor, getattr(self.q_proj, "weight", None))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, causal={self.causal}"


def _check_options(causal: bool, bias: bool, dtype: torch.dtype | None) -> None:
    for name, flag in (("causal", causal), ("bias", bias)):
        check_flag(name, flag)
    check_parameter_dtype(dtype, DTYPES["cpu"])


def _sizes(dim: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int, int, int]:
    """(dim, heads, kv_heads, head_dim), checked, with defaults filled in."""
    dim, heads = check_size("dim", dim), check_size("heads", heads)
    groups = heads if kv_heads is None else check_size("kv_heads", kv_heads)
    if heads % groups:
        msg = f"heads must be a multiple of kv_heads; found {heads} and {groups}; use a divisor of {heads}"
        raise ArgumentError(msg)
    if head_dim is None and dim % heads:
        msg = f"dim must be a multiple of heads; found {dim} and {heads}; change one, or pass head_dim"
        raise ArgumentError(msg)
    size = dim // heads if head_dim is None else check_size("head_dim", head_dim)
    if size > MAX_HEAD_DIM:
        msg = f"head_dim is {size}; supported: 1 to {MAX_HEAD_DIM}; use more heads"
        raise ArgumentError(msg)
    return dim, heads, groups, size
