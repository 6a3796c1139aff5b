"""The choices that attention's Python code makes, including those that only a GPU's calls, an engine or a command line reach."""

import itertools
import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashmoe
from flashmoe import __main__, errors
from flashmoe.attn import (
    backward,
    bias_gradient,
    dropout,
    fake,
    flops,
    kvcache,
    layout,
    merge,
    options,
    out_variant,
    sdpa_dispatch,
    varlen_backward,
)
from flashmoe.errors import ArgumentError, DifferentiationError, FlashmoeError, ShapeError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's warnings about itself


def test_how_large_a_mask_of_dropout_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "MOST_PROBABILITIES", 24)
    state = torch.tensor((1, 2))
    assert flashmoe.dropout_mask(state, 0.5, 1, 2, 3, 4).shape == (1, 2, 3, 4)
    for sizes in ((2, 2, 3, 4), (1, 5, 1, 5), (25, 1, 1, 1), (1, 1, 1, 25)):
        with pytest.raises(ArgumentError, match=rf"keys is {math.prod(sizes)}; supported"):
            flashmoe.dropout_mask(state, 0.5, *sizes)
    for wrong, found in ((None, "None"), (state.int(), r"torch.int32 \[2\]"), (state[:1], r"torch.int64 \[1\]")):
        with pytest.raises(ArgumentError, match=f"found {found}; pass"):
            flashmoe.dropout_mask(wrong, 0.5, 1, 2, 3, 4)  # type: ignore[arg-type]


def test_calls_that_were_accepted_are_forgotten_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted: set[Any] = set()
    monkeypatch.setattr(kvcache, "_accepted", accepted)
    monkeypatch.setattr(kvcache, "_MOST_ACCEPTED", 2)
    kept = []
    for heads in (1, 2, 3, 3, 1):
        cache = torch.zeros(1, heads, 8, 16)
        rows = [cache[:, :, :1].clone() for _ in range(3)]
        lengths = torch.tensor([1], dtype=torch.int32)
        flashmoe.attention_with_kvcache(rows[0], cache, cache.clone(), *rows[1:], cache_seqlens=lengths)
        kept.append(len(accepted))
    assert kept == [1, 2, 1, 1, 2]


def test_a_tracer_is_not_warned_about_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sizes are tensors: checking them would warn about a trace that only holds for these sizes."""
    monkeypatch.setattr(layout, "checks_left", 16)
    torch.jit.trace(lambda q: layout.warn_if_transposed(q, q) or q + 1, torch.zeros(1, 64, 8, 16), check_trace=False)


@pytest.mark.parametrize("sizes", [(), (3,), (3, 0), (3, 1, 0)])
def test_the_scale_of_a_query_without_columns(sizes: tuple[int, ...]) -> None:
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"^q must|head_dim"):
        flashmoe.attention_varlen(torch.zeros(sizes), *[torch.zeros(3, 1, 8)] * 2, ends, ends, 3, 3)


@pytest.mark.parametrize("needs", range(16))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_tracer_hears_of_gradients(device: str, needs: int) -> None:
    """Each gradient only if needed; row_dot only on GPUs; the sinks' gradient only if there are sinks."""
    with FakeTensorMode():
        q, k, lse = (torch.empty(sizes, device=device) for sizes in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 4, 3)))
        for sinks in (None, torch.empty(4, device=device)):
            given = (q, None, q, k, k, None, None, None, sinks, None, q, lse, 0, 0, 1.0, -1, -1, 0.0, needs)
            *gradients, row_dot = fake.varlen_kernels(*given)
            shapes = [None if one is None else one.shape for one in gradients]
            assert shapes == [one.shape if needs >> at & 1 else None for at, one in enumerate((q, k, k))]
            assert (row_dot is None) is (device == "cpu")
            *gradients, of_sinks = fake.varlen_backward(*given)
            assert [one.dim() == 4 for one in gradients] == [bool(needs >> at & 1) for at in range(3)]
            assert of_sinks.shape == (4 if sinks is not None and needs & 8 else 0,)


