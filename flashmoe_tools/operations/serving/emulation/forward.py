"""The forward kernels of ragged and paged attention on the emulated machine, and what decoding shares with them."""

import math
from dataclasses import replace
from typing import Any

import torch

from flashmoe_build.emulation.compare import touched, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, counter, output, preceding
from flashmoe_tools.operations.attention import philox
from flashmoe_tools.operations.attention.emulation import recurrence
from flashmoe_tools.operations.attention.emulation.forward import merge
from flashmoe_tools.operations.attention.emulation.merge import FAR
from flashmoe_tools.operations.attention.emulation.problem import lse_bound
from flashmoe_tools.operations.attention.reference import ScoreOptions
from flashmoe_tools.operations.serving.emulation import bool_mask
from flashmoe_tools.operations.serving.emulation.cases import MASK, chunks, problems, value_parts
from flashmoe_tools.operations.serving.emulation.problem import (
    LOG2E,
    SPARE_ROWS,
    UNBOUNDED,
    Keys,
    MaskTensor,
    Rows,
    VarlenProblem,
)
from flashmoe_tools.operations.serving.emulation.reference import reference
from flashmoe_tools.operations.serving.emulation.tensors import MASK_BLOCK, NAN, Tensors, build
from flashmoe_tools.tables import Unit


def strides(p: VarlenProblem, tensor: torch.Tensor, *, is_query: bool) -> dict[str, int]:
    """Strides of (batch, head, row). Ragged: batch is 0. Paged: batch is the page stride. Folded heads are rows."""
    stride = tensor.stride()
    if tensor.dim() == 3:
        batch, head, row = 0, stride[1], stride[0]
    elif is_query or p.keys_layout is Keys.DENSE:
        batch, head, row = stride[0], stride[1], stride[2]
    else:
        batch, head, row = stride[0], stride[2], stride[1]
    if is_query and p.is_folded:
        head, row = head * p.group, head
    return {"batch": batch, "head": head, "row": row}


def score_options(p: VarlenProblem, tensors: Tensors) -> dict[str, Any]:
    """The members of the score options."""
    mask: torch.Tensor | Buffer | None = tensors.mask
    batch, head, row, key = (0, 0, 0, 0) if tensors.mask is None else (*tensors.mask.stride(), 0, 0)[:4]
    if p.mask is MaskTensor.ALIBI and tensors.mask is not None:  # slopes so far apart that offsets exceed 32 bits
        own = tensors.mask[:1] if p.mask_broadcast[0] else tensors.mask
        mask, head = Buffer(own[..., None].contiguous(), row_stride=FAR), FAR
        batch = 0 if p.mask_broadcast[0] else FAR * p.heads_q
    if p.is_folded:
        head, row = head * p.group, head
    factors = (p.scale / p.softcap, 1.0 / p.softcap) if p.softcap > 0 else (0.0, 1.0 / p.scale)
    return {
        "left": p.left,
        "right": p.right,
        "score_factor": factors[0],
        "mask_factor": factors[1],
        "sinks": tensors.sinks,
        "mask": mask,
        "mask_stride_batch": batch,
        "mask_stride_head": head,
        "mask_stride_row": row,
        "mask_stride_key": key,
        "mask_type": list(MaskTensor).index(p.mask),
        "folded_heads": p.group if p.is_folded or p.is_decoding else 1,
    }


def sequences(p: VarlenProblem, tensors: Tensors) -> dict[str, Any]:
    """The members that locate the sequences of the batch."""
    found: dict[str, Any] = {
        "cu_seqlens_q": tensors.cu_seqlens_q,
        "cu_seqlens_k": tensors.cu_seqlens_k,
        "seqused_k": tensors.seqused_k,
        "rows_total": tensors.q.shape[0] if p.rows_layout is Rows.RAGGED else 0,
        "keys_total": tensors.k.shape[0] if p.keys_layout is Keys.RAGGED else 0,
    }
    if tensors.block_table is not None:
        found["block_table"] = tensors.block_table
    if p.keys_layout is Keys.PAGED:
        found |= {"page_size": p.page_size, "num_pages": tensors.k.shape[0]}
    return found


def sizes(p: VarlenProblem, tensors: Tensors) -> dict[str, Any]:
    """The members that forward and backward parameters share."""
    return {
        "batch": len(p.rows),
        "heads_q": p.heads_kv if p.is_folded else p.heads_q,
        "heads_kv": p.heads_kv,
        "seq_q": p.max_rows,
        "seq_k": p.max_keys,
        "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v,
        "scale": p.scale,
        "scale_log2": (p.softcap if p.softcap > 0 else p.scale) * LOG2E,
        "sequences": sequences(p, tensors),
        "score_options": score_options(p, tensors),
    }


