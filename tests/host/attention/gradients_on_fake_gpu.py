"""Gradients; run by tests/host/test_attention_launch.py, like on_fake_gpu.py."""

import math
from typing import Any

import pytest
import torch

# isort: off
# Before flashmoe: it says which operators this library has.
from tests.host.attention.on_fake_gpu import (  # noqa: F401
    CAPABILITIES,
    LIBRARY,
    begin,
    calls_for_the_cpu_run_the_gpus_path,
    launched,
    launches,
    poisoned_memory,
)

# isort: on
import flashmoe
from flashmoe import _extension
from flashmoe.attn import bias_gradient
from flashmoe.attn.options import VarlenBackward
from flashmoe_tools.operations.attention.reference import ScoreOptions
from tests.attention import test_bias_gradient, test_dropout, varlen_reference
from tests.attention.reference import Problem
from tests.attention.varlen_reference import Band, Ragged
from tests.host.attention.dense_calls import DTYPE, LIMIT, check_dense, tensors


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("needs", range(1, 7))
def test_kernels_of_other_gradients_do_not_run(capability: int, needs: int) -> None:
    begin(capability)
    check_dense(Problem(65, 70), "bhsd", needs, with_lse=True)
    first = "backward_dq" if needs & 1 else "row_dot"
    assert launched()[1:] == [first, *(["backward_dkv"] if needs & 6 else [])]
    assert ("backward_dkv" if needs & 6 else "backward_dq") in _extension.last_kernel()


def test_nothing_runs_if_one_of_the_kernels_cannot() -> None:
    """With a width that no other test here has, because a kernel that was loaded once is not loaded again."""
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


@pytest.mark.parametrize(
    ("capability", "sizes", "letters", "options", "dropout_p"),
    [
        (80, (2, 4, 2, 70, 33, 24, 24), "bhqk", ScoreOptions(causal=True), 0.0),
        (90, (3, 4, 4, 30, 65, 24, 24), "1hqk", ScoreOptions(), 0.0),
        (80, (2, 3, 1, 65, 70, 20, 36), "b1qk", ScoreOptions(window=(33, 5)), 0.0),
        (90, (2, 2, 2, 70, 70, 64, 16), "1h1k", ScoreOptions(causal=True, softcap=2.0), 0.0),
        (90, (2, 2, 1, 80, 75, 24, 24), "bhq1", ScoreOptions(scale=-0.2), 0.0),
        (80, (2, 2, 2, 70, 66, 24, 24), "b111", ScoreOptions(), 0.0),
        (90, (2, 4, 2, 33, 40, 24, 24), "qk", ScoreOptions(causal=True), 0.3),
        (80, (1, 2, 2, 33, 40, 24, 72), "bhqk", ScoreOptions(), 0.0),
    ],
)
def test_gradients_of_a_mask(
    capability: int,
    sizes: tuple[int, ...],
    letters: str,
    options: ScoreOptions,
    dropout_p: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(test_bias_gradient.DTYPES, "cpu", [DTYPE])
    monkeypatch.setattr(bias_gradient, "_on_cpu", bias_gradient._by_kernels)
    begin(capability)
    test_bias_gradient.test_against_autograd("cpu", (sizes, letters, options, dropout_p))
    symbols = [launch["symbol"] for launch in launches() if launch["operation"] == "attention_bias_gradient"]
    assert all(f"_d{64 if max(sizes[5:]) <= 64 else 128}" in symbol for symbol in symbols)
    assert symbols


@pytest.mark.parametrize(
    ("capability", "case"),
    [
        (80, ((4, 2), 40, 50, 20, ScoreOptions(causal=True), "alibi")),
        (90, ((4, 2), 50, 40, 24, ScoreOptions(causal=True), "alibi")),
        (90, ((3, 3), 70, 30, 24, ScoreOptions(), "")),
        (80, ((2, 1), 20, 65, 24, ScoreOptions(causal=True, softcap=15.0), "")),
        (90, ((2, 2), 33, 60, 16, ScoreOptions(window=(33, 5)), "mask")),
        (90, ((8, 2), 1, 70, 24, ScoreOptions(), "")),
        (90, ((2, 1), 20, 65, 144, ScoreOptions(causal=True), "")),
        (90, ((1, 1), 520, 530, 16, ScoreOptions(causal=True), "")),  # by the fused form
    ],
)
def test_dropout_and_its_gradients(capability: int, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_dropout.DTYPES, "cpu", [DTYPE])
    begin(capability)
    test_dropout.test_dense_attention_and_its_gradients("cpu", case)
    assert "dropout" in launched()[0]
    assert any("backward_fused" in name for name in launched()) is (case[1] >= 512)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["dense", "softcap", "sinks", "codes", "pages", "no page", "no token"])
