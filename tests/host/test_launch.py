"""What the forward launches on each GPU, and on which tensors, on a driver without a GPU."""

import ctypes
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host.faked import CSRC, HERE, link

SHARED = (
    "check_values",
    "copies",
    "find_kernels",
    "last_kernel",
    "launch",
    "load_kernels",
    "tensor",
    "tensor_map",
    "tile_counters",
)
ATTENTION = (
    "arguments",
    "launch",
    "prepare",
    "select",
    "select_dropout",
    "select_chunks",
    "select_ordered",
    "select_wide",
    "streamed_mask",
    "varlen",
    "varlen_arguments",
    "varlen_lengths",
    "varlen_params",
)
MULTIPROCESSORS = 132
MOST_LAUNCHES = 9  # host/launch.h

Launch = dict[str, Any]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = link(
        tmp_path_factory.mktemp("launch"),
        HERE / "fake_gpu.cpp",
        *(CSRC / "host" / f"{name}.cpp" for name in SHARED),
        *(CSRC / "attention" / "host" / f"{name}.cpp" for name in ATTENTION),
    )
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    library.fake_log.restype = ctypes.c_char_p
    return library


Runner = Callable[..., tuple[Tensor, Tensor, list[Launch]]]


@pytest.fixture
def run(library: ctypes.CDLL) -> Runner:
    """Calls the forward; returns out, lse and what was launched."""

    def call(
        q: Tensor, k: Tensor, *, gpu: int = 90, scale: float = 0.125, capturing: bool = False, fails: bool = False
    ) -> tuple[Tensor, Tensor, list[Launch]]:
        library.fake_gpu(gpu, MULTIPROCESSORS, capturing, fails)
        out, lse = torch.ops.flashmoe_fake.forward(q, k, k, scale, False)
        return out, lse, [json.loads(line) for line in library.fake_log().decode().splitlines()]

    return call


def tensor(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1)).half()


@pytest.mark.parametrize("capturing", [False, True])
def test_one_persistent_kernel_draws_its_tiles_from_a_counter(run: Runner, capturing: bool) -> None:
    """All calls of a stream share one; each captured call has its own, because graphs may run at once."""
    q = tensor(2, 64, 1024, 64)
    counters = set()
    for _ in range(2):
        _, _, launches = run(q, q, capturing=capturing)
        assert [launch["symbol"] for launch in launches] == ["flashmoe_attention_forward_sm90_f16_d64_short_full"]
        (launch,) = launches
        assert (launch["grid"], launch["maps"], launch["key_promotion"]) == (MULTIPROCESSORS, 4, 3)  # 256 bytes
        assert launch["has_counter"]
        assert not launch["has_partials"]
        assert launch["q"] == q.data_ptr()
        counters.add(launch["counter"])
    assert len(counters) == (2 if capturing else 1)


def test_a_kernel_with_a_block_for_every_tile_gets_no_counter(run: Runner) -> None:
    q = tensor(1, 2, 128, 64)
    for gpu, symbol in ((90, "sm80_f16_d64_m64"), (80, "sm80_f16_d64_m64"), (75, "sm75_f16_d64")):
        _, _, (launch,) = run(q, q, gpu=gpu)
        assert launch["symbol"].startswith(f"flashmoe_attention_forward_{symbol}"), gpu
        assert (launch["has_counter"], launch["maps"], launch["is_dependent"]) == (False, 0, False)


@pytest.mark.parametrize(("gpu", "family", "is_dependent"), [(90, "sm90", True), (80, "sm80", False)])
def test_split_keys_are_added_up_by_a_second_kernel(run: Runner, gpu: int, family: str, is_dependent: bool) -> None:
    """One combine kernel, the sm80 family's, follows the split kernels of both; dependent if its code waits."""
    rows = 12  # fewer are decoded
    _, _, (forward, combine) = run(tensor(1, 8, rows, 128), tensor(1, 8, 8192, 128), gpu=gpu)
    assert forward["symbol"] == f"flashmoe_attention_forward_{family}_f16_d128_split_full"
    assert combine["symbol"] == "flashmoe_attention_combine_sm80_f16_d256"
    assert forward["splits"] == combine["splits"] > 1
    assert forward["grid"] == 8 * forward["splits"]
    assert forward["has_partials"]
    assert combine["has_partials"]
    assert (forward["is_dependent"], combine["is_dependent"]) == (False, is_dependent)
    assert combine["grid"] == 8 * rows // 4  # blocks of four warps, one row each


def test_a_head_dim_of_no_whole_pieces_is_padded_and_the_output_copied_back(run: Runner) -> None:
    q = tensor(1, 2, 65, 59)
    out, _, (launch,) = run(q, q)
    assert launch["columns"] == 64
    assert launch["q"] != q.data_ptr()
    assert out.shape == q.shape
    assert torch.equal(out, torch.ones_like(out))


