"""Which kernel runs a problem, for random problems: select.cpp and its neighbours against kernel_rules.py."""

import math
import random
from typing import Any

import pytest

from tests.host.kernel_rules import (
    UNITS,
    chunk,
    families,
    find,
    folds,
    forward,
    is_fused,
    near,
    ordered,
    varlen,
    varlen_backward,
)

DRAWS = 3000
CAPABILITIES = (75, 80, 86, 87, 89, 90, 91, 100, 103, 120, 121, 130)  # includes GPUs that the table lacks


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
        text = f"head_dim {p['head_dim']}" + (", batch-invariant (consistent=True)" if p["consistent"] else "")
        assert p["forced"] is None or f"{text} on a GPU" in found or "is not a kernel family" in found


def asked(choose: Any, capability: int, p: dict[str, Any]) -> tuple[str, str, int] | str:
    """The choice, or the refusal's text."""
    try:
        choice = choose(capability, **p)
    except Exception as error:
        if type(error).__name__ != "RefusedError":
            raise
        return str(error)
    return choice.symbol, choice.target, choice.splits


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


@pytest.mark.parametrize("capability", [80, 90])
def test_few_dense_rows_fold(choose: Any, capability: int) -> None:
    """If that is faster than the dense kernel by more than the error of the estimates."""
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


def test_streamed_masks(choose: Any) -> None:
    """Tiles of 256 rows if the busiest multiprocessor then computes fewer rows."""
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
    """Like a batch of equal sequences: as many tokens, in sequences as long as the longest."""
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
    """So that they divide the keys alike, and add in the same order."""
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
