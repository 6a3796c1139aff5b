"""Compares the kernels that random calls launch with the rules of kernel_rules.py.

Run by tests/host/test_attention_launch.py, like on_fake_gpu.py. Nothing is computed; the tensors share memory."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

# isort: off
# Before flashmoe: it says which operators this library has.
from tests.host.attention.on_fake_gpu import (  # noqa: F401
    LIBRARY,
    begin,
    calls_for_the_cpu_run_the_gpus_path,
    launches,
    poisoned_memory,
)

# isort: on
from tests.host import kernel_rules as rules
from tests.host.attention.dense_calls import DTYPE

MEMORY = torch.zeros(1 << 24, dtype=DTYPE)
CONSISTENT = -1  # num_splits
DECODED = "attention_decode"


@pytest.fixture(autouse=True)
def nothing_is_computed(poisoned_memory: None) -> Iterator[None]:  # noqa: F811
    torch.utils.deterministic.fill_uninitialized_memory = False
    LIBRARY.fake_computing(0)
    yield
    LIBRARY.fake_computing(1)


def tensor(*sizes: int) -> Tensor:
    return MEMORY.as_strided(sizes, (*[8] * (len(sizes) - 1), 1))


def draw(rng: random.Random) -> dict[str, Any]:
    group, dim = rng.choice((1, 1, 2, 4, 8, 64, 71)), rng.choice((16, 64, 72, 128, 192, 256))
    keys = rules.near(rng, 64, 256, 511, 1024, 2048, 8192, 16384)
    return {
        "heads_kv": rng.choice((1, 2, 8)),
        "group": group,
        "head_dim": dim,
        "head_dim_v": rng.choice((dim, dim, 64, 128)),
        "rows": max(1, rng.choice((1, 1, rules.near(rng, 2, 8, 16, 64, 128, 512, 700), 16 // group))),
        "keys": keys,
        "batch": rng.choice((1, 1, 2, 4, 17, 64)),
        "num_splits": rng.choice((0, 0, 0, 0, 1, 1, 3, CONSISTENT, CONSISTENT)),
        "kind": rng.choice(("", "", "", "softcap", "bool", "additive", "alibi")),
        "form": rng.choice(("dense", "dense", "ragged", "pages", "pages of 12")),
        "window": rng.choice(((-1, -1), (-1, 0), (-1, 0), (100, 0), (keys // 3, 20), (-1, 5), (0, 0), (0, 9))),
        "multiprocessors": rng.choice((66, 132)),
    }


def call(c: dict[str, Any]) -> None:
    """Calls the operator for any kind of lengths."""
    batch, heads, heads_kv, rows, keys = c["batch"], c["heads_kv"] * c["group"], c["heads_kv"], c["rows"], c["keys"]
    widths, lengths, table = (c["head_dim"], c["head_dim_v"]), None, None
    ends: list[Tensor | None] = [None, None]
    q, kv = tensor(batch, heads, rows, widths[0]), [tensor(batch, heads_kv, keys, width) for width in widths]
    if c["form"] == "ragged":
        ends = [torch.arange(batch + 1, dtype=torch.int32) * length for length in (rows, keys)]
        q, kv = tensor(batch * rows, heads, widths[0]), [tensor(batch * keys, heads_kv, width) for width in widths]
    elif c["form"] != "dense":
        size = 12 if "12" in c["form"] else 16
        kv = [tensor(3, size, heads_kv, width) for width in widths]
        lengths, table = torch.full((batch,), keys, dtype=torch.int32), torch.zeros(batch, -(-keys // size)).int()
    mask = None
    if c["kind"] in ("bool", "additive"):
        memory = torch.zeros(rows * (keys + 8), dtype=torch.bool if c["kind"] == "bool" else DTYPE)
        mask = memory.as_strided((1, 1, rows, keys), (8, 8, -(-keys // 8) * 8, 1))
    elif c["kind"] == "alibi":
        mask = torch.zeros(batch, heads)
    numbers = (rows, keys, 0.125, *c["window"], 5.0 if c["kind"] == "softcap" else 0.0, c["num_splits"])
    torch.ops.flashmoe.attention_varlen_forward(q, *kv, *ends, lengths, table, None, mask, *numbers)


def wanted(capability: int, c: dict[str, Any]) -> list[str] | None:
    """Returns the symbols of the kernels that are launched; None if no kernel can run the call."""
    group, rows, keys, many = c["group"], c["rows"], c["keys"], c["multiprocessors"]
    is_ragged, consistent, scored = c["form"] == "ragged", c["num_splits"] == CONSISTENT, c["kind"] not in ("", "alibi")
    has_many = 4 * c["batch"] * c["heads_kv"] > many
    folded = not is_ragged and rows == 1 and (group <= 64 or (has_many and c["num_splits"] != 1))
    left, right = c["window"]
    p = {
        **{name: c[name] for name in ("heads_kv", "head_dim_v", "batch", "num_splits", "multiprocessors", "keys")},
        "head_dim": max(c["head_dim"], c["head_dim_v"]),
        "bf16": True,
        "forced": None,
        "consistent": consistent,
        "alibi": c["kind"] == "alibi",
        "has_score_functions": c["kind"] != "",
        "batch_invariant": c["num_splits"] == 1,
        "rows_total": c["batch"] * rows if is_ragged else 0,
        "page_size": {"pages": 16, "pages of 12": 12}.get(c["form"], 0),
        "causal": right == 0,
        "seen": min(keys, left + right + 1) if left >= 0 and right >= 0 else keys,
    }
    same_heads = {"heads": c["heads_kv"] * group, "rows": rows, "group": group}
    dense = {"seq_q": rows, "seq_k": keys}
    is_plain = c["form"] == "dense" and c["kind"] == "" and left < 0 and right <= 0 and c["head_dim"] == c["head_dim_v"]
    if consistent and is_plain and rows > 1:
        found = rules.forward(capability, {**p, **same_heads, **dense})
        return found and [found[0].symbol]
    two = rules.ordered(capability, p["head_dim"], {**p, "heads": c["heads_kv"], "rows": rows * group})
    if two:
        return list(two)
    as_tiles = {"heads": c["heads_kv"], "rows": group, "group": 1} if folded else same_heads
    kernel = rules.varlen(capability, {**p, **as_tiles}, many)
    if kernel is None:
        return None
    operation = kernel.row.operation
    if p["alibi"]:
        symbol, shares = "", 0  # no chunk kernel has it
    else:
        symbol, shares = rules.chunk(capability, {**p, **same_heads}, kernel)
    if symbol:
        combine = rules.combining(capability, "bf16", p["head_dim"])
        assert combine is not None
        return [symbol, combine.symbol][: 1 + (shares > 1)]
    is_long = min(rows, keys) >= 512 and operation != DECODED
    if scored and c["kind"] in ("bool", "additive") and not is_ragged and c["num_splits"] == 0 and is_long:
        own = rules.find(capability, "bf16", "attention_mask_forward", kernel.row.family, "", p["head_dim"])
        if own is not None and own.head_dim == kernel.head_dim:
            converting = ["flashmoe_attention_bool_mask_sm90_bf16"] if c["kind"] == "bool" else []
            return [*converting, own.symbol]
    few = None
    if c["num_splits"] == 1 and is_ragged and operation != DECODED:
        few = rules.varlen(capability, {**p, **as_tiles, "rows": rules.FEW_ROWS}, many)
    return [kernel.symbol, *([few.symbol] if few is not None and few.row.operation == DECODED else [])]


def test_ragged_paged_and_banded_calls() -> None:
    rng, operations = random.Random(5), set()
    for _ in range(1400):
        c, capability = draw(rng), rng.choice((80, 90, 90, 90))
        expected = wanted(capability, c)
        begin(capability, c["multiprocessors"])
        if expected is None:
            with pytest.raises(RuntimeError, match="flashmoe"):
                call(c)
            continue
        call(c)
        found = launches()
        assert [launch["symbol"] for launch in found] == expected, (capability, c)
        operations |= {launch["operation"] for launch in found}
    assert len(operations) == 9, operations


def test_dense_calls() -> None:
    rng = random.Random(2)
    for _ in range(1000):
        c, capability = draw(rng), rng.choice((80, 90, 90, 90))
        c = {**c, "head_dim_v": c["head_dim"], "num_splits": 0, "kind": "", "form": "dense"}
        c = {**c, "window": rng.choice(((-1, -1), (-1, 0)))}
        rows, heads, group, dim = c["rows"], c["heads_kv"] * c["group"], c["group"], c["head_dim"]
        q, k = tensor(c["batch"], heads, rows, dim), tensor(c["batch"], c["heads_kv"], c["keys"], dim)
        begin(capability, c["multiprocessors"])
        torch.ops.flashmoe.flash_attention_forward(q, k, k, 0.125, c["window"][1] == 0)
        p = {**c, "seq_k": c["keys"], "bf16": True, "forced": None, "consistent": False, "seen": c["keys"]}
        p |= {"rows_total": 0, "page_size": 0, "has_score_functions": False, "causal": c["window"][1] == 0}
        if rows == 1:
            p |= {"heads": c["heads_kv"], "seq_q": group, "causal": p["causal"] and group == 1}
        else:
            p |= {"heads": heads, "seq_q": rows}
        chosen = rules.forward(capability, p)
        assert chosen is not None
        expected = [chosen[0].symbol]
        if chosen[1] > 1:
            combine = rules.combining(capability, "bf16", dim)
            assert combine is not None
            expected.append(combine.symbol)
        if rows > 1 and rules.folds(capability, p, chosen):
            expected = wanted(capability, c) or []
        elif capability == 90 and rows == 1 and group <= rules.FEW_ROWS and c["keys"] >= 512:
            decoding = rules.find(capability, "bf16", DECODED, "sm80", "", dim)
            assert decoding is not None
            expected = [decoding.symbol]
        assert [launch["symbol"] for launch in launches()] == expected, (capability, c)