def test_only_tma_needs_a_copy_of_an_expanded_tensor(run: Runner) -> None:
    q, k = tensor(1, 8, 4096, 64), tensor(1, 1, 4096, 64).expand(1, 8, 4096, 64)
    _, _, (launch,) = run(q, k, gpu=90)
    assert "_sm90_" in launch["symbol"]
    assert launch["q"] == q.data_ptr()
    assert k.data_ptr() not in (launch["k"], launch["v"])
    _, _, (launch,) = run(q, k, gpu=80)
    assert (launch["k"], launch["v"]) == (k.data_ptr(), k.data_ptr())


@pytest.mark.parametrize(
    ("offset", "stride"), [(0, 64), (8, 64), (1, 64), (4, 64), (7, 72), (0, 68), (0, 65), (16, 80)]
)
def test_what_a_16_byte_load_cannot_reach_is_copied(run: Runner, offset: int, stride: int) -> None:
    """Address and row stride in elements of two bytes: eight of them are one load."""
    memory = tensor(offset + 2 * 64 * stride)
    q = memory[offset:].as_strided((1, 2, 64, 64), (2 * 64 * stride, 64 * stride, stride, 1), offset)
    for gpu in (80, 90):
        _, _, (launch,) = run(q, tensor(1, 2, 64, 64), gpu=gpu)
        is_loadable = offset % 8 == 0 and stride % 8 == 0
        assert (launch["q"] == q.data_ptr()) is is_loadable
        assert launch["q"] % 16 == 0


@pytest.mark.parametrize("head_dim", [60, 63, 64])
def test_rows_that_a_16_byte_load_would_end_behind_are_copied(run: Runner, head_dim: int) -> None:
    """Columns of a wider tensor: addresses and strides fit, but the last load of a row reads its neighbours."""
    q, k = (tensor(1, 2, 64, 80)[..., :head_dim] for _ in range(2))
    for gpu in (80, 90):
        _, _, (launch,) = run(q, k, gpu=gpu)
        assert (launch["q"] == q.data_ptr()) is (head_dim % 8 == 0)
        assert (launch["k"] == k.data_ptr()) is (head_dim % 8 == 0)


@pytest.mark.parametrize(("scale", "launched"), [(-0.5, 0.5), (0.0, 1.0)])
def test_kernels_see_a_positive_scale(run: Runner, scale: float, launched: float) -> None:
    q = tensor(1, 2, 64, 64)
    before = q.clone()
    _, _, (launch,) = run(q, q, scale=scale)
    assert launch["scale"] == launched
    assert launch["q"] != q.data_ptr()
    assert launch["k"] == q.data_ptr()
    assert torch.equal(q, before)


def test_grouped_heads_of_one_query_row_are_the_rows_of_a_tile(run: Runner) -> None:
    _, _, (launch,) = run(tensor(2, 8, 1, 64), tensor(2, 2, 64, 64))
    assert (launch["heads"], launch["rows"]) == (2, 4)


def test_without_keys_nothing_is_launched(run: Runner) -> None:
    out, lse, launches = run(tensor(1, 2, 3, 64), tensor(1, 2, 0, 64))
    assert launches == []
    assert not out.any()
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))


def test_a_launch_that_fails_says_what_was_asked(run: Runner) -> None:
    q = tensor(1, 2, 64, 64)
    text = r"flashmoe:driver: cuLaunchKernel failed: 1; kernel flashmoe_\w+, grid 2, block 128 threads, \d+ bytes of dynamic"
    with pytest.raises(RuntimeError, match=text):
        run(q, q, fails=True)


VarlenRunner = Callable[..., tuple[Tensor, Tensor, list[Launch]]]


@pytest.fixture
def run_varlen(library: ctypes.CDLL) -> VarlenRunner:
    """Calls the forward of ragged, paged and windowed attention; returns out, lse and what was launched."""

    def call(
        q: Tensor, k: Tensor, most: tuple[int, int], *, gpu: int = 90, v: Tensor | None = None, **given: Tensor
    ) -> tuple[Tensor, Tensor, list[Launch]]:
        library.fake_gpu(gpu, MULTIPROCESSORS, False, False)
        optional = [given.get(name) for name in ("cu_seqlens_q", "seqused_k", "block_table", "sinks", "mask")]
        out, lse = torch.ops.flashmoe_fake.varlen(q, k, k if v is None else v, *optional, *most)
        return out, lse, [json.loads(line) for line in library.fake_log().decode().splitlines()]

    return call


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(page: int, pages: int = 64, heads: int = 2, head_dim: int = 64) -> tuple[Tensor, dict[str, Tensor]]:
    """K, and the arguments that give the pages of two sequences."""
    table = torch.arange(pages, dtype=torch.int32).view(2, -1)
    return tensor(pages, page, heads, head_dim), {"seqused_k": ints(90, 7), "block_table": table}


