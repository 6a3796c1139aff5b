"""Which kernel serves a problem, over drawn problems: select.cpp against its rules, stated once more from the table alone."""

import math
import random
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest

from flashmoe_build.compile.codegen import map_parameters
from flashmoe_tools.descriptors import KernelRow
from flashmoe_tools.tables import Target, Unit, load_tables

TABLES = load_tables()
UNITS: dict[tuple[str, str, str, str], list[Unit]] = {}
for _unit in TABLES.units():
    if _unit.row.operation.startswith("attention_"):
        UNITS.setdefault((_unit.row.operation, _unit.row.family, _unit.row.variant, _unit.dtype), []).append(_unit)
CAPABILITIES = (75, 80, 86, 87, 89, 90, 91, 100, 103, 120, 121, 130)  # of a GPU that the table lacks, too
FEW_ROWS = 16
DRAWS = 3000


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
    """Machine code for this GPU, then of an older minor version, then PTX; None where the GPU cannot load it."""
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
    """Of the least head dim that holds the tensor's."""
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
    """With the number of splits; None where nothing serves."""
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


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_dense(choose: Any, capability: int) -> None:
    rng = random.Random(capability)
    for _ in range(DRAWS if capability in (80, 90) else DRAWS // 8):
        p = {
            "head_dim": near(rng, 8, 64, 65, 128, 192, 255),
            "batch": rng.choice((1, 2, 3, 8, 64)),
            "heads": rng.choice((1, 2, 8, 11, 16, 32)),
            "seq_q": near(rng, 1, 4, 64, 128, 192, 256, 384, 512, 700, 1024, 3000, 8192),
            "seq_k": near(rng, 1, 64, 128, 256, 512, 1024, 2048, 5000, 8192, 40000),
            "causal": rng.random() < 0.5,
            "bf16": capability >= 80 and rng.random() < 0.5,
            "forced": rng.choice((None, None, None, "sm75", "sm80", "sm90")),
            "multiprocessors": rng.choice((16, 64, 78, 108, 132, 132, 176)),
            "consistent": rng.random() < 0.2,
        }
        wanted, found = forward(capability, p), asked(choose, capability, p)
        if wanted is not None:
            assert found == (*wanted[0].pair, wanted[1]), p
            continue
        assert isinstance(found, str), p
        text = f"head_dim {p['head_dim']}" + (", the same bits in every call" if p["consistent"] else "")
        assert p["forced"] is None or f"{text} on a GPU" in found or "names no kernel family" in found


def asked(choose: Any, capability: int, p: dict[str, Any]) -> tuple[str, str, int] | str:
    """Or the refusal's text."""
    try:
        choice = choose(capability, **p)
    except Exception as error:
        if type(error).__name__ != "RefusedError":
            raise
        return str(error)
    return choice.symbol, choice.target, choice.splits


def varlen(capability: int, p: dict[str, Any], multiprocessors: int = 132) -> Kernel | None:
    dtype, dim, rows = "bf16" if p["bf16"] else "f16", p["head_dim"], p["rows"]
    narrow = "v128" if 128 < dim <= 192 and p["head_dim_v"] <= 128 else ""
    wanted = "alibi" if p["alibi"] else "scores" if p["has_score_functions"] else narrow
    width = consistent_width(capability, dtype, dim, wanted) if p["consistent"] else 0
    is_wide = capability == 90 and rows * p["group"] > 2 * FEW_ROWS and p["batch"] * p["heads_kv"] > multiprocessors
    decodes = p["batch_invariant"] or not is_wide
    if rows > FEW_ROWS:  # of ragged tiles that leave multiprocessors idle, where there are no chunks
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


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_ragged(choose: Any, capability: int) -> None:
    rng = random.Random(capability)
    for _ in range(DRAWS if capability in (80, 90) else DRAWS // 8):
        p = {
            "head_dim": near(rng, 8, 64, 65, 128, 192, 255),
            "rows": near(rng, 1, 8, 16, 64, 128, 256, 700, 4096),
            "keys": near(rng, 64, 256, 1024, 8192),
            "heads": rng.choice((1, 2, 8, 16, 33, 66, 132)),
            "batch": rng.choice((1, 2, 4, 16, 17, 64)),
            "rows_total": rng.choice((0, 0, 64, 100, 129, 1000)),
            "page_size": rng.choice((0, 0, 1, 8, 12, 16, 20, 256)),
            "has_score_functions": rng.random() < 0.2,
            "alibi": rng.random() < 0.2,
            "bf16": capability >= 80 and rng.random() < 0.5,
            "forced": rng.choice((None, None, None, "sm75", "sm80", "sm90")),
            "consistent": rng.random() < 0.3,
            "head_dim_v": rng.choice((8, 64, 128, 129, 192)),
            "heads_kv": rng.choice((1, 2, 8, 33)),
            "group": rng.choice((1, 2, 3, 4, 8)),
            "batch_invariant": rng.random() < 0.3,
        }
        wanted = varlen(capability, p)
        assert choose.varlen(capability, **p) == (() if wanted is None else wanted.pair), p


def chunk_microseconds(p: dict[str, Any], kernel: Kernel, heads: int, fold: int, splits: int) -> float:
    """``fold``: rows of a tile that a position takes."""
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
    """Time, shares of the keys, kernel."""
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
    """Where decoding serves, whether it is the faster way."""
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


@pytest.mark.parametrize("capability", [80, 90])
def test_chunks(choose: Any, capability: int) -> None:
    rng = random.Random(capability)
    for _ in range(3 * DRAWS if capability == 90 else DRAWS // 8):
        keys, group, heads_kv = (
            near(rng, 64, 255, 1024, 2048, 8192, 16384, 100_000),
            rng.choice((1, 2, 3, 4, 8, 64, 65)),
            rng.choice((1, 2, 8, 16)),
        )
        given: dict[str, Any] = {
            "rows": rng.choice((near(rng, 1, 12, 16, 64, 128, 500, 8192), near(rng, max(1, 16 // group)))),
            "keys": keys,
            "batch": rng.choice((1, 1, 2, 4, 64)),
            "rows_total": rng.choice((0, 0, 64, 300, 4000)),
            "page_size": rng.choice((0, 0, 12, 16)),
            "num_splits": rng.choice((0, 0, 0, 1, 3, 40)),
            "multiprocessors": rng.choice((66, 132, 132)),
            "has_score_functions": rng.random() < 0.2,
            "bf16": rng.random() < 0.5,
            "forced": rng.choice((None, None, None, None, "sm80", "sm90")),
            "consistent": rng.random() < 0.1,
            "head_dim_v": rng.choice((64, 192, 192)),
            "causal": rng.random() < 0.7,
            "seen": rng.choice((keys, keys, 100, keys // 3)),
            "heads_kv": heads_kv,
            "group": group,
        }
        dim = rng.choice((64, near(rng, 8, 64, 128, 192, 255)))
        more: dict[str, Any] = {
            "head_dim": dim,
            "heads": heads_kv * group,
            "alibi": False,
            "batch_invariant": given["num_splits"] == 1,
        }
        whole = {**given, **more}
        wanted = chunk(capability, whole, varlen(capability, whole, given["multiprocessors"]))
        assert choose.chunk(capability, dim, **given) == wanted, (dim, given)


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


@pytest.mark.parametrize("capability", [80, 90])
def test_few_dense_rows_fold(choose: Any, capability: int) -> None:
    """Where that is faster than the dense kernel by more than the estimates are off."""
    rng = random.Random(capability)
    for _ in range(DRAWS if capability == 90 else DRAWS // 8):
        p: dict[str, Any] = {
            "head_dim": near(rng, 8, 64, 128, 192, 255),
            "batch": rng.choice((1, 1, 2, 4, 16)),
            "heads_kv": rng.choice((1, 2, 8, 16)),
            "group": rng.choice((1, 2, 4, 8, 64, 65)),
            "rows": near(rng, 1, 2, 4, 8, 16, 64),
            "keys": near(rng, 64, 1024, 2048, 4096, 8192, 16384),
            "forced": rng.choice((None, None, None, families(capability)[0])),
            "multiprocessors": rng.choice((66, 132)),
            "consistent": rng.random() < 0.1,
            "causal": rng.random() < 0.5,
        }
        same = {"bf16": False, "heads": p["heads_kv"] * p["group"], "seq_q": p["rows"], "seq_k": p["keys"]}
        ragged = {
            "head_dim_v": p["head_dim"],
            "seen": p["keys"],
            "rows_total": 0,
            "page_size": 0,
            "num_splits": 0,
            "has_score_functions": False,
        }
        whole = {**p, **same, **ragged}
        chosen = forward(capability, whole)
        assert chosen is not None
        assert choose.folds(capability, **p) is folds(capability, whole, chosen), p


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


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_ragged_backward(choose: Any, capability: int) -> None:
    for dtype in ("f16", "bf16") if capability >= 80 else ("f16",):
        for dim, dim_v in ((8, 8), (72, 64), (128, 128), (192, 128), (136, 136), (256, 8), (512, 512)):
            wanted: list[str] = []
            for option in ("", "scores", "alibi", "streamed"):
                kernels = varlen_backward(capability, dtype, dim, dim_v, option)
                if not kernels:
                    break
                wanted += [kernel.symbol for kernel in kernels]
            assert choose.varlen_backward(capability, dim, dim_v, dtype == "bf16") == wanted, (dtype, dim, dim_v)


def ordered(capability: int, dim: int, p: dict[str, Any]) -> tuple[str, ...]:
    """The symbols of the two kernels; ``rows``: of a key head."""
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


def test_streamed_masks(choose: Any) -> None:
    """Tiles of 256 rows where the busiest multiprocessor goes through fewer rows with them."""
    rng = random.Random(3)
    variants: set[str] = set()
    for _ in range(DRAWS):
        capability = rng.choice((80, 90, 90, 90, 90, 100))
        dim, dtype = near(rng, 8, 64, 128, 192), rng.choice(("f16", "bf16"))
        sizes = {
            "rows": near(rng, 512, 576, 768, 1024, 2048, 4096),
            "keys": near(rng, 512, 4096),
            "heads": rng.choice((1, 8, 12, 16, 32)),
            "batch": rng.choice((1, 2, 4, 8, 16)),
            "multiprocessors": rng.choice((16, 132, 132, 132)),
        }
        forced = rng.choice((None, None, *families(capability)))
        is_streamed = (
            capability == 90 and forced in (None, "sm90") and dim <= 128 and min(sizes["rows"], sizes["keys"]) >= 512
        )
        wanted = ""
        if is_streamed:
            found = [
                find(capability, dtype, "attention_mask_forward", "sm90", variant, dim) for variant in ("", "m256")
            ]
            own, taller = found
            assert own is not None
            best = own
            if taller is not None and taller.head_dim == own.head_dim:
                busiest = [
                    kernel.row.block_m
                    * math.ceil(
                        math.ceil(sizes["rows"] / kernel.row.block_m)
                        * sizes["heads"]
                        * sizes["batch"]
                        / sizes["multiprocessors"]
                    )
                    for kernel in (own, taller)
                ]
                best = taller if busiest[1] < busiest[0] else own
            wanted = best.symbol
            variants.add(best.row.variant)
        assert choose.mask_forward(capability, dim, bf16=dtype == "bf16", forced=forced, **sizes) == wanted, sizes
    assert variants == {"", "m256"}


def test_two_kernels_with_the_bits_of_a_prefill(choose: Any) -> None:
    rng = random.Random(2)
    for _ in range(DRAWS):
        capability = rng.choice((80, 90, 90, 90, 90, 100))
        p: dict[str, Any] = {
            "rows": rng.choice((1, 4, 8, 9, 16)),
            "keys": near(rng, 64, 4096, 1 << 18, 1 << 21, 1 << 23),
            "heads": rng.choice((1, 2, 8, 16)),
            "batch": rng.choice((1, 2, 4, 8, 33)),
            "has_score_functions": rng.random() < 0.1,
            "bf16": rng.random() < 0.5,
            "forced": rng.choice((None, None, None, "sm80", "sm90")),
            "consistent": rng.random() < 0.9,
            "alibi": rng.random() < 0.1,
            "head_dim_v": rng.choice((8, 64, 128, 129)),
            "multiprocessors": rng.choice((16, 64, 132, 128)),
        }
        dim = near(rng, 8, 64, 128, 192, 255)
        wanted = ordered(capability, dim, p)
        assert choose.ordered(capability, dim, **p) == wanted, (capability, dim, p)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("causal", [False, True])
def test_backward(choose: Any, capability: int, causal: bool) -> None:
    for dtype in ("f16", "bf16") if capability >= 80 else ("f16",):
        for dim in (8, 64, 72, 128, 129, 192, 256):
            for forced in (None, "sm75", "sm80", "sm90"):
                wanted: list[str] = []
                for family in families(capability):
                    mask = "causal" if causal else "full"
                    own = [
                        find(capability, dtype, f"attention_backward_{of}", family, "", dim, mask)
                        for of in ("dq", "dkv", "fused")
                    ]
                    helpers = [
                        find(capability, dtype, f"attention_backward_fused_{of}", family, "", dim)
                        for of in ("prepare", "convert")
                    ]
                    if forced not in (None, family) or own[0] is None or own[1] is None:
                        continue
                    wanted = [own[0].symbol, own[1].symbol, own[0].target]
                    if own[2] is not None and None not in helpers and own[2].head_dim == own[1].head_dim:
                        wanted[2:2] = [k.symbol for k in (own[2], *helpers) if k is not None]
                    break
                found = choose.backward(capability, dim, causal=causal, bf16=dtype == "bf16", forced=forced)
                assert list(found) == wanted, (dtype, dim, forced)


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
    """heads: of keys."""
    fused = find(
        capability, "bf16", "attention_backward_fused", families(capability)[0], "", dim, "causal" if causal else "full"
    )
    if fused is None or (dim > 64 and has_window):
        return False
    least, rounds = (1280 if causal or group > 1 else 1024, 10) if dim > 64 else (1024, 12)
    blocks = -(-keys // fused.row.block_n) * heads * batch
    is_long, is_full = min(rows, keys) >= least, blocks >= (rounds if keys < 2048 else 3) * 132
    return is_long and is_full


def test_where_the_fused_form_begins(choose: Any) -> None:
    rng = random.Random(3)
    for _ in range(DRAWS):
        capability, dim, causal = rng.choice((80, 90, 90, 90)), rng.choice((40, 64, 72, 128, 192)), rng.random() < 0.5
        batch, heads, group = (
            rng.choice((1, 2, 3, 8)),
            rng.choice((1, 2, 4, 7, 8, 11, 33, 66)),
            rng.choice((1, 1, 2, 8)),
        )
        rows, keys = (near(rng, 1024, 1280, 1536, 2048, 4096, 16384, 65536) for _ in range(2))
        sizes = (capability, dim, causal, batch, heads, rows, keys)
        assert choose.fused(*sizes, group=group) is is_fused(*sizes, group), (*sizes, group)


def test_where_ragged_batches_have_the_fused_form(choose: Any) -> None:
    """As a batch of equal sequences, as many tokens in ones as long as the longest."""
    rng = random.Random(4)
    for _ in range(DRAWS):
        dim, causal, bends, heads = (
            rng.choice((64, 72, 128, 256)),
            rng.random() < 0.5,
            rng.random() < 0.1,
            rng.choice((1, 2, 8, 16, 32)),
        )
        longest, total = near(rng, 512, 1024, 1280, 2048, 4096, 16384, 1 << 20), near(rng, 900, 4096, 16384, 65536)
        window = rng.choice((1 << 31, 1 << 31, 256, 4096, longest))
        rows, keys = min(longest, total), min(longest, total, window)
        wanted = not bends and is_fused(90, dim, causal, total // keys, heads, rows, keys, has_window=window < rows)
        found = choose.varlen_fused(dim, heads, longest, total, causal=causal, bends=bends, window=window)
        assert found is wanted, (dim, causal, bends, heads, longest, total, window)


def test_kernels_over_codes_have_the_tiles_of_those_over_elements() -> None:
    """So they divide the keys alike, and add in the same order."""
    for operation in ("attention_decode", "attention_chunk_forward"):
        tiles: list[dict[Any, set[Any]]] = [{}, {}]
        for of, name in zip(tiles, (f"{operation}_e4m3", operation), strict=True):
            for (other, family, variant, dtype), units in UNITS.items():
                for unit in units if other == name and variant in ("", "scores") else ():
                    row = unit.row
                    key = (family, variant, dtype, row.axes["head_dim"], unit.target.name)
                    of.setdefault(key, set()).add((row.block_m, row.block_n, row.min_blocks))
        of_codes, of_elements = tiles
        assert of_codes
        for key, tile in of_codes.items():
            assert tile == of_elements[key], (operation, key)