def test_rows_that_see_no_key(capability: int, kind: str) -> None:
    """Without any key no attention kernel is launched: zeros, and the log-sum-exp of the sinks only."""
    if kind == "codes" and capability < 90:
        capability = 89
    begin(capability)
    q = torch.randn(2, 4, 5, 16).to(DTYPE)
    k = torch.empty(2, 2, 0, 16, dtype=torch.float8_e4m3fn if kind == "codes" else DTYPE)
    sinks = torch.randn(4) if kind == "sinks" else None
    lengths: list[Any] = [None] * 4
    if kind == "pages":
        k = torch.empty(0, 16, 2, 16, dtype=DTYPE)
        lengths[2:] = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)
    if kind == "no page":  # a sequence may have one page, but there is none
        k = torch.empty(0, 16, 2, 16, dtype=DTYPE)
        lengths[2:] = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    if kind == "no token":
        k, lengths[1] = torch.empty(0, 2, 16, dtype=DTYPE), torch.zeros(3, dtype=torch.int32)
    numbers = (5, 16 if kind.startswith("no ") else 0, 0.25, -1, -1, 3.0 if kind == "softcap" else 0.0, 0)
    operators = torch.ops.flashmoe
    if kind == "dense":
        out, lse = operators.flash_attention_forward(q, k, k, 0.25, False)
    elif kind == "codes":
        out, lse = operators.attention_e4m3_forward(q, k, k, *lengths, sinks, None, *numbers, None, None, 1.0, 1.0)
    else:
        out, lse = operators.attention_varlen_forward(q, k, k, *lengths, sinks, None, *numbers)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf) if sinks is None else sinks.view(1, 4, 1).expand(2, 4, 5))
    assert not [name for name in launched() if "forward" in name or "decode" in name]


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("needs", range(1, 8))
def test_gradients_that_nobody_needs_have_no_memory(needs: int, is_ragged: bool) -> None:
    """Unless a kernel computes them together with one that is needed."""
    shapes = ((1, 70, 4, 16), (1, 45, 2, 16)) if not is_ragged else ((70, 4, 16), (45, 2, 16))
    q, k = (torch.zeros(shape, dtype=DTYPE) for shape in shapes)
    begin(80)
    LIBRARY.fake_computing(0)
    operators = torch.ops.flashmoe
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        if is_ragged:
            ends = [torch.tensor([0, count], dtype=torch.int32) for count in (70, 45)]
            lse = torch.zeros(4, 70)
            operators._attention_varlen_backward(
                q, None, q, k, k, *ends, None, None, None, q, lse, 70, 45, 0.25, -1, -1, 0.0, needs
            )
        else:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            operators._flash_attention_backward(q, None, q, k, k, q, torch.zeros(1, 4, 70), 0.25, False, needs)
    LIBRARY.fake_computing(1)
    taken = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert (taken.count(2 * q.numel()), taken.count(2 * k.numel())) == (needs & 1, 2 * (needs & 6 != 0))


@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (9, 0)])
def test_gradients_without_rows_or_keys_are_zeros(rows: int, keys: int) -> None:
    """And nothing is launched."""
    begin(90)
    q, k, v = (torch.randn(count, 2, 16, requires_grad=True).to(DTYPE) for count in (rows, keys, keys))
    ends = [torch.tensor([0, count, count], dtype=torch.int32) for count in (rows, keys)]
    out = flashmoe.attention_varlen(q, k, v, *ends, rows, keys)
    before = len(launches())
    for found in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
        assert torch.equal(found, torch.zeros_like(found))
    assert len(launches()) == before


