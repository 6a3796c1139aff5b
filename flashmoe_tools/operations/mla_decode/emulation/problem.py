"""Decoding problems for the emulated machine: tensors, fp64 reference and the parameters of a launch."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES, UNIT_ROUNDOFF, worst_element
from flashmoe_build.emulation.runner import NamedProblem, output, preceding
from flashmoe_tools.operations.attention.emulation.problem import lse_bound
from flashmoe_tools.operations.mla_decode.codes import NAN_CODE, SCALE_COLUMNS, SCALES, dequantize, make_coded
from flashmoe_tools.operations.mla_decode.emulation.plan import LANES, Segment, segments
from flashmoe_tools.operations.mla_decode.problem import HEAD_DIM, KEY_BYTES, LATENT_DIM
from flashmoe_tools.operations.mla_decode.reference import attend
from flashmoe_tools.operations.serving.emulation.reference import EXPONENT_UNIT
from flashmoe_tools.operations.serving.emulation.tensors import GARBAGE_PAGE

NAN = float("nan")
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class MlaProblem(NamedProblem):
    """A batch of sequences with ``keys[b]`` keys and ``tokens`` query tokens of ``heads`` heads each."""

    dtype: str
    keys: tuple[int, ...]
    heads: int
    tokens: int = 1
    page_size: int = 16  # 0: a dense cache
    is_causal: bool = True
    has_sinks: bool = False
    wants_lse: bool = True
    num_splits: int = 32
    parts: int = 7
    least_share: int = 1
    warps_per_sum: int = 1
    sum_pieces: int = 2
    magnitude: float = 1.0  # of q
    has_codes: bool = False  # a cache of 8-bit floats
    spare: int = 0  # bytes, or elements, between its keys
    topk: int = 0  # indices per sequence, of which keys[b] name keys; 0: no indices, a sequence sees its own keys
    data_seed: int = 0

    @property
    def rows(self) -> int:
        return self.tokens * self.heads


@dataclass(frozen=True)
class Tensors:
    """The tensors of a problem; NaN wherever no row sees a key, and in the results."""

    problem: MlaProblem
    q: torch.Tensor  # [batch, tokens, heads, 576]
    cache: torch.Tensor  # [pages, page size, 576], or 656 bytes
    table: torch.Tensor | None
    keys: tuple[torch.Tensor, ...]  # per sequence, [keys, 576]; from codes: multiplied by their scales
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    indices: torch.Tensor | None = None  # [batch, topk]

    @cached_property
    def expected(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(out [tokens, heads, 512], lse [heads, tokens], bound of the error of out) of each sequence, in fp64."""
        p = self.problem
        found = []
        for q, keys in zip(self.q, self.keys, strict=True):
            out, lse, weights = attend(
                q.double(), keys.double(), HEAD_DIM**-0.5, is_causal=p.is_causal, sinks=self.sinks
            )
            spread = weights @ keys[:, :LATENT_DIM].double().abs() if len(keys) else torch.zeros_like(out)
            scores = (q.double() @ keys.double().mT).abs().amax(-1) if len(keys) else torch.zeros(q.shape[:2])
            unit = UNIT_ROUNDOFF[p.dtype]
            exponent = EXPONENT_UNIT * scores[..., None] * HEAD_DIM**-0.5
            small = len(keys) * 2.0**-25 * float(keys.abs().max()) if p.dtype == "f16" and len(keys) else 0.0
            found.append((out, lse, (unit + 2e-5 + exponent) * spread + unit * out.abs() + 1e-6 + small))
        return found

    def disagreements(self) -> list[str]:
        wrong: list[str] = []
        for index, (out, lse, bound) in enumerate(self.expected):
            wrong += worst_element(f"out of sequence {index}", self.out[index], out, bound)
            if self.problem.wants_lse:
                wrong += worst_element(f"lse of sequence {index}", self.lse[index], lse, lse_bound(lse))
        return wrong


