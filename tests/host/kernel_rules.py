"""The rules by which attention's kernels are chosen, written a second time, from the table only.

select.cpp and its neighbours are tested against them."""

import math
import random
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from flashmoe_build.compile.codegen import map_parameters
from flashmoe_tools.descriptors import KernelRow
from flashmoe_tools.tables import Target, Unit, load_tables

TABLES = load_tables()
UNITS: dict[tuple[str, str, str, str], list[Unit]] = {}
for _unit in TABLES.units():
    if _unit.row.operation.startswith("attention_"):
        UNITS.setdefault((_unit.row.operation, _unit.row.family, _unit.row.variant, _unit.dtype), []).append(_unit)
FEW_ROWS = 16


@dataclass(frozen=True)
class Kernel:
    row: KernelRow
    symbol: str
    target: str

    @property
    def head_dim(self) -> int:
        return self.row.axes["head_dim"]

    @property
    def pair(self) -> tuple[str, str]:
        return self.symbol, self.target


def _rank(target: Target, capability: int) -> tuple[bool, bool, int, bool] | None:
    """Ranks machine code for this GPU, then for an older minor version, then PTX; None if the GPU cannot load it."""
    own = 10 * target.capability[0] + target.capability[1]
    if target.is_ptx:
        loads = capability >= own
    elif target.is_arch_specific:
        loads = capability == own
    else:
        loads = capability // 10 == own // 10 and capability >= own
    return (not target.is_ptx, capability == own, own, target.is_arch_specific) if loads else None


@cache
def families(capability: int) -> tuple[str, ...]:
    known = {10 * gpu.compute_capability[0] + gpu.compute_capability[1]: gpu.families for gpu in TABLES.gpus}
    return known[max(own for own in known if own <= capability)]


@cache
def find(
    capability: int, dtype: str, operation: str, family: str, variant: str, head_dim: int, mask: str | None = None
) -> Kernel | None:
    """The kernel of the smallest head dim that holds the tensor's."""
    best: dict[tuple[int, str], tuple[Any, Kernel]] = {}
    for unit in UNITS.get((operation, family, variant, dtype), ()):
        row, rank = unit.row, _rank(unit.target, capability)
        if rank is None or row.axes["head_dim"] < head_dim:
            continue
        for words, symbol in unit.entries:
            if mask is None or words == (mask,):
                place = (row.axes["head_dim"], symbol)
                if place not in best or rank > best[place][0]:
                    best[place] = (rank, Kernel(row, symbol, unit.target.name))
    return min(best.items(), key=lambda item: item[0][0])[1][1] if best else None


