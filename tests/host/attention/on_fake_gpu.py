"""Run by tests/host/test_attention_launch.py in a process of its own, whose extension has a driver without a GPU: what attention's
operators launch on each GPU, and what comes out."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe import _extension, operator
from tests.attention import test_varlen_gradients, varlen_reference
from tests.attention.gradients import autograd_gradients, plain_function
from tests.attention.reference import Problem
from tests.attention.varlen_reference import Band, Ragged, check_ragged

LIBRARY = ctypes.CDLL(os.environ["FLASHMOE_LIBRARY"])
LIBRARY.fake_log.restype = ctypes.c_char_p
EVERY = operator.find_operators
operator.find_operators = lambda: tuple(o for o in EVERY() if o.schema or hasattr(torch.ops.flashmoe, o.name))
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
ON_A_GPU = torch.library.Library("flashmoe", "IMPL")
DTYPE = torch.bfloat16
LIMIT = 2e-2  # of the largest gradient, as in tests/attention/test_varlen_gradients.py
CAPABILITIES = (80, 90)


@pytest.fixture(scope="session", autouse=True)
def calls_for_the_cpu_run_the_gpus_path() -> None:
    assert flashmoe.attention is not None  # the operators are there
    in_python = {found.name for found in operator.find_operators() if found.schema}
    names = {
        name.removeprefix("flashmoe::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("flashmoe::")
    }
    for name in sorted(names - in_python):
        overload = getattr(torch.ops.flashmoe, name).default
        if overload.has_kernel_for_dispatch_key("CUDA"):
            with warnings.catch_warnings(action="ignore"):
                ON_A_GPU.impl(overload, functools.partial(overload.redispatch, CUDA), "CPU")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor that is made without values is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(1)
    monkeypatch.setattr(varlen_reference, "assert_ran_here", lambda device: None)
    yield
    torch.use_deterministic_algorithms(False)


def begin(capability: int, multiprocessors: int = 132) -> None:
    LIBRARY.fake_gpu(capability, multiprocessors, False)


def launched() -> list[str]:
    """The operations since the GPU was chosen; nothing was wrong with them."""
    found: list[dict[str, Any]] = [json.loads(line) for line in LIBRARY.fake_log().decode().splitlines()]
    assert [launch for launch in found if launch["problem"]] == []
    return [launch["operation"].removeprefix("attention_").removeprefix("varlen_") for launch in found]


def tensors(problem: Problem, layout: str) -> list[Tensor]:
    """q, k, v and the output's gradient; "bshd": seen through a transpose."""
    shapes = [(problem.heads_q, problem.seq_q), (problem.heads_kv, problem.seq_k)]
    order = (shapes[0], shapes[1], shapes[1], shapes[0])
    if layout == "bshd":
        return [torch.randn(problem.batch, s, h, problem.head_dim).to(DTYPE).transpose(1, 2) for h, s in order]
    return [torch.randn(problem.batch, h, s, problem.head_dim).to(DTYPE) for h, s in order]


def check_dense(problem: Problem, layout: str, needs: int, with_lse: bool) -> None:
    q, k, v, grad_out = tensors(problem, layout)
    grad_lse = torch.randn(q.shape[:3]) if with_lse else None
    scale = problem.head_dim**-0.5
    out, lse = flashmoe.attention(q, k, v, causal=problem.causal, return_lse=True)
    function = plain_function(problem)
    wide = [tensor.double() for tensor in (q, k, v)]
    expected_out, expected_lse = function(*wide)
    assert (out.double() - expected_out).abs().max() <= LIMIT
    seen = expected_lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    assert (lse.double() - expected_lse)[seen].abs().max() <= 1e-3
    if grad_lse is not None:
        grad_lse = grad_lse.masked_fill(~seen, 0.0)
    found = torch.ops.flashmoe._flash_attention_backward(
        grad_out, grad_lse, q, k, v, out, lse, scale, problem.causal, needs
    )
    expected = autograd_gradients(function, (q, k, v), torch.float64, grad_out, grad_lse)
    for index, (name, ours, wanted) in enumerate(zip("qkv", found, expected, strict=True)):
        if not needs >> index & 1:
            assert ours is None
            continue
        assert ours.shape == wanted.shape
        assert (ours.double() - wanted).abs().max() <= LIMIT * wanted.abs().max(), f"d{name}"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("causal", "layout"), [(False, "bhsd"), (True, "bshd")])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 59), (2, 1, 128)])