def values_of(p: VarlenProblem, tensors: Tensors, lse: torch.Tensor, **more: Any) -> dict[str, Any]:
    """The parameters of a forward or decoding kernel."""
    named = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "out": tensors.out}
    return {
        **sizes(p, tensors),
        **named,
        **{f"{name}_stride": strides(p, t, is_query=name in ("q", "out")) for name, t in named.items()},
        "out": output(tensors.out),
        "lse": output(lse) if p.wants_lse else None,
        "num_splits": p.num_splits,
        "is_consistent": p.is_consistent,
        "hints": 0,  # does not affect any bits
        **more,
    }


def all_preceding(values: dict[str, Any]) -> dict[str, Any]:
    """The same, with every tensor that is read written by the preceding grid."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found[name] = all_preceding(value)
        else:
            found[name] = preceding(value) if isinstance(value, torch.Tensor) else value
    return found


def with_dropout(p: VarlenProblem, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a dropout kernel: those without dropout under ``name``, and its own."""
    if p.dropout_p == 0:
        return values
    own = {
        "rng_state": torch.tensor(p.rng_state),
        "threshold": philox.threshold(p.dropout_p),
        "scale": 1.0 / (1.0 - p.dropout_p),
    }
    return {name: values, "dropout": own}


def row_blocks(p: VarlenProblem, block_m: int) -> int:
    """Upper bound of the row blocks of a head, which the host computes without reading lengths."""
    of_longest = math.ceil(p.max_rows / block_m) * len(p.rows)
    if p.rows_layout is Rows.DENSE:
        return of_longest
    return min(math.ceil((sum(p.rows) + 2 * SPARE_ROWS) / block_m) + len(p.rows), of_longest)


def with_loadable_mask(tensors: Tensors, p: VarlenProblem) -> Tensors:
    """Aligns the mask's rows to 16 bytes, as a tensor map needs; the padding is NaN."""
    assert tensors.mask is not None
    own = tensors.mask[: 1 if p.mask_broadcast[0] else None, : 1 if p.mask_broadcast[1] else None]
    padded = torch.nn.functional.pad(own, (0, -own.shape[-1] % 8), value=NAN)
    return replace(tensors, mask=padded[..., : own.shape[-1]].expand(len(p.rows), p.heads_q, -1, -1))


