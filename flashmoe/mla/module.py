"""Multi-head latent attention as an ``nn.Module``: projections around :func:`flashmoe.mla_decode` and :func:`flashmoe.attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmoe.attn.api import attention
from flashmoe.attn.arguments import DTYPES, MAX_GPU_OPTIONS_HEAD_DIM
from flashmoe.attn.kvcache import append_checked, attention_with_kvcache
from flashmoe.attn.merge import merge_attention
from flashmoe.checks import check_flag, check_input_dtype, check_parameter_dtype, check_size, shape_of
from flashmoe.compat.rotary import rotate
from flashmoe.errors import ArgumentError, ArgumentTypeError, DifferentiationError, DtypeError, ShapeError
from flashmoe.mla.api import VALUE_DIM, mla_decode

LATENT_DIM, ROTARY_DIM = VALUE_DIM, 64
WIDTH = LATENT_DIM + ROTARY_DIM
APPENDED = (384, 192)  # columns that are passed as "keys" and as "values" to the append operator
# With a cache, up to this many new tokens use the absorbed form (queries projected into the latent space). Expanding a key costs
# 2 x 512 x 256 operations per head; absorbed scores over 1088 columns instead of 320 cost more than that from 170 tokens on.
MOST_ABSORBED = 128


class MLA(nn.Module):
    """Multi-head latent attention of DeepSeek-V2 and its successors, causal: a cache holds 512 + 64 values per token.

    Args:
        dim: size of the last dimension of the input and of the output.
        heads: at most 128.
        q_rank: size of a first projection of the queries, followed by a norm; None: queries are projected in one step.
        nope_dim: columns of a head's queries and keys without position; 64 rotary columns are added to them.
        value_dim: columns of a head's values.
        rope_theta: base of the rotary frequencies.
        frequencies: [32], instead of those from rope_theta, for example YaRN's.
        interleaved: whether rotary pairs are columns 2c and 2c + 1, as in DeepSeek's checkpoints, or c and c + 32.
        scale: multiplies the scores; (nope_dim + 64) ** -0.5 by default; with YaRN, include its factor.
        eps: epsilon of the norms.
        bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
        device, dtype: of the parameters. On a GPU use float16 or bfloat16.

    Parameters have DeepSeek's names: q_proj, or q_a_proj, q_a_layernorm and q_b_proj; kv_a_proj_with_mqa [576, dim], kv_a_layernorm,
    kv_b_proj [heads * (nope_dim + value_dim), 512], o_proj [dim, heads * value_dim].

    Raises ArgumentError for sizes that do not fit together, ArgumentTypeError for a size that is not an integer or a flag that is not a
    bool, DtypeError for a dtype without kernels. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
    """

    _frequency_bits: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        q_rank: int | None = None,
        nope_dim: int = 128,
        value_dim: int = 128,
        rope_theta: float = 10000.0,
        frequencies: Tensor | None = None,
        interleaved: bool = True,
        scale: float | None = None,
        eps: float = 1e-6,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads = check_size("dim", dim), check_size("heads", heads)
        self.nope_dim, self.value_dim = check_size("nope_dim", nope_dim), check_size("value_dim", value_dim)
        for name, size, most in (
            ("heads", heads, 128),
            ("nope_dim", nope_dim, MAX_GPU_OPTIONS_HEAD_DIM - ROTARY_DIM),
            ("value_dim", value_dim, MAX_GPU_OPTIONS_HEAD_DIM),
        ):
            if size > most:
                msg = f"{name} is {size}; supported: 1 to {most}; split the heads over several layers"
                raise ArgumentError(msg)
        for name, flag in (("interleaved", interleaved), ("bias", bias)):
            check_flag(name, flag)
        check_parameter_dtype(dtype, DTYPES["cpu"])
        self.interleaved = interleaved
        self.scale = float(nope_dim + ROTARY_DIM) ** -0.5 if scale is None else float(scale)
        if frequencies is None:
            frequencies = rope_theta ** (-torch.arange(0, ROTARY_DIM, 2, dtype=torch.float64) / ROTARY_DIM)
        if tuple(frequencies.shape) != (ROTARY_DIM // 2,):
            msg = f"frequencies must be [{ROTARY_DIM // 2}]; found {shape_of(frequencies)}; pass one per rotary pair"
            raise ShapeError(msg)
        # stored as integers, which .to(dtype) leaves unchanged
        bits = frequencies.to(device, torch.float32).view(torch.int32)
        self.register_buffer("_frequency_bits", bits, persistent=False)
        given: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = heads * (nope_dim + ROTARY_DIM)
        if q_rank is None:
            self.q_proj = nn.Linear(dim, inner, bias=False, **given)
        else:
            self.q_a_proj = nn.Linear(dim, check_size("q_rank", q_rank), bias=bias, **given)
            self.q_a_layernorm = nn.RMSNorm(q_rank, eps=eps, **given)
            self.q_b_proj = nn.Linear(q_rank, inner, bias=False, **given)
        self.q_rank = q_rank
        self.kv_a_proj_with_mqa = nn.Linear(dim, WIDTH, bias=bias, **given)
        self.kv_a_layernorm = nn.RMSNorm(LATENT_DIM, eps=eps, **given)
        self.kv_b_proj = nn.Linear(LATENT_DIM, heads * (nope_dim + value_dim), bias=False, **given)
        self.o_proj = nn.Linear(heads * value_dim, dim, bias=bias, **given)

    def forward(
        self,
        x: Tensor,
        cache: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        *,
        block_table: Tensor | None = None,
        absorbed: bool | None = None,
    ) -> Tensor:
        """Attend from each token of ``x`` [B, S, dim] to itself and the tokens before it; returns [B, S, dim].

        Without a cache, only to the tokens of x. With a cache, for inference, x's latents are first appended to it after the cache_seqlens[b]
        keys of sequence b (cache_seqlens is not modified), and attention covers all of them.

        Args:
            cache: [B, Smax, 576], or pages [P, page_size, 576] with block_table; of x's dtype.
            cache_seqlens: [B] int32.
            block_table: [B, pages] int32, as in :func:`flashmoe.mla_decode`.
            absorbed: True: queries are projected into the latent space, for inference; False: keys and values of every head are computed from
                the latents, which reads cache_seqlens on the host. Both agree up to rounding. None: absorbed with a cache and up to 128 tokens.

        Raises ShapeError, DtypeError, ArgumentError, ArgumentTypeError, and the errors of mla_decode and attention; DifferentiationError for a
        gradient with a cache or in the absorbed form.
        """
        self._check(x, cache, cache_seqlens)
        batch, tokens, _ = x.shape
        positions = torch.arange(tokens, device=x.device).expand(batch, tokens)
        if cache_seqlens is not None:
            positions = positions + cache_seqlens[:, None]
        q, latents = self._project(x, positions)
        if cache is not None and cache_seqlens is not None:
            _append(cache, latents, cache_seqlens, block_table)
        if absorbed if absorbed is not None else cache is not None and tokens <= MOST_ABSORBED:
            out = self._attend_absorbed(q, latents, cache, cache_seqlens, block_table)
        else:
            out = self._attend_expanded(q, latents, cache, cache_seqlens, block_table)
        projected: Tensor = self.o_proj(out.flatten(2))
        return projected

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, S, H, nope_dim + 64] and latents [B, S, 576], both with their rotary columns rotated."""
        queries = self.q_proj(x) if self.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, key = self.kv_a_proj_with_mqa(x).split((LATENT_DIM, ROTARY_DIM), -1)
        free, query = queries.unflatten(2, (self.heads, -1)).split((self.nope_dim, ROTARY_DIM), -1)
        angles = positions.reshape(-1, 1) * self._frequency_bits.view(torch.float32)
        rows = torch.arange(len(angles), device=x.device).view(positions.shape)
        query, key = (
            rotate(one, angles.cos(), angles.sin(), rows, self.interleaved) for one in (query, key.unsqueeze(2))
        )
        return torch.cat((free, query), -1), torch.cat((self.kv_a_layernorm(latent), key.squeeze(2)), -1)

    def _attend_absorbed(
        self, q: Tensor, latents: Tensor, cache: Tensor | None, cache_seqlens: Tensor | None, block_table: Tensor | None
    ) -> Tensor:
        """[B, S, H, value_dim], computed on the latents (absorbed form)."""
        to_keys, to_values = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split(
            (self.nope_dim, self.value_dim), 1
        )
        free, rotary = q.split((self.nope_dim, ROTARY_DIM), -1)
        absorbed = torch.cat((torch.einsum("bshn,hnc->bshc", free, to_keys), rotary), -1)
        lengths = latents.new_full(latents.shape[:1], latents.shape[1], dtype=torch.int32)
        if cache is None or cache_seqlens is None:
            out = mla_decode(absorbed, latents, cache_seqlens=lengths, scale=self.scale)
        else:
            out = mla_decode(
                absorbed, cache, cache_seqlens=cache_seqlens + lengths, block_table=block_table, scale=self.scale
            )
        return torch.einsum("bshc,hvc->bshv", out, to_values)

    def _attend_expanded(
        self, q: Tensor, latents: Tensor, cache: Tensor | None, cache_seqlens: Tensor | None, block_table: Tensor | None
    ) -> Tensor:
        """[B, S, H, value_dim], from each head's keys and values: attention over x merged with attention over the cache's earlier keys."""
        queries = q.transpose(1, 2)
        longest = 0 if cache_seqlens is None or cache_seqlens.numel() == 0 else int(cache_seqlens.max())
        if cache is None or cache_seqlens is None or longest == 0:
            return attention(queries, *self._expand(latents), causal=True, scale=self.scale).transpose(1, 2)
        new = attention(queries, *self._expand(latents), causal=True, scale=self.scale, return_lse=True)
        if block_table is not None:
            pages = block_table[:, : -(-longest // cache.shape[1])]
            used = torch.arange(pages.shape[1], device=pages.device) * cache.shape[1] < cache_seqlens[:, None]
            cache = cache[torch.where(used, pages, 0).long()].flatten(1, 2)
        keys, values = self._expand(cache[:, :longest])
        old = attention_with_kvcache(
            queries, keys, values, cache_seqlens=cache_seqlens, scale=self.scale, return_lse=True
        )
        return merge_attention(*old, *new)[0].transpose(1, 2)

    def _expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, S, nope_dim + 64] and values [B, H, S, value_dim] of latents [B, S, 576]."""
        latent, rotary = latents.split((LATENT_DIM, ROTARY_DIM), -1)
        free, values = self.kv_b_proj(latent).unflatten(2, (self.heads, -1)).split((self.nope_dim, self.value_dim), -1)
        keys = torch.cat((free, rotary.unsqueeze(2).expand(*free.shape[:3], ROTARY_DIM)), -1)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _check(self, x: Tensor, cache: Tensor | None, cache_seqlens: Tensor | None) -> None:
        if not isinstance(x, Tensor):
            msg = f"x must be a torch.Tensor [batch, tokens, {self.dim}]; found {type(x).__name__}"
            raise ArgumentTypeError(msg)
        if x.dim() != 3 or x.shape[2] != self.dim:
            msg = f"x must be [batch, tokens, {self.dim}]; found {shape_of(x)}; reshape it, or create the layer with another dim"
            raise ShapeError(msg)
        check_input_dtype("x", x, self.o_proj.weight)
        if (cache is None) != (cache_seqlens is None):
            msg = "cache and cache_seqlens belong together; one of them is None"
            raise ArgumentError(msg)
        if cache is None or cache_seqlens is None:
            return
        if cache.dim() != 3 or cache.shape[2] != WIDTH:
            msg = f"cache must be [batch, keys, {WIDTH}] or [pages, page_size, {WIDTH}]; found {shape_of(cache)}; allocate it with that shape"
            raise ShapeError(msg)
        if cache.dtype != self.o_proj.weight.dtype:
            msg = f"cache is {cache.dtype} and the layer's parameters {self.o_proj.weight.dtype}; allocate it in that dtype"
            raise DtypeError(msg)
        if torch.is_grad_enabled() and (x.requires_grad or self.o_proj.weight.requires_grad):
            msg = "a cache is for inference, but gradients are enabled; call it under torch.no_grad(), or train without a cache"
            raise DifferentiationError(msg)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, q_rank={self.q_rank}, nope_dim={self.nope_dim}, value_dim={self.value_dim}"


def _append(cache: Tensor, latents: Tensor, cache_seqlens: Tensor, block_table: Tensor | None) -> None:
    """Write latents [B, S, 576] after the first cache_seqlens keys, in place, as three heads of 128 columns and three of 64."""
    columns = [tensor.split(APPENDED, -1) for tensor in (cache, latents)]
    (k, v), (k_new, v_new) = ([part.unflatten(2, (3, -1)) for part in parts] for parts in columns)
    if block_table is None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    append_checked(k, v, k_new.transpose(1, 2), v_new.transpose(1, 2), cache_seqlens, block_table)