def test_a_ragged_grid_holds_the_most_tiles_that_there_can_be(run_varlen: VarlenRunner) -> None:
    k, pages = paged(16)
    for rows, first, grid in (
        (40, 10, 2 * 2),
        (700, 200, 2 * (-(-500 // 128) * 2)),
        (3000, 1, 2 * (-(-3000 // 128) + 2)),
    ):
        longest, cu_seqlens_q = rows - first, ints(0, first, rows)
        _, _, (launch,) = run_varlen(tensor(rows, 2, 64), k, (longest, 512), cu_seqlens_q=cu_seqlens_q, **pages)
        assert launch["symbol"] == "flashmoe_attention_chunk_forward_sm90_f16_d64"
        assert (launch["grid"], launch["is_ragged"], launch["maps"]) == (grid, True, 4)
        assert launch["key_promotion"] == 2  # 128 bytes
        assert not launch["has_counter"]
    _, _, (launch,) = run_varlen(tensor(40000, 2, 64), k, (39999, 512), cu_seqlens_q=ints(0, 1, 40000), **pages)
    assert (launch["grid"], launch["has_counter"]) == (MULTIPROCESSORS, True)


def test_small_pages_are_not_for_the_copy_engine(run_varlen: VarlenRunner) -> None:
    for page, family in ((8, "sm90"), (48, "sm90"), (528, "sm90"), (4, "sm80"), (3, "sm80")):
        k, pages = paged(page)
        _, _, (launch,) = run_varlen(tensor(2, 4, 90, 64), k, (90, 512), **pages)
        assert f"_{family}_" in launch["symbol"], page


def test_heads_of_one_row_each_are_folded_for_kernels_of_many_rows(run_varlen: VarlenRunner) -> None:
    k, pages = paged(16)
    mask = torch.ones(2, 40, 1, 512, dtype=torch.bool)  # 20 heads of a group: more than a decoding kernel has rows
    out, lse, (launch,) = run_varlen(tensor(2, 40, 1, 64), k, (1, 512), gpu=80, mask=mask, **pages)  # Hopper has chunks
    assert (launch["heads"], launch["rows"], launch["folded"], launch["is_ragged"]) == (2, 20, 20, False)
    assert launch["mask_strides"] == [20 * 512, 512]
    assert torch.equal(out, torch.ones_like(out))
    assert lse.shape == (2, 40, 1)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_kernels_make_rows_of_heads_themselves(run_varlen: VarlenRunner, rows: int, is_ragged: bool) -> None:
    k, pages = paged(16)
    q, cu_seqlens_q = (
        (tensor(2 * rows, 8, 64), ints(0, rows, 2 * rows)) if is_ragged else (tensor(2, 8, rows, 64), None)
    )
    _, _, (launch,) = run_varlen(q, k, (rows, 512), cu_seqlens_q=cu_seqlens_q, **pages)
    assert launch["symbol"].startswith("flashmoe_attention_decode_")
    assert (launch["heads"], launch["rows"], launch["folded"], launch["is_ragged"]) == (8, rows, 4, is_ragged)


def test_scores_with_a_function_have_a_kernel_of_their_own(run_varlen: VarlenRunner) -> None:
    q = tensor(2, 2, 65, 64)
    for mask, variant in ({}, ""), ({"mask": torch.ones(2, 2, 65, 65, dtype=torch.bool)}, "_scores"):
        _, _, (launch,) = run_varlen(q, q, (65, 65), **mask)
        assert launch["symbol"] == f"flashmoe_attention_varlen_forward_sm90_f16_d64{variant}"


def test_value_columns_of_no_whole_pieces_are_padded_alone(run_varlen: VarlenRunner) -> None:
    q, k = tensor(2, 2, 65, 64), tensor(2, 2, 65, 64)
    out, _, (launch,) = run_varlen(q, k, (65, 65), v=tensor(2, 2, 65, 59))
    assert (launch["q"], launch["k"]) == (q.data_ptr(), k.data_ptr())
    assert out.shape == (2, 2, 65, 59)
    assert torch.equal(out, torch.ones_like(out))


def test_without_keys_the_sinks_are_left(run_varlen: VarlenRunner) -> None:
    sinks = torch.tensor([1.0, 2.0])
    for q, cu, expected in (
        (tensor(1, 2, 3, 64), None, [[[1.0] * 3, [2.0] * 3]]),
        (tensor(3, 2, 64), ints(0, 3), [[1.0] * 3, [2.0] * 3]),
    ):
        more = {} if cu is None else {"cu_seqlens_q": cu}
        out, lse, launches = run_varlen(q, tensor(1, 2, 0, 64), (3, 0), sinks=sinks, **more)
        assert launches == []
        assert not out.any()
        assert lse.tolist() == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((2**31 - 1, MOST_LAUNCHES, 1024), ""),
        ((2**31, 1, 1), "needs 2147483648 thread blocks"),
        ((1, MOST_LAUNCHES + 1, 1), "one too many"),
        ((1, 1, 1025), "1025 tile counters"),
    ],
)
def test_how_much_a_list_holds(library: ctypes.CDLL, given: tuple[int, int, int], words: str) -> None:
    library.fake_list.restype = ctypes.c_char_p
    library.fake_gpu(90, MULTIPROCESSORS, False, False)
    said = library.fake_list(ctypes.c_longlong(given[0]), given[1], ctypes.c_longlong(given[2])).decode()
    assert words in said
    assert bool(words) == bool(said)
    assert len(library.fake_log().decode().splitlines()) == (0 if words else given[1])