def test_what_one_call_of_the_operator_answers() -> None:
    """For scaled_dot_product_attention: follows torch's own rules for shapes."""
    sizes = [(2, 4, 3, 8), (1, 4, 3, 8), (2, 2, 3, 8), (2, 4, 5, 8), (4, 3, 8), (1, 2, 4, 3, 8)]
    for q, k, causal, gqa in itertools.product(sizes, sizes, (False, True), (False, True)):
        is_square = not causal or q[-2] == k[-2]
        fits = len(q) == len(k) == 4 and q[0] == k[0] and (q[1] == k[1] or gqa) and is_square
        assert fake.matches_sdpa(q, k, causal, gqa) is fits


@pytest.mark.parametrize("has_products", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_products_of_rows_that_the_kernels_left(ragged: bool, has_products: bool) -> None:
    """The sinks' gradient is computed from them; if there are none, from the upstream gradient and the result."""
    q = torch.randn((5, 2, 8) if ragged else (1, 2, 5, 8))
    ends = torch.tensor([0, 5], dtype=torch.int32) if ragged else None
    lse, sinks, grad_lse, products = (torch.randn(sizes) for sizes in (q.shape[:-1], (2,), q.shape[:-1], q.shape[:-1]))
    lse, grad_lse, products = (one.mT.contiguous() if ragged else one for one in (lse, grad_lse, products))
    given = varlen_backward.VarlenBackward(
        q, grad_lse, q, q, q, ends, ends, None, sinks, None, q, lse, 5, 5, 1.0, -1, -1, 0.0, 8
    )
    found = varlen_backward.run(lambda *_: (None, None, None, products if has_products else None), given)
    if not has_products:
        products = (q * q).sum(-1)
        products = (products.mT if ragged else products) - grad_lse
    rows = (sinks[:, None] - lse).exp() * products
    torch.testing.assert_close(found.gradients[3], -rows.sum(-1) if ragged else -rows.sum((0, 2)))
    assert [one.shape for one in found.gradients[:3]] == [(0,)] * 3


def test_the_first_calls_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 64, 2, 8)
    monkeypatch.setattr(layout, "checks_left", 0)
    flashmoe.attention(q, q, q)
    assert layout.checks_left == 0
    monkeypatch.setattr(layout, "checks_left", 1)
    with pytest.warns(UserWarning, match="64 heads of 2 rows"):
        flashmoe.attention(q, q, q)


@pytest.mark.parametrize("found", range(8))
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64", "no rows", "no keys", "wide values"])
def test_who_computes_a_gradient(monkeypatch: pytest.MonkeyPatch, kind: str, found: int) -> None:
    """The kernels compute the gradients that they support; otherwise torch operations do."""
    dtype = getattr(torch, kind) if hasattr(torch, kind) else torch.float32
    q, k = torch.randn(1, 2, 0 if kind == "no rows" else 3, 8), torch.randn(1, 2, 0 if kind == "no keys" else 5, 8)
    v, used = k[..., :4] if kind == "wide values" else k, list[str]()
    q, k, v = (one.to(dtype) for one in (q, k, v))
    out, lse = torch.randn_like(q[..., : v.shape[-1]]), torch.zeros(q.shape[:3])

    def kernels(*given: Any) -> tuple[Tensor | None, ...]:
        used.append("kernels")
        return tuple(torch.full_like(one, 3.0) if found >> at & 1 else None for at, one in enumerate((q, k, v)))

    def other(*given: Any) -> tuple[Tensor, ...]:
        used.append("ragged")
        ragged = options.VarlenBackward(*given)
        assert (ragged.q is q, ragged.v is v, ragged.out is out, ragged.window_left) == (True, True, True, -1)
        assert (ragged.window_right, ragged.mask) == (0 if causal else -1, None)
        return q, k, v, lse

    monkeypatch.setattr(torch.ops.flashmoe, "_flash_attention_backward", SimpleNamespace(default=kernels))
    monkeypatch.setattr(varlen_backward, "backward_by_kernels", other)
    causal = found % 2 == 0
    given = (torch.randn_like(out), None, q, k, v, out, lse, 0.5, causal)
    gradients = backward.backward_by_kernels(*given)
    assert used == {"wide values": ["ragged"], "float32": ["kernels"], "bfloat16": ["kernels"]}.get(kind, [])
    if used == ["kernels"] and found:
        assert [one.dim() == 4 and bool((one == 3.0).all()) for one in gradients] == [
            bool(found >> at & 1) for at in range(3)
        ]
    elif used != ["ragged"]:
        assert all(torch.equal(one, two) for one, two in zip(gradients, backward.backward(*given), strict=True))


