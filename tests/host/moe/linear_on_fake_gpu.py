"""The tile that linear takes, its launch and its results.

Run by tests/host/test_moe_launch.py, like on_fake_gpu.py."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import Tensor

from flashmoe_tools.tables import load_tables
from tests.host.moe.on_fake_gpu import MULTIPROCESSORS, begin, launches, lies, poisoned_memory  # noqa: F401

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)  # memory is the CPU's, the path the GPU's
MEMORY = torch.zeros(1 << 25, dtype=torch.bfloat16)
UNITS = [unit for unit in load_tables().units(("sm_90a",)) if unit.dtype == "bf16"]
OWN = {unit.name: unit.row.tile[:2] for unit in UNITS if unit.row.operation == "linear_nk"}  # rows and columns
DIVISIBLE = [(m, n) for m, n in OWN.values() if n <= 160]  # with registers for two sets of sums


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, tile: int = -1) -> Tensor:
    result: Tensor = torch.ops.flashmoe._linear.default.redispatch(CUDA, x, w, bias, tile)
    return result


def factor(rows: int, columns: int) -> Tensor:
    """Rows that overlap in memory, of which nothing is read."""
    return MEMORY.as_strided((rows, columns), (min(columns, (MEMORY.numel() - columns) // rows // 8 * 8), 1))


def launched(rows: int, n: int, k: int, *, capability: int = 90) -> tuple[str, int]:
    """The kernel, with + if each segment has a block, and the number of segments."""
    begin(capability)
    torch.utils.deterministic.fill_uninitialized_memory = False
    linear(factor(rows, k), factor(n, k))
    (found,) = launches()
    segments, is_divided = found["factors"][2:] or (1, False)
    return found["symbol"].removeprefix("flashmoe_").removesuffix("_nk") + "+" * is_divided, segments


def segments_of(n: int, k: int) -> int:
    return 4 if n <= 2048 and k >= 4096 else 1


FEW = "few_rows_sm80_bf16_m8"
CHOSEN = {  # (n, k): the tile by rows; measured in docs/notebook/2026-11-29-linear-segments.md and the report linear
    (1280, 8192): {1: "m64_n48+", 64: "m64_n48+", 65: "m64_n80+", 320: "m64_n64", 512: "m64_n80", 1536: "m128_n128"},
    # 768 rows, and 1536 of 1024 columns, take 1.37 of the undivided tile's time in segments, which are several waves.
    (2048, 8192): {1: "m64_n64+", 65: "m64_n128+", 320: "m64_n80", 768: "m128_n128"},
    (1024, 8192): {64: "m64_n32+", 65: "m64_n64+", 768: "m64_n96", 1536: "m128_n128"},
    (264, 4096): {1: "m64_n32+", 320: "m64_n64+", 512: "m64_n64", 8192: "m128_n160"},
    (2048, 4088): {8: FEW, 9: "m64_n32", 64: "m64_n32", 65: "m64_n64", 768: "m64_n192", 2048: "m128_n256"},
    (2056, 4096): {1: FEW, 512: "linear_sm90_bf16_n64", 1536: "m128_n192", 2048: "m128_n160"},
    (4096, 12288): {9: "m64_n32", 65: "m64_n64", 320: "m64_n160", 512: "linear_sm90_bf16_n128", 768: "m128_n192"},
    (6144, 4096): {8: FEW, 9: "m64_n48", 65: "linear_sm90_bf16_n64", 512: "m128_n192", 768: "m128_n160"},
    (16888, 1024): {8: FEW, 64: "m64_n128", 65: "linear_sm90_bf16_n128", 512: "m128_n256"},
    (16896, 1024): {8: "m64_n128"},
    (16992, 1024): {1: "m64_n160", 65: "m128_n160", 320: "m128_n224"},
}


@pytest.mark.parametrize("sizes", CHOSEN, ids=str)
def test_chosen_tiles(sizes: tuple[int, int]) -> None:
    found = {rows: launched(rows, *sizes) for rows in CHOSEN[sizes]}
    assert {rows: name[-len(CHOSEN[sizes][rows]) :] for rows, (name, _) in found.items()} == CHOSEN[sizes]
    assert {segments for _, segments in found.values()} == {segments_of(*sizes)}


def test_what_every_choice_keeps() -> None:
    """A sum's number of segments, and so a row's bits, depends on the weights; segments get blocks in one wave only."""
    rng, seen = random.Random(38), set()
    for _ in range(600):
        n, k = (8 * rng.randint(1, 2 ** rng.randint(1, 11)) for _ in range(2))
        rows = min(rng.randint(1, 2 ** rng.randint(0, 13)), max(1, (1 << 22) // n))
        name, segments = launched(rows, n, k)
        seen.add(name.removesuffix("+"))
        assert segments == segments_of(n, k), (rows, n, k)
        if segments == 1:
            assert not name.endswith("+")
            continue
        tile = OWN[name.removesuffix("+")]
        assert tile in DIVISIBLE
        blocks = 4 * -(-rows // tile[0]) * -(-n // tile[1])
        assert not name.endswith("+") or blocks <= MULTIPROCESSORS, (rows, n, k)
        if rows <= 64:  # the narrowest that is one wave
            fits = [columns for m, columns in DIVISIBLE if m == 64 and 4 * -(-n // columns) <= MULTIPROCESSORS]
            assert (*tile, name[-1]) == (64, min(fits), "+"), (rows, n, k)
    own = {unit.name for unit in UNITS if unit.row.operation.startswith("linear")}
    assert seen == own, "a tile that is never chosen"


@pytest.mark.parametrize(("n", "k"), [(72, 4096), (72, 40)])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_tile(n: int, k: int, transposed: bool) -> None:
    """The results of each tile, by its number; and numbers that do not exist."""
    x, bias = torch.randn(9, k).bfloat16(), torch.randn(n).bfloat16()
    w = torch.randn(n, k).bfloat16() / k**0.5
    expected = torch.nn.functional.linear(x.float(), w.float(), bias.float())
    w = w.mT.contiguous().mT if transposed else w
    begin()
    with pytest.raises(Exception, match=r"linear\.tile") as refused:
        linear(x, w, bias, 1000)
    with pytest.raises(Exception, match=r"linear\.tile"):
        linear(x, w, bias, -2)
    last = int(re.findall(r"\d+", str(refused.value))[-1])
    names = set()
    for tile in range(-1, last + 1):
        begin()
        torch.testing.assert_close(linear(x, w, bias, tile).float(), expected, rtol=0.02, atol=0.05)
        (found,) = launches()
        names.add((found["symbol"], tuple(found["factors"][2:])))
        assert (found["factors"][2:3] or [1]) == [segments_of(n, k) if not transposed else 1]
    assert len(names) == last + 1, "a tile has two numbers"
    with pytest.raises(Exception, match=r"linear\.tile"):
        linear(x, w, bias, last + 1)
    if segments_of(n, k) > 1 and not transposed:
        assert len(names) == 2 * len(DIVISIBLE)


@pytest.mark.parametrize(("offset", "spare"), [(0, 0), (0, 8), (8, 0), (0, 4), (1, 0)])
def test_factors_are_copied_where_16_bytes_cannot_be_loaded_and_nowhere_else(offset: int, spare: int) -> None:
    x, w = torch.randn(9, 64).bfloat16(), torch.randn(72, 64).bfloat16()
    begin()
    expected = linear(x, w)
    begin()
    moved = lies(x, offset, spare), lies(w, offset, spare)
    assert torch.equal(linear(*moved), expected)
    read = launches()[0]["factors"][:2]
    assert [one == tensor.data_ptr() for one, tensor in zip(read, moved, strict=True)] == [
        (offset | spare) % 8 == 0
    ] * 2


def kernels(capability: int, rows: tuple[int, ...]) -> list[str]:
    return [launched(one, 4096, 4096, capability=capability)[0] for one in rows]


def test_other_gpus_and_forced_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without wgmma: the grouped product's kernels, no segments. A forced family keeps them if it has their kernels."""
    assert all(name.startswith("grouped_gemm_") for name in kernels(120, (9, 300)))
    assert launched(1, 4096, 4096, capability=80)[0].endswith(FEW)
    assert launched(9, 1280, 8192, capability=80)[1] == 1
    monkeypatch.setenv("FLASHMOE_KERNEL", "sm80")
    assert all("sm80" in name for name in kernels(90, (1, 9, 300)))
    assert launched(9, 1280, 8192)[1] == 1
    monkeypatch.setenv("FLASHMOE_KERNEL", "sm90")
    assert all("sm90" in name for name in kernels(90, (1, 9, 300)))
    assert launched(9, 1280, 8192) == ("linear_nk_sm90_bf16_m64_n48+", 4)


def test_no_rows_launch_nothing() -> None:
    assert linear(torch.zeros(0, 16).bfloat16(), torch.zeros(24, 16).bfloat16()).shape == (0, 24)
    assert launches() == []