def test_dense(capability: int, causal: bool, layout: str, heads: int, kv_heads: int, head_dim: int) -> None:
    begin(capability)
    problem = Problem(70, 65, head_dim, heads, kv_heads, 2, causal)
    check_dense(problem, layout, 7, with_lse=causal)
    assert launched()[-2:] == ["backward_dq", "backward_dkv"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("needs", range(1, 7))
def test_kernels_of_other_gradients_do_not_run(capability: int, needs: int) -> None:
    begin(capability)
    check_dense(Problem(65, 70), "bhsd", needs, with_lse=True)
    first = "backward_dq" if needs & 1 else "row_dot"
    assert launched()[1:] == [first, *(["backward_dkv"] if needs & 6 else [])]
    assert ("backward_dkv" if needs & 6 else "backward_dq") in _extension.last_kernel()


def test_nothing_runs_if_one_of_the_kernels_cannot() -> None:
    """Of a width that no other test here has: a kernel that was loaded once is not asked for again."""
    begin(80)
    q, k, v, grad_out = tensors(Problem(20, 20, 256), "bhsd")
    out, lse = flashmoe.attention(q, k, v, return_lse=True)
    before = launched()
    LIBRARY.fake_missing_kernels(b"attention_backward_dkv")
    try:
        with pytest.raises(RuntimeError, match="cuModuleGetFunction"):
            torch.ops.flashmoe._flash_attention_backward(grad_out, None, q, k, v, out, lse, 0.0625, False, 7)
    finally:
        LIBRARY.fake_missing_kernels(b"")
    assert launched() == before


@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_form(causal: bool) -> None:
    begin(90, 1)
    check_dense(Problem(1024, 1100, 16, 1, 1, 2, causal), "bhsd", 7, with_lse=True)
    assert launched()[-3:] == ["backward_fused_prepare", "backward_fused", "backward_fused_convert"]


@pytest.mark.parametrize(("capability", "with_sinks"), [(80, True), (90, False)])
@pytest.mark.parametrize("band", test_varlen_gradients.BANDS, ids=str)
def test_ragged(capability: int, band: Band, with_sinks: bool) -> None:
    """Head dims of their own, spare tokens, sequences without rows or keys."""
    begin(capability)
    check_ragged(
        Ragged((65, 1, 0, 13), (65, 9, 4, 31), 4, 2, 64, 40, spare=3),
        band,
        "cpu",
        DTYPE,
        with_sinks=with_sinks,
        num_splits=1,
    )
    test_varlen_gradients._check_ragged(band, "cpu", (DTYPE,), with_sinks=with_sinks)
    assert launched()[-2:] == ["backward_dq", "backward_dkv"]


@pytest.mark.parametrize(
    ("ragged", "expected"),
    [
        (Ragged((150, 3), (4500, 700), 4, 2, 64, 64, spare=3), ["chunk_forward", "combine"]),
        (Ragged((20, 3), (2700, 20), 12, 2, 64, 40), ["chunk_forward", "combine"]),
        (Ragged((5, 3, 0), (200, 100, 9), 24, 2, 64, 64), ["chunk_forward"]),
    ],
    ids=str,
)
def test_chunks(ragged: Ragged, expected: list[str]) -> None:
    """Few rows, whose keys one block or several read; with sinks, and rows that see no key."""
    begin(90)
    check_ragged(ragged, Band(causal=True), "cpu", DTYPE, with_sinks=True, num_splits=0)
    assert launched() == expected


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_split_divides_a_batch_as_its_sequences_alone_would_be(capability: int) -> None:
    """Those of up to 16 rows are decoded, whatever the longest has."""
    begin(capability)
    ragged = Ragged((65, 16, 0, 3, 17), (65, 90, 4, 31, 17), 4, 2, 64, 40, spare=3)
    check_ragged(ragged, Band(causal=True), "cpu", DTYPE, with_sinks=True, num_splits=1)
    assert launched() == ["forward", "decode"]
    check_ragged(ragged, Band(causal=True), "cpu", DTYPE, with_sinks=True)
    assert launched()[2:] == ["forward"]


def test_ragged_by_the_fused_form() -> None:
    begin(90, 1)
    ragged = Ragged((1030, 3), (1030, 1100), 2, 2, 16, 16, spare=2)
    q, k, v = (tensor.nan_to_num().requires_grad_() for tensor in ragged.tensors("cpu", DTYPE))
    out, lse = flashmoe.attention_varlen(q, k, v, *ragged.cu_seqlens("cpu"), *ragged.longest, return_lse=True)
    tokens = sum(ragged.lengths_q)
    grad_out, grad_lse = torch.randn(tokens, 2, 16).to(DTYPE), torch.randn(2, tokens)
    found = torch.autograd.grad((out[:tokens], lse[:, :tokens]), (q, k, v), (grad_out, grad_lse))
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    outputs = varlen_reference.expected(ragged, *wide, Band())
    expected = torch.autograd.grad(outputs, wide, (grad_out.double(), grad_lse.double()))
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.double() - wanted).abs().max() <= LIMIT * wanted.abs().max()
    assert launched()[-3:] == ["backward_fused_prepare", "backward_fused", "backward_fused_convert"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("page_size", [0, 4, 16])
@pytest.mark.parametrize("head_dim", [64, 59])
def test_new_keys_go_behind_the_lengths(capability: int, page_size: int, head_dim: int) -> None:
    """Into a dense cache or pages; those of the last sequence fill it."""
    begin(capability)
    lengths = torch.tensor([5, 0, 29], dtype=torch.int32)
    new = [torch.randn(3, 2, 3, head_dim).to(DTYPE) for _ in range(2)]
    table = torch.randperm(3 * 32 // page_size).int().view(3, -1) if page_size else None
    shape = (3 * 32 // page_size, page_size, 2, head_dim) if page_size else (3, 2, 32, head_dim)
    caches = [torch.zeros(shape, dtype=DTYPE) for _ in range(2)]
    torch.ops.flashmoe.attention_append_(*caches, *new, lengths, table)
    assert launched() == ["append"]
    for cache, values in zip(caches, new, strict=True):
        seen = cache if table is None else cache[table.long()].flatten(1, 2).transpose(1, 2)
        for sequence, length in enumerate(lengths.tolist()):
            assert torch.equal(seen[sequence, :, length : length + 3], values[sequence])
            assert not seen[sequence, :, :length].any()
            assert not seen[sequence, :, length + 3 :].any()