@pytest.mark.parametrize(
    ("rows", "multiprocessors", "is_taller", "is_bool"),
    [(514, 132, False, False), (512, 1, True, False), (514, 132, False, True), (512, 1, True, True)],
)
def test_a_mask_that_is_streamed(rows: int, multiprocessors: int, is_taller: bool, is_bool: bool) -> None:
    begin(90, multiprocessors)
    shapes = ((4, rows), (1, 520), (1, 520))
    q, k, v = (torch.randn(1, many, length, 16).to(DTYPE).requires_grad_() for many, length in shapes)
    mask = torch.randn(1, 1, rows, 520)
    mask = mask > 0 if is_bool else mask.to(DTYPE)
    out = flashmoe.attention(q, k, v, attn_mask=mask)
    converted = ["attention_bool_mask"] * is_bool
    found_kernels = launches()
    assert [launch["operation"] for launch in found_kernels] == [*converted, "attention_mask_forward"]
    assert found_kernels[-1]["symbol"].endswith("m256") == is_taller
    found = torch.autograd.grad(out, (q, k, v), out.detach())
    operations = launched()
    assert "mask_forward" in operations
    assert "mask_backward_fused" in operations
    wide = [one.detach().double().requires_grad_() for one in (q, k, v)]
    wide_mask = mask if is_bool else mask.double()
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, wide_mask, enable_gqa=True)
    for one, other in zip(
        (out, *found), (exact, *torch.autograd.grad(exact, wide, out.detach().double())), strict=True
    ):
        assert (one - other).abs().max() <= LIMIT * other.abs().max().clamp(min=1.0)