def tiles(p: dict[str, Any], kernel: Kernel) -> int:
    return -(-p["seq_q"] // kernel.row.block_m) * p["heads"] * p["batch"]


def microseconds(p: dict[str, Any], kernel: Kernel, splits: int) -> float:
    cost, rows, keys, block = kernel.row.cost, p["seq_q"], p["seq_k"], kernel.row.block_m
    if not cost:
        return math.inf

    def of_tile(seen: int, own: int) -> float:
        busy = -(-own // 64) * 64 / block
        return seen / splits * cost["key"] * (0.4 + 0.6 * busy) + cost["ends"]

    last = (rows - 1) % block + 1
    first = block if rows > block else last
    items, processors = tiles(p, kernel) * splits, p["multiprocessors"]
    extra = cost["split"] + splits * cost["share"] if splits > 1 else 0.0
    rounds = -(-items // processors)
    if not p["causal"]:
        return float(rounds * of_tile(keys, first) + extra)

    def seen(to: int) -> int:
        return min(max(keys - rows + to, 1), keys)

    longest = max(of_tile(seen(rows), last), of_tile(seen(rows - last), block))
    shortest = of_tile(seen(first), first)
    mean = (seen(rows) + seen(first) + kernel.row.block_n) // 2
    filled = items * of_tile(mean, first) / processors + shortest
    return float(max(longest, min(rounds * max(longest, shortest), filled)) + extra)


def consistent_width(capability: int, dtype: str, head_dim: int, wanted: str = "") -> int:
    for family in families(capability):
        for variant in (wanted, ""):
            kernel = find(capability, dtype, "attention_varlen_forward", family, variant, head_dim)
            if kernel is not None:
                return kernel.row.block_n
    return 0


def combining(capability: int, dtype: str, head_dim: int) -> Kernel | None:
    return next(
        filter(None, (find(capability, dtype, "attention_combine", f, "", head_dim) for f in families(capability))),
        None,
    )


def forward(capability: int, p: dict[str, Any]) -> tuple[Kernel, int] | None:
    """The kernel and the number of splits; None if no kernel can run it."""
    dtype, mask, dim = "bf16" if p["bf16"] else "f16", "causal" if p["causal"] else "full", p["head_dim"]

    def of(family: str, variant: str) -> Kernel | None:
        return find(capability, dtype, "attention_forward", family, variant, dim, mask)

    usable = [f for f in families(capability) if of(f, "") is not None and p["forced"] in (None, f)]
    combine = combining(capability, dtype, dim)
    if not usable:
        return None
    if p["consistent"]:
        width = consistent_width(capability, dtype, dim)
        for family in usable:
            same = [k for v in ("", "short", "m128", "m64") if (k := of(family, v)) and k.row.block_n == width]
            if same:
                return min(same, key=lambda k: microseconds(p, k, 1)), 1
        return None
    standard = of(usable[0], "")
    assert standard is not None
    if standard.row.cost:
        offered = [(standard, 1)] + [(k, 1) for v in ("short", "m128") if (k := of(usable[0], v))]
        offered += [(k, 1) for f in usable[1:2] if (k := of(f, "m64"))]
        split = of(usable[0], "split")
        if split is not None and combine is not None:
            most = min(32, p["multiprocessors"] // tiles(p, split))
            offered += [(split, n) for n in range(2, most + 1) if p["seq_k"] // n >= 128]
        offered = [(k, n) for k, n in offered if k.head_dim == standard.head_dim]
        return min(offered, key=lambda one: microseconds(p, *one))
    for family in usable:
        split, small, own = of(family, "split"), of(family, "m64"), of(family, "")
        assert own is not None
        if split is not None and combine is not None and p["seq_k"] >= 1024:
            splits = min(p["multiprocessors"] // tiles(p, split), p["seq_k"] // 128, 16)
            if splits > 1:
                return split, splits
        if small is not None and tiles(p, own) < p["multiprocessors"]:
            return small, 1
    return standard, 1


def near(rng: random.Random, *sizes: int) -> int:
    return max(1, rng.choice(sizes) + rng.choice((-1, 0, 0, 1)))


def varlen(capability: int, p: dict[str, Any], multiprocessors: int = 132) -> Kernel | None:
    dtype, dim, rows = "bf16" if p["bf16"] else "f16", p["head_dim"], p["rows"]
    narrow = "v128" if 128 < dim <= 192 and p["head_dim_v"] <= 128 else ""
    wanted = "alibi" if p["alibi"] else "scores" if p["has_score_functions"] else narrow
    width = consistent_width(capability, dtype, dim, wanted) if p["consistent"] else 0
    is_wide = capability == 90 and rows * p["group"] > 2 * FEW_ROWS and p["batch"] * p["heads_kv"] > multiprocessors
    decodes = p["batch_invariant"] or not is_wide
    if rows > FEW_ROWS:  # if ragged tiles leave multiprocessors idle and there are no chunk kernels
        has_chunks = capability == 90 and p["forced"] in (None, "sm90")
        few = rows * p["group"] <= 127 and p["keys"] >= 1024 and 2 * p["batch"] * p["heads"] <= multiprocessors
        decodes = few and not has_chunks and not p["batch_invariant"]
    decodes = decodes and not p["consistent"]
    for operation in (["attention_decode"] if decodes else []) + ["attention_varlen_forward"]:
        for family in families(capability):
            if p["forced"] not in (None, family):
                continue
            found = find(capability, dtype, operation, family, wanted, dim)
            if found is None and not p["alibi"]:
                found = find(capability, dtype, operation, family, "", dim)
            if found is None:
                continue
            shorter = find(capability, dtype, operation, family, "m64", dim)
            loads_maps = bool(maps(found))
            may = not wanted if loads_maps else not p["alibi"]
            if may and shorter is not None:
                takes = reads_keys_once if loads_maps else partial(is_shorter, multiprocessors)
                found = shorter if takes(p, found, shorter) else found
            serves = not loads_maps or p["page_size"] % 8 == 0
            if serves and width in (0, found.row.block_n):
                return found
            if p["alibi"] and p["consistent"]:
                return None  # another family has other bits
    return None


def maps(kernel: Kernel) -> int:
    return len(map_parameters(kernel.row.descriptor))


def row_blocks(p: dict[str, Any], block: int) -> int:
    own = -(-p["rows"] // block) * p["batch"]
    return min(own, -(-p["rows_total"] // block) + p["batch"]) if p["rows_total"] else own


def is_shorter(multiprocessors: int, p: dict[str, Any], kernel: Kernel, shorter: Kernel) -> bool:
    if (shorter.head_dim, shorter.row.block_n) != (kernel.head_dim, kernel.row.block_n):
        return False
    few = row_blocks(p, kernel.row.block_m) * p["heads"] < multiprocessors
    more_fit = max(p["rows"], p["keys"]) <= 256 and shorter.row.min_blocks > kernel.row.min_blocks
    return p["rows"] <= shorter.row.block_m or few or more_fit


def reads_keys_once(p: dict[str, Any], kernel: Kernel, shorter: Kernel) -> bool:
    same = (shorter.head_dim, shorter.row.block_n) == (kernel.head_dim, kernel.row.block_n)
    return same and p["consistent"] and p["rows"] <= 64 and p["heads"] == p["heads_kv"]


def chunk_microseconds(p: dict[str, Any], kernel: Kernel, heads: int, fold: int, splits: int) -> float:
    """``fold``: rows of a tile per position."""
    cost, rows, keys, block = kernel.row.cost, p["rows"], p["keys"], kernel.row.block_m
    sequences = min(p["batch"], -(-p["rows_total"] // rows)) if p["rows_total"] else p["batch"]
    positions = block // fold
    items = -(-rows // positions) * sequences * heads * splits
    busy = -(-min(rows, positions) * fold // 64) * 64

    def time(of: float) -> float:
        seen = min(max(int(of), 1), p["seen"] + min(rows, positions))
        return float(seen / splits * (cost["key"] * (0.4 + 0.6 * busy / block)) + cost["ends"])

    causal, longest = p["causal"], time(keys)
    mean, last = (keys - rows // 2 + kernel.row.block_n // 2, keys - rows + positions) if causal else (keys, keys)
    filled = items / p["multiprocessors"] * time(mean) + time(last)
    partials = splits * sequences * rows * p["heads"]
    extra = cost["split"] + partials * cost["share"] / 1000 if splits > 1 else 0.0
    return float(max(longest, min(-(-items // p["multiprocessors"]) * longest, filled)) + extra)


def fastest_chunk(capability: int, p: dict[str, Any]) -> tuple[float, int, Kernel] | None:
    """Time, number of splits, kernel."""
    dim, group, dtype = p["head_dim"], p["group"], "bf16" if p["bf16"] else "f16"
    is_scored = p["has_score_functions"]
    kernel = find(capability, dtype, "attention_chunk_forward", "sm90", "scores" if is_scored else "", dim)
    is_narrow = 128 < dim <= 192 and p["head_dim_v"] <= 128
    is_many = is_scored and (p["rows"] * group > 127 or (group == 1 and p["keys"] < 512))
    is_other = p["consistent"] or p["num_splits"] == 1 or is_many or p["forced"] not in (None, "sm90")
    if kernel is None or is_narrow or is_other or group > 64 or p["heads_kv"] >= 1 << 16 or p["page_size"] % 8:
        return None
    fold, times = 1 << (group - 1).bit_length(), []
    partial_bytes = (p["rows_total"] or p["rows"] * p["batch"]) * p["heads"] * kernel.head_dim * 4
    for splits in range(1, min(p["num_splits"] if p["num_splits"] > 1 else 32, 32) + 1):
        room = p["keys"] // splits >= 256 and splits * partial_bytes <= 1 << 28
        if splits > 1 and not (room and combining(capability, dtype, dim)):
            break
        times.append((chunk_microseconds(p, kernel, p["heads_kv"], fold, splits), splits, kernel))
    return min(times, key=lambda one: one[:2])


def is_decoded(p: dict[str, Any]) -> bool:
    """Whether decoding is the faster way, if a kernel decodes."""
    rows = p["rows"] * p["group"]
    few = p["head_dim"] > 64 and rows > 12 and 2048 <= p["keys"] <= 8192 and p["batch"] * p["heads_kv"] <= 16
    return rows <= (8 if p["head_dim"] > 128 else 16) and not few


def chunk(capability: int, p: dict[str, Any], otherwise: Kernel | None) -> tuple[str, int]:
    fastest = fastest_chunk(capability, p)
    if otherwise is None or fastest is None:
        return "", 0
    time, splits, kernel = fastest
    if otherwise.row.operation == "attention_decode":
        is_faster = not (p["has_score_functions"] or is_decoded(p))
    else:
        is_faster = p["has_score_functions"] or (
            bool(otherwise.row.cost) and time < 0.955 * chunk_microseconds(p, otherwise, p["heads"], 1, 1)
        )
    return (kernel.symbol, splits) if is_faster else ("", 0)


def folds(capability: int, p: dict[str, Any], chosen: tuple[Kernel, int]) -> bool:
    """Whether few dense rows are left to the ragged kernels."""
    dim, rows, fastest = p["head_dim"], p["rows"], fastest_chunk(capability, p)
    if capability != 90 or p["consistent"] or p["forced"] is not None or not 2 <= rows <= 64:
        return False
    if p["group"] == 1:
        return bool(64 < dim <= 128 and rows <= 8)
    if dim <= 128 and is_decoded(p):
        return True
    margin = 0.45 if dim > 128 else 0.65
    return fastest is not None and fastest[0] < margin * microseconds(p, *chosen)


def varlen_backward(capability: int, dtype: str, dim: int, dim_v: int, option: str) -> list[Kernel]:
    wanted = "scores" if option in ("scores", "streamed") else "v128" if 128 < dim <= 192 and dim_v <= 128 else ""
    for family in families(capability):

        def of(operation: str, variant: str) -> Kernel | None:
            return find(capability, dtype, f"attention_{operation}", family, variant, dim)  # noqa: B023

        def own(operation: str) -> Kernel | None:
            return of(operation, "alibi") if option == "alibi" else of(operation, wanted) or of(operation, "")

        dq, dkv = own("varlen_backward_dq"), own("varlen_backward_dkv")
        if dq is None or dkv is None:
            continue
        fused = own("mask_backward_fused" if option == "streamed" else "varlen_backward_fused")
        helpers = [of(f"varlen_backward_fused_{helper}", "") for helper in ("prepare", "convert")]
        has_all = fused is not None and None not in helpers and fused.head_dim == dkv.head_dim
        storing = of("mask_backward_fused", "gradient") if option == "streamed" else None
        return [dq, dkv, *filter(None, (fused, *helpers, storing) if has_all and option != "scores" else ())]
    return []


def ordered(capability: int, dim: int, p: dict[str, Any]) -> tuple[str, ...]:
    """The symbols of the two kernels; ``rows``: per key head."""
    dtype = "bf16" if p["bf16"] else "f16"
    scores, values = (find(capability, dtype, f"attention_decode_{of}", "sm90", "", dim) for of in ("scores", "values"))
    if scores is None or values is None:
        return ()
    row, tiles = values.row, p["batch"] * p["heads"]
    variant = "v128" if 128 < dim <= 192 and p["head_dim_v"] <= 128 else ""
    serves = (
        p["consistent"]
        and not p["has_score_functions"]
        and not p["alibi"]
        and p["forced"] in (None, "sm90")
        and p["rows"] <= row.block_m
        and row.block_n == consistent_width(capability, dtype, dim, variant)
        and tiles * p["rows"] * -(-p["keys"] // row.block_n) * row.block_n <= 1 << 27
        and tiles * (values.head_dim // 32) <= p["multiprocessors"] * row.min_blocks
        and 4 * tiles <= 3 * p["multiprocessors"]
    )
    return (scores.symbol, values.symbol) if serves else ()


def is_fused(
    capability: int,
    dim: int,
    causal: bool,
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    group: int = 1,
    has_window: bool = False,
) -> bool:
    """heads: key heads."""
    fused = find(
        capability, "bf16", "attention_backward_fused", families(capability)[0], "", dim, "causal" if causal else "full"
    )
    if fused is None or (dim > 64 and has_window):
        return False
    least, rounds = (1280 if causal or group > 1 else 1024, 10) if dim > 64 else (1024, 12)
    blocks = -(-keys // fused.row.block_n) * heads * batch
    is_long, is_full = min(rows, keys) >= least, blocks >= (rounds if keys < 2048 else 3) * 132
    return is_long and is_full