def with_visible_blocks(unit: Unit, p: VarlenProblem, tensors: Tensors, values: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a kernel that streams a mask. Mask, keys and values are NaN in blocks that no tile's rows need."""
    visible = None
    if p.hides_blocks:
        own = bool_mask.own_matrices(p, tensors)
        visible = bool_mask.visible_blocks(own.isfinite())
        read = _read_blocks(p, visible, unit.row.block_m)
        given = replace(tensors, mask=bool_mask.poisoned(own, read))
        values = {**values, "score_options": score_options(p, with_loadable_mask(given, p))}
        every = read.any(2).expand(len(p.rows), p.heads_q, -1).unflatten(1, (p.heads_kv, p.group)).any(2)
        keys = every.repeat_interleave(MASK_BLOCK, 2)[:, :, : p.max_keys, None]
        values |= {name: values[name].masked_fill(~keys, NAN) for name in ("k", "v")}
    return {"forward": values, "visible": bool_mask.blocks_member(visible)}


def _read_blocks(p: VarlenProblem, visible: torch.Tensor, block_m: int) -> torch.Tensor:
    """The key blocks that a tile's rows may read: [batch or 1, heads or 1, row blocks, key blocks].

    From the first to the last that both the mask and the window show; one of the window's if there is none.
    """
    left, right = (-1 if side == UNBOUNDED else side for side in (p.left, p.right))
    hidden = ScoreOptions(window=(left, right)).hidden(p.max_rows, p.max_keys, visible.device)
    seen = torch.ones(p.max_rows, p.max_keys, dtype=torch.bool) if hidden is None else ~hidden
    of_window = bool_mask.visible_blocks(seen).expand_as(visible)
    read = torch.zeros_like(visible)
    step = block_m // MASK_BLOCK
    for tile, window, found in zip(*(blocks.split(step, 2) for blocks in (visible, of_window, read)), strict=True):
        shown, inside = (bool_mask.hull(blocks.any(2, keepdim=True)) for blocks in (tile, window))
        both = shown & inside
        # Of a tile that sees nothing: the window's first block if the mask shows only blocks before it, else its last.
        place = torch.arange(both.shape[-1])
        is_before = shown.any(-1, keepdim=True) & ~(shown & (place >= _first(inside))).any(-1, keepdim=True)
        single = torch.where(is_before, place == _first(inside), place == both.shape[-1] - 1 - _first(inside.flip(-1)))
        found |= both | (single & ~both.any(-1, keepdim=True))
    return read


def _first(blocks: torch.Tensor) -> torch.Tensor:
    """Index of the first set block [..., 1]; each row has one."""
    return blocks.int().argmax(-1, keepdim=True)


def trial(unit: Unit, problem: VarlenProblem) -> Trial:
    tensors = build(problem)
    return trial_on(unit, problem, with_loadable_mask(tensors, problem) if unit.row.operation == MASK else tensors)


def trial_on(unit: Unit, p: VarlenProblem, tensors: Tensors) -> Trial:
    """Runs on tensors that the caller may have changed."""
    lse = torch.full(tensors.statistics(p), NAN)
    partial = {
        "out_partial": torch.full((p.splits, lse.numel(), p.head_dim_v), NAN),
        "lse_partial": torch.full((p.splits, lse.numel()), NAN),
    }
    more = {name: output(tensor) for name, tensor in partial.items()} if p.splits > 1 else {}
    values = values_of(p, tensors, lse, **more, tile_counter=counter() if p.has_counter else None)

    if unit.row.operation == MASK:
        values = with_visible_blocks(unit, p, tensors, values)
    is_chunk = unit.row.operation.startswith("attention_chunk_forward")
    if is_chunk:  # a dependent launch
        values = all_preceding(values)

    def check() -> list[str]:
        found: list[str] = []
        if p.splits > 1:
            # A split that the plan does not use writes nothing; its NaN counts as -inf. Only split 0 includes the sink.
            unused = torch.isnan(partial["lse_partial"])
            if is_chunk:  # attention_combine reads all of its splits
                own = tensors.of_statistic(p, partial["lse_partial"].view(p.splits, *lse.shape).sum(0))
                found = [
                    f"a share of sequence {index} is not there" for index, rows in enumerate(own) if rows.isnan().any()
                ]
            if is_chunk:  # the output of a split without keys is not read
                unused |= partial["lse_partial"].isneginf()
            whole = merge(
                partial["out_partial"].masked_fill(unused[..., None], 0.0),
                partial["lse_partial"].masked_fill(unused, -torch.inf),
            )
            lse.copy_(whole["lse"].view_as(lse))
            out = whole["out"].view(*lse.shape, p.head_dim_v)
            tensors.out.copy_(out.transpose(0, 1) if p.rows_layout is Rows.RAGGED else out)
        return found + disagreements(p, tensors, lse) + (other_bits(unit, p, tensors, lse) if p.is_exact else [])

    heads, rows = (p.heads_kv if p.is_folded else p.heads_q), unit.row.block_m
    if is_chunk:
        heads, rows = p.heads_kv, rows >> (p.group - 1).bit_length()
    tiles = row_blocks(p, rows) * heads * p.splits * value_parts(unit)
    return Trial([Launch(with_dropout(p, "forward", values), tiles)], check, {"out": tensors.out, "lse": lse})


def other_bits(unit: Unit, p: VarlenProblem, tensors: Tensors, lse: torch.Tensor) -> list[str]:
    """For an exact problem: where the kernel's bits differ from the recurrence."""
    found = []
    left, right = (-1 if side == UNBOUNDED else side for side in (p.left, p.right))
    views = zip(tensors.sequences, tensors.of_rows(p, tensors.out), tensors.of_statistic(p, lse), strict=True)
    for sequence, ((q, k, _), out, own_lse) in enumerate(views):
        hidden = ScoreOptions(window=(left, right)).hidden(q.shape[1], k.shape[1], q.device)
        for head in range(p.heads_q):
            scores = q[head].float() @ k[head // p.group].float().T
            found += recurrence.disagreements(
                f" of sequence {sequence}, head {head}",
                out[head],
                own_lse[head],
                scores if hidden is None else scores.masked_fill(hidden, -torch.inf),
                width=unit.row.block_n,
                scale_log2=p.scale * LOG2E,
                sinks=None if tensors.sinks is None else tensors.sinks[head].expand(q.shape[1]),
            )
    return found


def disagreements(p: VarlenProblem, tensors: Tensors, lse: torch.Tensor) -> list[str]:
    """What is wrong with a kernel's results; empty if nothing is."""
    found: list[str] = []
    views = zip(tensors.of_rows(p, tensors.out), tensors.of_statistic(p, lse), strict=True)
    for sequence, (out, own_lse) in enumerate(views):
        if p.rows[sequence] == 0:
            continue
        if p.is_skipped(sequence):
            found += touched(f"the rows of sequence {sequence}, which is another kernel's", out, NAN)
            continue
        expected, expected_lse, bound = reference(p, tensors, sequence)
        found += worst_element(f"out of sequence {sequence}", out, expected, bound)
        if p.wants_lse:
            found += worst_element(f"lse of sequence {sequence}", own_lse, expected_lse, lse_bound(expected_lse))
    cu = tensors.cu_seqlens_q
    if cu is not None and p.splits == 1:
        beside = torch.cat([tensors.out[: int(cu[0])], tensors.out[int(cu[-1]) :]])
        found += touched("the rows of out that belong to a sequence", beside, NAN)
    return found


RUNNER = Runner(problems, trial)
CHUNK_RUNNER = Runner(chunks, trial)