def test_calls_that_differ_are_accepted_one_by_one() -> None:
    """Calls that differ in anything that decides whether they are rejected have different keys."""
    rows, lengths, table, sinks = torch.zeros(2, 2, 1, 8), torch.zeros(2).int(), torch.zeros(2, 1).int(), torch.zeros(2)
    tensors = (rows, rows, rows, None, None, lengths, table, sinks, torch.zeros(2, 2, 1, 1))
    given = options.Varlen(*tensors, 3, 4, 0.5, -1, 0, 1.0, 2)  # type: ignore[arg-type]
    others = (torch.ones(2), 0.5, rows.clone())
    seen = [kvcache._layouts(given, others)]
    for at, value in enumerate(given):
        if isinstance(value, Tensor):
            changes: tuple[Any, ...] = (value.double(), value[:1])  # for caches, the append checks the rest
            changes += (value.to("meta"),) if at != 2 else ()
            changes += (None,) if at > 4 else ()
            changes += (torch.empty(*value.shape, 2)[..., 0],) if at not in (1, 2) else ()
            seen += [kvcache._layouts(given._replace(**{given._fields[at]: one}), others) for one in changes]
        elif value is not None:
            seen.append(kvcache._layouts(given._replace(**{given._fields[at]: value + 1}), others))
    seen += [kvcache._layouts(given, (*others[:at], other, *others[at + 1 :])) for at in range(3) for other in (None, 0.25, torch.ones(3))]  # fmt: skip
    assert len(set(seen)) == len(seen)
    assert kvcache._layouts(given, others) == seen[0]
    assert kvcache._layouts(given._replace(q=None), others) is kvcache._layouts(given, ("text", *others[1:])) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("has_codes", [False, True])
def test_an_engine_s_call_is_the_operator_s(has_codes: bool, is_wrong: bool) -> None:
    q, ends = torch.randn(3, 2, 16).bfloat16(), torch.tensor([0, 3], dtype=torch.int32)
    k, scale = (q.to(torch.float8_e4m3fn), torch.tensor(0.5)) if has_codes else (q, None)
    given = options.Varlen(q, k, k, ends, ends, *[None] * 4, 3, 3, 0.25, -1, -1, 0.0, 0)
    out = torch.empty(3, 1 if is_wrong else 2, 16, dtype=q.dtype)
    if is_wrong:
        with pytest.raises(ShapeError, match=r"^out must"):
            out_variant.attention_out(out, given, scale, scale)
        return
    out_variant.attention_out(out, given, scale, scale)
    scales = {"k_scale": 0.5, "v_scale": 0.5} if has_codes else {}
    assert torch.equal(out, flashmoe.attention_varlen(q, k, k, ends, ends, 3, 3, scale=0.25, **scales))


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_mask_s_gradient_as_the_kernels_left_it(monkeypatch: pytest.MonkeyPatch, is_stored: bool) -> None:
    """Either complete, in padded rows, or still to be summed."""
    q, mask = torch.zeros(1, 2, 3, 8, device="meta"), torch.zeros(1, 2, 3, 5)
    given = options.VarlenBackward(None, None, q, q, q, *[None] * 4, mask, q, q[..., 0], 0, 0, 1.0, -1, -1, 0.0, 7)
    stored, products, sums = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3), torch.randn(1, 2, 3, 5)
    left = (None, stored) if is_stored else (products, None)
    run = varlen_backward.Run((q, q, q, q), given, left)
    monkeypatch.setattr(bias_gradient, "run", lambda *_, **__: run)
    monkeypatch.setattr(bias_gradient, "_sums", lambda of, rows: sums if rows is products else None)
    *_, gradient = bias_gradient.mask_backward(*given)
    assert torch.equal(gradient, stored[..., :5] if is_stored else sums)