@pytest.mark.parametrize(
    ("shape", "options", "streams"),
    [
        *(((1, 1, 512, 515), {}, True), ((2, 1, 512, 515), {}, True), ((1, 1, 1, 515), {}, True)),
        *(((1, 1, 512, 1), {}, True), ((1, 4, 512, 515), {}, True)),
        *(((1, 1, 512, 515), {"softcap": 3.0}, False), ((1, 1, 512, 515), {"window": (300, 20)}, True)),
        *(((1, 1, 512, 515), {"consistent": True}, False), ((1, 1, 512, 515), "FLASHMOE_CONSISTENT", False)),
    ],
    ids=str,
)
def test_a_bool_mask_is_streamed(
    shape: tuple[int, ...], options: Any, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an additive mask of 0 and -inf with whole rows: expanded or not, bytes above 1, rows that see nothing."""
    begin(90)
    if isinstance(options, str):
        monkeypatch.setenv(options, "1")
        options = {}
    q, k, v = (torch.randn(shape[0], many, length, 8).to(DTYPE) for many, length in ((4, 512), (1, 515), (1, 515)))
    mask = torch.randint(0, 3, shape, dtype=torch.uint8)
    if shape[2] > 1 and shape[3] > 1:
        mask[..., 7, :] = 0
    mask = mask.view(torch.bool)
    bits = mask.view(torch.uint8) != 0  # read as it is
    LIBRARY.fake_computing(int(streams))
    found = flashmoe.attention(q, k, v, attn_mask=mask, return_lse=True, **options)
    LIBRARY.fake_computing(1)
    assert ("mask_forward" in launched()) == streams
    if streams:
        same = flashmoe.attention(q, k, v, attn_mask=bits, return_lse=True, consistent=True, **options)
        torch.testing.assert_close(found, same, rtol=1e-2, atol=1e-2)
    launches()


def test_no_additive_mask_of_more_than_a_gibibyte_is_made() -> None:
    begin(90)
    LIBRARY.fake_computing(0)
    q, k = torch.zeros(1, 4, 1 << 15, 16, dtype=DTYPE), torch.zeros(1, 1, (1 << 14) + 1, 16, dtype=DTYPE)
    flashmoe.attention(q, k, k, attn_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    LIBRARY.fake_computing(1)
    assert "mask_forward" not in launched()


@pytest.mark.parametrize(("head_dim", "heads", "stores"), [(64, 252, True), (64, 253, False), (65, 253, True)])
def test_a_shared_mask_s_gradient_of_64_columns_is_stored_up_to_128_mib(
    head_dim: int, heads: int, stores: bool
) -> None:
    q, k = (torch.zeros(1, heads, length, head_dim, dtype=DTYPE) for length in (512, 520))
    mask = torch.zeros(1, 1, 512, 520, dtype=DTYPE)
    LIBRARY.fake_computing(0)
    begin(90)
    lse = torch.zeros(1, heads, 512)
    arguments = (q, None, q, k, k, *[None] * 4, mask, q, lse, 512, 520, head_dim**-0.5, -1, -1, 0.0)
    bias_gradient._mask_backward_by_kernels(VarlenBackward(*arguments, 15))
    LIBRARY.fake_computing(1)
    assert ("scores_sum" in launched(), "bias_gradient" in launched()) == (stores, not stores)


@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "is_split", "stores"),
    [
        *((2, 16, -1, False, True), (1, 72, -1, False, True), (1, 16, -1, False, True)),
        *((2, 16, 40, False, False), (2, 16, -1, True, False)),
    ],
)
def test_a_streamed_mask_s_gradient(
    heads: int, head_dim: int, window: int, is_split: bool, stores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel of the other gradients, even if none is needed; with a window or in the split form by its own."""
    begin(90)
    monkeypatch.setenv("FLASHMOE_SPLIT_BACKWARD", str(int(is_split)))
    shapes = ((2, 514), (1, 520), (1, 520))
    q, k, v = (torch.randn(1, many, length, head_dim).to(DTYPE) for many, length in shapes)
    mask, upstream = torch.randn(1, heads, 514, 520).to(DTYPE), torch.randn(1, 2, 514, head_dim).to(DTYPE)
    options: dict[str, Any] = {"attn_mask": mask, "window": None if window < 0 else (window, window)}
    out, lse = flashmoe.attention(q, k, v, **options, return_lse=True)
    launches()
    arguments = (upstream, None, q, k, v, *[None] * 4, mask, out, lse, 514, 520, head_dim**-0.5, window, window, 0.0)
    every, alone = (bias_gradient._mask_backward_by_kernels(VarlenBackward(*arguments, needs)) for needs in (15, 0))
    operations = launched()
    assert operations.count("mask_backward_fused") == (2 if stores else int(window < 0 and not is_split))
    assert operations.count("bias_gradient") == 2 * (not stores)
    assert operations.count("scores_sum") == 2 * (stores and heads == 1)
    behind = ["scores_sum"] if stores and heads == 1 else []  # while dS is in the cache
    assert not stores or operations[-2 - len(behind) :] == ["mask_backward_fused", *behind, "backward_fused_convert"]
    assert torch.equal(every[4], alone[4])
    assert [one.numel() for one in alone[:4]] == [0] * 4
    leaves = [one.detach().double().requires_grad_() for one in (q, k, v, mask)]
    hidden = torch.zeros(514, 520)
    if window >= 0:
        distance = torch.arange(520) - torch.arange(514)[:, None] - 6
        hidden[distance.abs() > window] = -math.inf
    exact = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], leaves[3] + hidden, enable_gqa=True)
    wanted = torch.autograd.grad(exact, leaves, upstream.double())
    for one, other in zip((*every[:3], every[4]), wanted, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= LIMIT * other.abs().max().clamp(min=1.0)


def test_a_mask_s_gradient_is_of_a_mask_that_was_added() -> None:
    begin(90)
    q, mask, rows = torch.randn(1, 2, 5, 16).to(DTYPE), torch.zeros(1, 1, 5, 5).to(DTYPE), torch.zeros(1, 2, 5)
    operator_ = torch.ops.flashmoe._attention_bias_gradient
    for other in (mask > 0, torch.zeros(1, 2)):
        with pytest.raises(RuntimeError, match=r"attention\.companion_dtype\|name=attn_mask\|needed=bfloat16\|found="):
            operator_(q, q, q, q, other, rows, rows, 0.25, -1, -1, 0.0, 0.0, None)
    assert operator_(q, q, q, q, mask, rows, rows, 0.25, -1, -1, 0.0, 0.0, None).shape[1:] == mask.shape