def _coded(latents: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[keys, 656] of latents [keys, 576], with some subnormal codes.

    Scales are powers of two, up to 16 times apart within a key.
    """
    factors = 2.0 ** torch.randint(-2, 3, (len(latents), SCALES), generator=generator).float()
    spread = torch.cat([factors.repeat_interleave(SCALE_COLUMNS, -1), torch.ones(len(latents), 64)], -1)
    return make_coded((latents.float() * spread).to(latents.dtype))


def build(p: MlaProblem) -> Tensors:
    """Fresh random tensors, the same for the same problem."""
    generator = torch.Generator().manual_seed(p.data_seed * 7919 + 31)
    dtype, batch = DTYPES[p.dtype], len(p.keys)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    q = (normal(batch, p.tokens, p.heads, HEAD_DIM) * p.magnitude + 0.25).to(dtype)
    keys = tuple((normal(length, HEAD_DIM) + 0.25).to(dtype) for length in p.keys)
    stored: tuple[torch.Tensor, ...] = keys
    if p.has_codes:
        stored = tuple(_coded(values, generator) for values in keys)
        keys = tuple(dequantize(own, dtype) for own in stored)
    width, empty = (KEY_BYTES, NAN_CODE) if p.has_codes else (HEAD_DIM, NAN)
    kind = torch.uint8 if p.has_codes else dtype
    table = None
    if p.page_size == 0:
        cache = torch.full((batch, max(p.keys) + 3, width + p.spare), empty, dtype=kind)[..., :width]
        for own, values in zip(cache, stored, strict=True):
            own[: len(values)] = values
    else:
        counts = [-(-length // p.page_size) for length in p.keys]
        order = torch.randperm(sum(counts) + 2, generator=generator).to(torch.int32)
        cache = torch.full((len(order), p.page_size, width + p.spare), empty, dtype=kind)[..., :width]
        table = torch.full((batch, max(counts) + 1), GARBAGE_PAGE, dtype=torch.int32)
        table[1::2] = -1
        used = 0
        for sequence, (count, values) in enumerate(zip(counts, stored, strict=True)):
            table[sequence, :count] = order[used : used + count]
            used += count
            for page in range(count):
                own = values[page * p.page_size : (page + 1) * p.page_size]
                cache[int(table[sequence, page]), : len(own)] = own
    sinks = normal(p.heads) * 2 if p.has_sinks else None
    out = torch.full((batch, p.tokens, p.heads, LATENT_DIM), NAN, dtype=dtype)
    lse = torch.full((batch, p.heads, p.tokens), NAN)
    tensors = Tensors(p, q, cache, table, keys, sinks, out, lse)
    return name_keys(tensors, generator) if p.topk else tensors


def name_keys(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """Adds indices at random places for each sequence's keys; the last key repeats the first.

    All other indices are -1 or rows of no page. The sequences are the tokens of a single sequence, so lse [1, heads,
    batch] has that order in memory.
    """
    p, size = tensors.problem, tensors.cache.shape[1]
    slots = tensors.cache.shape[0] * size
    indices = torch.full((len(p.keys), p.topk), -1, dtype=torch.int32)
    indices[:, 1::3], indices[:, 2::7] = slots, -(2**31)
    keys = []
    for sequence, own in enumerate(tensors.keys):
        count = len(own)
        places = torch.randperm(p.topk, generator=generator)[:count].sort().values
        of_keys = torch.arange(count)
        if count:
            own = torch.cat([own[:-1], own[:1]])
            of_keys[-1] = 0
        keys.append(own)
        pages = torch.full_like(of_keys, sequence)
        if tensors.table is not None:
            pages = tensors.table[sequence, of_keys // size].long()
        indices[sequence, places] = (pages * size + of_keys % size).to(torch.int32)
    lse = torch.full((1, p.heads, len(p.keys)), NAN).permute(2, 1, 0)
    return replace(tensors, keys=tuple(keys), indices=indices, lse=lse)


def plan(p: MlaProblem, block_n: int) -> list[Segment]:
    counts = (p.topk,) * len(p.keys) if p.topk else p.keys
    return list(segments(counts, block_n, p.parts, p.least_share, p.num_splits))


def values_of(tensors: Tensors, block_m: int, block_n: int, partial: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The parameters of a decoding kernel and of the kernel that combines its partial results."""
    p, cache, indices = tensors.problem, tensors.cache, tensors.indices
    table = tensors.table if indices is None else None
    return {
        "q": preceding(tensors.q),
        "cache": preceding(cache),
        "out": output(tensors.out),
        "lse": output(tensors.lse) if p.wants_lse else None,
        "cache_seqlens": preceding(torch.tensor(p.keys, dtype=torch.int32)) if indices is None else None,
        "indices": preceding(indices),
        "block_table": preceding(table),
        "block_table_stride": 0 if table is None else table.stride(0),
        "sinks": tensors.sinks,
        **{name: output(tensor) for name, tensor in partial.items()},
        "q_stride_batch": tensors.q.stride(0),
        "q_stride_row": tensors.q.stride(2),
        "page_stride": cache.stride(0),
        "key_stride": cache.stride(1),
        "batch": len(p.keys),
        "tokens": p.tokens,
        "heads": p.heads,
        "batches_per_sequence": 1 if indices is None else len(p.keys),
        "max_keys": p.topk or (cache.shape[1] if table is None else table.shape[1] * p.page_size),
        "page_size": cache.shape[1],
        "num_pages": cache.shape[0],
        "num_slots": cache.shape[0] * cache.shape[1],
        "box_rows": block_n if table is None else min(block_n, cache.shape[1] & -cache.shape[1]),
        "is_causal": int(p.is_causal),
        "is_fp8": int(p.has_codes),
        "block_m": block_m,
        "row_tiles": -(-p.rows // block_m),
        "block_n_log2": block_n.bit_length() - 1,
        "num_sm_parts": len(p.keys) if p.num_splits == 1 else p.parts,
        "parts_per_sequence": p.parts // len(p.keys) if len(p.keys) <= LANES and p.num_splits != 1 else 0,
        "min_blocks_per_part": p.least_share,
        "num_splits": p.num_splits,
        "warps_per_sum": p.warps_per_sum,
        "tile_pairs_per_warp": p.sum_pieces,
        "scale_log2": HEAD_DIM**-0.5 * LOG2E,
    }


def partial_results(p: MlaProblem, block_m: int) -> dict[str, torch.Tensor]:
    """Memory for partial results: columns in tiles of 8 x 8; exponents and sums by rows."""
    slots = (2 * p.parts, -(-p.rows // block_m))
    tiles = torch.full((*slots, block_m // 8, LATENT_DIM // 8, 8, 8), NAN)
    return {"out_partial": tiles, "state_partial": torch.full((*slots, block_m, 2), NAN)}


def rows_of(tiles: torch.Tensor) -> torch.Tensor:
    """A view of partial columns [..., R / 8, 64, 8, 8] by rows: [..., R / 8, 8, 64, 8]."""
    return tiles.transpose(-3, -2)