def test_a_command_line_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a program it leaves the current folder and prepares the streams; when called with arguments it does neither."""
    prepared: list[str] = []
    for name in ("leave_current_folder", "prepare_streams"):
        monkeypatch.setattr(__main__, name, lambda name=name: prepared.append(name))
    monkeypatch.setattr(sys, "argv", ["flashmoe", "doctor"])
    monkeypatch.setattr(__main__, "_run", len)
    assert (__main__.main(), prepared) == (1, ["leave_current_folder", "prepare_streams"])
    assert (__main__.main(["bench", "x", "y"]), len(prepared)) == (3, 2)

    def fail(_: object) -> int:
        raise ModuleNotFoundError("no", name="scipy.stats")

    monkeypatch.setattr(__main__, "_run", fail)
    for words, shown in (([], ""), (["bench"], "bench")):
        assert __main__.main(words) == errors.ExitCode.FAILED
        assert f"flashmoe {shown} needs scipy, which is not installed; pip install '" in capsys.readouterr().err


@pytest.mark.parametrize("is_there", [False, True])
def test_a_command_that_only_a_checkout_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_there: bool
) -> None:
    commands = __main__.COMMANDS | ({"gate": ("flashmoe_tools.completion", "")} if is_there else {})
    monkeypatch.setattr(__main__, "all_commands", lambda: commands)
    with pytest.raises(SystemExit) if is_there else nullcontext():
        assert __main__._run(["gate", "--nothing"]) == errors.ExitCode.FAILED
    assert ("works in a checkout of the sources only" in capsys.readouterr().err) is not is_there


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ArgumentError("wrong"), errors.ExitCode.USAGE, "ArgumentError: wrong"),
        (ShapeError("wrong"), errors.ExitCode.FAILED, "ShapeError: wrong"),
        (KeyboardInterrupt(), errors.ExitCode.INTERRUPTED, "interrupted"),
    ],
)
def test_how_a_command_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, told: str
) -> None:
    def run(_: object) -> int:
        raise error

    parsed = SimpleNamespace(run=run), []
    monkeypatch.setattr(__main__, "make_parser", lambda _: SimpleNamespace(parse_known_args=lambda _: parsed))
    assert __main__.main(["doctor"]) == status
    assert capsys.readouterr().err.strip() == told


def test_operations_that_only_a_gpu_counts() -> None:
    """For a mask's gradient, which needs the scores and dP, and for 8-bit floats over sequences."""
    q, k, v = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 16)
    scores = 2 * 2 * 4 * 3 * 5
    assert (
        flops.bias_gradient_flops(None, None, q, k, v) == flops.bias_kernels_flops(None, q, k, v) == scores * (8 + 16)
    )
    rest = (*[None] * 5, v, q[..., 0], 3, 5, 1.0, -1, -1, 0.0)
    for needs, columns in ((0, 8 + 16), (1, 2 * 8 + 16), (4, 8 + 2 * 16), (5, 2 * 8 + 2 * 16), (7, 3 * 8 + 2 * 16)):
        assert flops.mask_backward_flops(None, None, q, k, v, *rest, needs) == scores * columns
    ends = [torch.tensor(one, dtype=torch.int32) for one in ([0, 1, 3], [0, 4, 9])]
    q, k, v = torch.zeros(3, 4, 8), torch.zeros(9, 2, 8), torch.zeros(9, 2, 16)
    assert flops.fp8_varlen_flops(q, k, v, *ends, None, 2, 5) == 2 * 4 * (1 * 4 + 2 * 5) * (8 + 16)


@pytest.mark.parametrize("return_lse", [False, True])
def test_what_products_of_codes_give(return_lse: bool) -> None:
    q = torch.empty(1, 2, 3, 16, device="meta").to(torch.float8_e4m3fn)
    found = flashmoe.attention(q, q, q, return_lse=return_lse)
    assert [one.shape for one in (found if isinstance(found, tuple) else (found,))] == [(1, 2, 3, 16), (1, 2, 3)][
        : 1 + return_lse
    ]


def test_parts_with_columns_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's inputs are contiguous in the last dimension, and copied only if they are not."""
    seen: list[Tensor] = []
    monkeypatch.setattr(
        torch.ops.flashmoe, "_attention_merge", SimpleNamespace(default=lambda *given: seen.extend(given))
    )
    rows, columns = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 8, 4).mT
    merge._call(rows, rows[..., 0].contiguous(), columns, rows[..., 0], rows, rows)
    assert seen[0] is rows
    assert seen[2].is_contiguous()
    assert torch.equal(seen[2], columns)
    assert seen[3].is_contiguous()


def test_what_does_not_go_together() -> None:
    q, ends = torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="attn_mask and alibi_slopes are both given"):
        flashmoe.attention(q, q, q, attn_mask=q[..., :3], alibi_slopes=torch.zeros(2))
    rows = q[0].mT.reshape(3, 2, 16)
    codes = rows.to(torch.float8_e4m3fn)
    with pytest.raises(ArgumentError, match=r"dropout_p is not supported with torch\.float8_e4m3fn keys"):
        flashmoe.attention_varlen(rows, codes, codes, ends, ends, 3, 3, dropout_p=0.5)


def test_what_operators_refuse_that_are_called_by_name() -> None:
    q, ends = torch.zeros(3, 2, 16).bfloat16().requires_grad_(), torch.tensor([0, 3], dtype=torch.int32)
    k = q.detach().to(torch.float8_e4m3fn)
    rest = (ends, ends, *[None] * 4, 3, 3, 0.25, -1, -1, 0.0, 0)
    of_codes = torch.ops.flashmoe.attention_e4m3_forward(q, k, k, *rest, None, None, 1.0, 1.0)[0]
    with pytest.raises(DifferentiationError, match="float8_e4m3fn cache has no gradient"):
        of_codes.sum().backward()
    rows = q.detach()
    with pytest.raises(ArgumentError, match="out= is written in place"):
        torch.func.vmap(lambda out: torch.ops.flashmoe._attention_varlen_out(out, rows, rows, rows, *rest))(rows[None])


def test_a_cache_stays_as_it_is_where_what_follows_is_refused() -> None:
    """Rejected by attention; the new keys themselves are valid."""
    cache, new = torch.zeros(1, 2, 8, 16), torch.ones(1, 2, 1, 16)
    for wrong in ({"sinks": torch.zeros(3)}, {"softcap": -1.0}, {"num_splits": 99}, {"window": (-2, 0)}):
        with pytest.raises(FlashmoeError):
            flashmoe.attention_with_kvcache(
                new, cache, cache.clone(), new, new, cache_seqlens=torch.zeros(1).int(), **wrong
            )  # type: ignore[call-overload]
        assert not cache.any()


def test_out_and_a_probability_that_is_no_float() -> None:
    q, ends = torch.zeros(3, 2, 16), torch.tensor([0, 3], dtype=torch.int32)
    for probability in (0, False, 0.5):
        with pytest.raises(ArgumentError, match="out= and dropout_p are both given"):
            flashmoe.attention_varlen(q, q, q, ends, ends, 3, 3, dropout_p=probability, out=q.clone())


def test_a_route_for_jagged_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not used if there is another unsupported_reason."""
    route = sdpa_dispatch.Route(sdpa_dispatch.Backend.FLASHMOE, "jagged")
    rows = torch.nested.nested_tensor([torch.zeros(2, 3, 8)], layout=torch.jagged)
    assert flashmoe.explain(rows, rows, rows).reason == sdpa_dispatch.NESTED
    monkeypatch.setattr(sdpa_dispatch, "jagged_route", lambda *_: route)
    assert flashmoe.explain(rows, rows, rows) is route
    assert flashmoe.explain(rows, rows, rows, None, 2.0).reason == sdpa_dispatch.WRONG_DROPOUT
    assert flashmoe.explain(rows, rows, torch.zeros(1, 2, 3, 8)).reason == sdpa_dispatch.NESTED
