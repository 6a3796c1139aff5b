"""Small results of attention's Python code: details that nothing else depends on, or that only an unusual call shows."""

import errno
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

import flashmoe
from flashmoe import __main__, checks, errors, transforms, variables
from flashmoe.attn import autograd, fp8, kvcache, layout, sdpa, sdpa_dispatch, varlen_backward
from flashmoe.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DifferentiationError,
    DtypeError,
    FlashmoeError,
    ShapeError,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's warnings about itself


def test_what_is_differentiated() -> None:
    plain, leaf = torch.zeros(2), torch.zeros(2, requires_grad=True)
    assert not fp8._is_differentiated(plain, None, 0.5)
    assert fp8._is_differentiated(plain, leaf)
    with torch.no_grad():
        assert not fp8._is_differentiated(plain, leaf)
        with forward_ad.dual_level():
            assert fp8._is_differentiated(plain, forward_ad.make_dual(plain, plain))
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(fp8._is_differentiated(x)) or x)(plain)
    assert seen == [True]


@pytest.mark.parametrize(
    ("family", "capability", "has_kernel"),
    [("", (9, 0), True), ("sm90", (9, 0), True), ("sm80", (9, 0), False), ("", (8, 9), False), ("", (10, 0), False)],
)
def test_which_gpu_has_kernels_for_8_bit_floats(
    monkeypatch: pytest.MonkeyPatch, family: str, capability: tuple[int, int], has_kernel: bool
) -> None:
    monkeypatch.setenv("FLASHMOE_KERNEL", family)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert fp8._has_kernel(torch.device("cuda")) is has_kernel
    assert not fp8._has_kernel(torch.device("cpu"))
    assert fp8._has_kernel(torch.device("meta"))


def test_a_mask_of_truth_values_stays_one_beside_dequantised_tensors() -> None:
    numbers, truth = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    assert fp8._in(torch.bfloat16, {"attn_mask": truth})["attn_mask"] is truth
    assert fp8._in(torch.bfloat16, {"attn_mask": numbers})["attn_mask"].dtype is torch.bfloat16
    assert fp8._in(torch.bfloat16, {"attn_mask": None, "scale": 0.5}) == {"attn_mask": None, "scale": 0.5}


@pytest.mark.parametrize("is_float16", [False, True])
def test_a_tracer_hears_the_dtype_of_products_of_8_bit_floats(is_float16: bool) -> None:
    q = torch.empty(1, 2, 3, 64, dtype=torch.float8_e4m3fn, device="meta")
    scales = (None, None, None, 1.0, 1.0, 1.0)
    out, lse = torch.ops.flashmoe.attention_fp8_forward(q, q, q, 0.125, False, is_float16, *scales)
    assert (out.dtype, lse.dtype) == (torch.float16 if is_float16 else torch.bfloat16, torch.float32)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_gradients_of_a_scale_that_is_not_above_zero(scale: float) -> None:
    q, k, v = (torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(3))
    flashmoe.attention(q, k, v, scale=scale, softcap=5.0).square().sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    scores = torch.tanh(wide[0] @ wide[1].mT * (scale / 5.0)) * 5.0
    (torch.softmax(scores, -1) @ wide[2]).square().sum().backward()
    for mine, expected in zip((q, k, v), wide, strict=True):
        assert mine.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(mine.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)


def test_sinks_that_are_not_there_have_an_empty_gradient() -> None:
    q = torch.randn(1, 2, 3, 8)
    out, lse = torch.ops.flashmoe.attention_varlen_forward(q, q, q, *[None] * 6, 3, 3, 0.5, -1, -1, 0.0, 0)
    given = (torch.ones_like(out), None, q, q, q, *[None] * 5, out, lse, 3, 3, 0.5, -1, -1, 0.0)
    assert torch.ops.flashmoe.attention_varlen_backward(*given, 15)[3].shape == (0,)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"dropout_p": 0.5}, {"consistent": True}])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_no_tensor_of_any_call_has_a_forward_mode(is_ragged: bool, options: dict[str, Any]) -> None:
    """And no tangent is lost: each tensor in turn has one."""
    if is_ragged:
        ends = torch.tensor([0, 2, 5], dtype=torch.int32)
        tensors, call = {name: torch.randn(5, 2, 8) for name in "qkv"}, flashmoe.attention_varlen
        rest: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 3, "max_seqlen_k": 3}
    else:
        tensors, rest, call = {name: torch.randn(2, 2, 3, 8) for name in "qkv"}, {}, flashmoe.attention
        tensors |= {} if "consistent" in options else {"attn_mask": torch.randn(3, 3)}
    tensors["sinks"] = torch.randn(2)
    with torch.no_grad():
        call(**tensors, **rest, **options)
    with forward_ad.dual_level():
        for name, tensor in tensors.items():
            dual = {**tensors, name: forward_ad.make_dual(tensor, tensor)}
            with pytest.raises(DifferentiationError, match="forward"):
                call(**dual, **rest, **options)


_DENSE, _ENDS = torch.zeros(2, 2, 3, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
_OPTIONS: dict[str, Any] = {
    "causal": False,
    "scale": 0.5,
    "window": (1, 1),
    "softcap": 1.0,
    "sinks": torch.zeros(2),
    "return_lse": False,
}
_LENGTHS = {"cu_seqlens_q": _ENDS, "cu_seqlens_k": _ENDS, "max_seqlen_q": 3, "max_seqlen_k": 3}
_CACHED = ("q", "k_cache", "v_cache", "k_new", "v_new")
_CACHES: dict[str, Any] = {name: torch.zeros(2, 2, 1 if "new" in name else 3, 8) for name in _CACHED}
_ROWS = torch.zeros(5, 2, 8)
_RAGGED: dict[str, Any] = {**dict.fromkeys("qkv", _ROWS), **_LENGTHS, **_OPTIONS, "alibi_slopes": None}


@pytest.mark.parametrize("wrong", [object(), "text", [1.0], b"x"], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("function", "call"),
    [
        (flashmoe.attention, {**dict.fromkeys("qkv", _DENSE), **_OPTIONS, "attn_mask": None, "dropout_p": 0.0}),
        (flashmoe.attention_varlen, {**_RAGGED, "seqused_k": None, "block_table": None, "num_splits": 0}),
        (flashmoe.attention_with_kvcache, {**_CACHES, "cache_seqlens": _ENDS[:2], **_OPTIONS, "num_splits": 0}),
    ],
    ids=["dense", "ragged", "caches"],
)  # fmt: skip
def test_a_value_of_another_type_is_told_by_its_argument(function: Any, call: dict[str, Any], wrong: object) -> None:
    """Each argument in turn, while the others are valid."""
    call = {**call, "consistent": False, "k_scale": None, "v_scale": None}
    for name in call:
        with pytest.raises(FlashmoeError) as caught:
            function(**{**call, name: wrong})
        assert re.match(rf"(each side of )?{name} must|{name}:? ", str(caught.value)), (name, str(caught.value))


@pytest.mark.parametrize("kind", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float32, None])
def test_a_layer_s_dtype(kind: str, dtype: torch.dtype | None) -> None:
    """Another floating dtype of 16 bits or more is rejected, except under autocast, which meta tensors do not have."""
    x, weight = torch.empty(2, device=kind), dtype and torch.empty(2, dtype=dtype, device=kind)
    for autocast in (False, True):
        is_refused = dtype is torch.bfloat16 and (kind == "meta" or not autocast)
        refusal = pytest.raises(DtypeError, match="x is torch") if is_refused else nullcontext()
        with torch.autocast("cpu", enabled=autocast), refusal:
            checks.check_input_dtype("x", x, weight)


def test_errors_that_are_typed_stay_so_under_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the operator's own error, which explain_append passes on."""
    told = DeviceError("of another kind")

    def refuse(*_: object) -> None:
        raise told

    monkeypatch.setattr(kvcache, "_append", refuse)
    monkeypatch.setattr(kvcache.arguments, "explain_append", lambda error, *_: error)
    q, lengths = torch.zeros(2, 1, 1, 4, 8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(DeviceError, match="of another kind"):
        torch.func.vmap(lambda rows: kvcache.append_checked(rows, rows, rows, rows, lengths, None))(q)


def test_only_torch_s_own_words_about_sizes_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherError(RuntimeError):
        pass

    for error in (OtherError("The size must match the size of tensor"), RuntimeError("another reason")):

        def refuse(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(sdpa, "torch_attention", refuse)
        q, k = torch.zeros(1, 4, 3, 8, dtype=torch.float64), torch.zeros(1, 2, 3, 8, dtype=torch.float64)
        with pytest.raises(RuntimeError) as caught:
            flashmoe.scaled_dot_product_attention(q, k, k)
        assert caught.value is error


@pytest.mark.parametrize("consistent", [False, True])
def test_what_is_needed_of_num_splits(consistent: bool) -> None:
    q, ends = torch.zeros(2, 1, 8), torch.tensor([0, 2], dtype=torch.int32)
    words = "remove it if consistent is True" if consistent else "0 lets the kernels choose"
    with pytest.raises(ArgumentError, match=f"from 0 to 32 \\({words}\\); found -1"):
        flashmoe.attention_varlen(q, q, q, ends, ends, 2, 2, num_splits=-1, consistent=consistent)


def test_a_bound_that_is_wrong_is_told_of_causal_calls_too() -> None:
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ArgumentError, match=r"found \(3, -2\)"):
        flashmoe.attention(q, q, q, window=(3, -2), causal=True)


def test_a_module_that_is_missing_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError("nobody says which")

    def run(_: object) -> int:
        raise missing

    monkeypatch.setattr(__main__, "_run", run)
    with pytest.raises(ModuleNotFoundError, match="nobody says which"):
        __main__.main(["doctor"])


def test_an_error_of_the_system_that_nothing_explains_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        raise OSError(errno.ESRCH, "no such process")

    parsed = SimpleNamespace(run=run), []
    monkeypatch.setattr(__main__, "make_parser", lambda _: SimpleNamespace(parse_known_args=lambda _: parsed))
    with pytest.raises(ProcessLookupError):
        __main__.main(["doctor"])


def test_what_is_no_tensor_is_not_jagged() -> None:
    rows = torch.nested.nested_tensor([torch.zeros(2, 8)], layout=torch.jagged)
    found = [sdpa_dispatch.are_jagged(rows, other) for other in (rows, torch.zeros(2), None, "text")]
    assert found == [True, False, False, False]


@pytest.mark.parametrize(("query", "key", "expected"), [((4, 3, 8), (2, 3, 8), True), ((3, 8), (2, 3, 8), False),
    ((4, 3, 8), (3, 8), False), ((4, 3, 8), (1, 3, 8), False), ((4, 3, 8), (3, 3, 8), False), ((4, 3, 8), (4, 3, 8), False)])  # fmt: skip
def test_what_would_form_groups(query: tuple[int, ...], key: tuple[int, ...], expected: bool) -> None:
    assert sdpa_dispatch.would_form_groups(torch.zeros(query), torch.zeros(key)) is expected
    assert not sdpa_dispatch.would_form_groups(torch.zeros(query), None)


def test_masks_of_heads_that_form_groups() -> None:
    """A mask with all query heads works with fewer key heads if they form groups; a mask that does not broadcast goes to torch."""
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    for shape in ((2, 4, 3, 5), (4, 3, 5), (3, 5)):
        mask = torch.rand(shape) < 0.7
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
        assert sdpa_dispatch.find_unsupported(q, k, k, mask, 0.0, False, None, True) is None
        torch.testing.assert_close(
            flashmoe.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True).nan_to_num(), expected.nan_to_num()
        )
    one = torch.randn(1, 4, 5, 8)  # equal heads: their batch broadcasts too
    assert sdpa_dispatch.find_unsupported(q, one, one, torch.ones(2, 4, 3, 5) > 0, 0.0, False, None, False) is None
    assert (
        sdpa_dispatch.find_unsupported(q[:, :1], one, one, torch.ones(2, 4, 3, 5) > 0, 0.0, False, None, False) is None
    )
    assert "broadcast" in str(
        sdpa_dispatch.find_unsupported(q, k, k, torch.ones(2, 2, 3, 5) > 0, 0.0, False, None, True)
    )


@pytest.mark.parametrize("has_dropout", [False, True])
def test_a_gradient_of_wide_heads_is_refused_on_a_gpu(has_dropout: bool) -> None:
    class OnGpu:
        is_cuda = True

        def __init__(self, head_dim: int) -> None:
            self.shape = (1, 1, 1, head_dim)

    wide = torch.empty(1, 1, 1, 512)
    varlen_backward._check_head_dim(SimpleNamespace(q=wide, v=wide), has_dropout=has_dropout)  # type: ignore[arg-type]
    most = varlen_backward.MAX_GPU_OPTIONS_HEAD_DIM
    varlen_backward._check_head_dim(SimpleNamespace(q=OnGpu(most), v=OnGpu(most)), has_dropout=has_dropout)  # type: ignore[arg-type]
    for sizes in ((most + 8, 64), (64, most + 8)):
        q, v = map(OnGpu, sizes)
        what = "dropout" if has_dropout else "packed or windowed attention"
        with pytest.raises(FlashmoeError, match=f"the gradient of {what}.*{most + 8}"):
            varlen_backward._check_head_dim(SimpleNamespace(q=q, v=v), has_dropout=has_dropout)  # type: ignore[arg-type]


def test_codes_are_decoded_without_a_gradient_where_none_is_asked_for() -> None:
    q = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    cache = torch.zeros(1, 2, 4, 64).to(torch.float8_e4m3fn)
    given: Any = {"cache_seqlens": torch.tensor([4], dtype=torch.int32), "k_scale": 1.0, "v_scale": 1.0}
    with torch.no_grad():
        assert not flashmoe.attention_with_kvcache(q, cache, cache, **given).any()
    with pytest.raises(DifferentiationError):
        flashmoe.attention_with_kvcache(q, cache, cache, **given)


def test_a_value_that_a_variable_cannot_have() -> None:
    supported = "|".join(variables.VARIABLES["FLASHMOE_KERNEL"].values)
    with pytest.raises(
        ArgumentError, match=f"FLASHMOE_KERNEL is 'sm7'; supported: ({supported}), .*; correct it, or unset it"
    ):
        variables.check_variables({"FLASHMOE_KERNEL": "sm7"})
    variables.check_variables(
        {
            "FLASHMOE_REQUIRE_GPU": "sm7",
            "FLASHMOE_KERNEL": "",
            "FLASHMOE_CPU_ISA": "sm7",
            "FLASHMOE_CXX": "sm7",
            "OTHER": "sm7",
        }
    )


@pytest.mark.parametrize(
    ("dtype", "is_cast"),
    [
        (torch.float32, True),
        (torch.float16, True),
        (torch.float64, False),
        (torch.int32, False),
        (torch.float8_e4m3fn, False),
    ],
)
def test_what_autocast_casts(dtype: torch.dtype, is_cast: bool) -> None:
    given = torch.zeros(2).to(dtype)
    for device, target in (("cpu", torch.bfloat16 if is_cast else dtype), ("cuda", dtype)):
        assert transforms.autocast_dtype(given, device, torch.bfloat16) is target


@pytest.mark.parametrize(
    ("q", "k", "is_told"),
    [
        ((1, 64, 8, 64), (1, 64, 8, 64), True), ((1, 63, 8, 64), (1, 63, 8, 64), False), ((1, 64, 64, 64), (1, 64, 64, 64), False),
        ((1, 64, 63, 64), (1, 64, 63, 64), True), ((1, 64, 1, 64), (1, 64, 1, 64), False), ((1, 64, 2, 64), (1, 64, 2, 64), True),
        ((1, 64, 9, 64), (1, 64, 8, 64), False), ((1, 63, 8, 64), (1, 64, 8, 64), False), ((1, 128, 8, 64), (1, 64, 8, 64), True),
        ((64, 8, 64), (64, 8, 64), False),
    ],
)  # fmt: skip
def test_which_shapes_look_like_another_layout(
    monkeypatch: pytest.MonkeyPatch, q: tuple[int, ...], k: tuple[int, ...], is_told: bool
) -> None:
    monkeypatch.setattr(layout, "checks_left", 16)
    with pytest.warns(UserWarning, match="call .transpose") if is_told else nullcontext():
        layout.warn_if_transposed(torch.empty(q), torch.empty(k))
    assert layout.checks_left == (0 if is_told else 15)
    layout.warn_if_transposed(None, torch.empty(k))


def test_no_upstream_gradient_gives_none() -> None:
    assert autograd.varlen_gradient(SimpleNamespace(), None, None) == (None,) * len(autograd.Varlen._fields)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("shape", [(1, 2, 3, 8), (3, 2, 8)])
def test_parts_that_do_not_belong_together(which: int, shape: tuple[int, ...]) -> None:
    rows = shape[:-1] if len(shape) == 4 else (shape[1], shape[0])
    parts = [torch.zeros(shape), torch.zeros(rows)] * 2
    flashmoe.merge_attention(*parts)
    parts[which] = parts[which][..., :1]
    with pytest.raises(ShapeError, match="both results with equal shapes"):
        flashmoe.merge_attention(*parts)
    with pytest.raises(ShapeError, match="both results with equal shapes"):
        flashmoe.merge_attention(*[torch.zeros(3, 4), torch.zeros(3)] * 2)


def test_a_consistent_call_has_one_split() -> None:
    ends, q = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(3, 1, 8)
    for splits in (0, 1):
        flashmoe.attention_varlen(q, q, q, ends, ends, 3, 3, consistent=True, num_splits=splits)
    with pytest.raises(ArgumentError, match="remove it if consistent is True"):
        flashmoe.attention_varlen(q, q, q, ends, ends, 3, 3, consistent=True, num_splits=2)


def test_what_the_operator_gets_under_autocast() -> None:
    """A meta tensor is on no device that autocast supports."""
    given = [torch.zeros(1, device=device) for device in ("cpu", "meta")]
    assert transforms.autocasted(given[0], None, 3) == (given[0], None, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert transforms.autocasted("text", given[0])[1].dtype is torch.bfloat16
        cast, *others = transforms.autocasted(given[0], None, 3)
        assert (cast.dtype, others) == (torch.bfloat16, [None, 3])
        assert transforms.autocasted(given[1], given[0]) == (given[1], given[0])
        assert [sdpa_dispatch._dtypes(one) for one in given] == [[torch.bfloat16], [torch.float32]]
    assert [sdpa_dispatch._dtypes(one) for one in given] == [[torch.float32]] * 2


@pytest.mark.parametrize(("capability", "has_kernel"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_from_which_gpu_on_bfloat16_has_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_kernel: bool
) -> None:
    given: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr(sdpa_dispatch, "_capability", lambda _: capability)
    assert (sdpa_dispatch._unsupported_dtype(given, given, given) is None) is has_kernel


def test_nothing_is_written_into_out_with_a_tangent() -> None:
    ends, q = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(3, 1, 8)
    with forward_ad.dual_level():
        tangent = forward_ad.make_dual(q, q)
        with pytest.raises(ArgumentError, match="out"):
            flashmoe.attention_varlen(tangent, q, q, ends, ends, 3, 3, out=torch.empty(3, 1, 8))


@pytest.mark.parametrize("number", sorted({errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.EMFILE, errno.ENOMEM}))
def test_an_error_of_the_machine_is_told_with_what_to_do(number: int) -> None:
    told = errors.explain_os_error(OSError(number, "what failed", "some/file"))
    assert told == f"some/file: what failed; {errors._OF_THE_MACHINE[number]}"
    assert str(errors.explain_os_error(OSError(number, "what failed"))).startswith("writing: what failed; ")
    assert errors.explain_os_error(OSError(errno.EBADF, "bad descriptor")) is None
    assert errors.explain_os_error(OSError("without a number")) is None


def test_flags_that_are_taken() -> None:
    """Both truth values, a symbolic one, and a torch.fx proxy; but nothing that merely has a truth value."""
    size = ShapeEnv().create_unbacked_symint()
    for flag in (True, False, size == 3):
        checks.check_flag("causal", flag)
    fx.symbolic_trace(lambda flag: checks.check_flag("causal", flag))
    for other in (0, 1, None, "", [], torch.tensor(True)):
        with pytest.raises(ArgumentTypeError, match="causal must be True or False"):
            checks.check_flag("causal", other)


@pytest.mark.parametrize("autocast", [False, True])
def test_which_dtypes_a_layer_takes(autocast: bool) -> None:
    """Its parameters' own dtype; any dtype if those are not floats, or 8-bit floats, or if autocast converts."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn)
    for given in dtypes:
        for kept in (*dtypes, None):
            weight = object() if kept is None else torch.zeros(1, dtype=kept)
            free = kept is None or not kept.is_floating_point or kept.itemsize == 1 or autocast or kept is given
            with torch.autocast("cpu", enabled=autocast):
                expectation = (
                    nullcontext() if free else pytest.raises(DtypeError, match=f"^x is {given} and .* {kept};")
                )
                with expectation:
                    checks.check_input_dtype("x", torch.zeros(1, dtype=given), weight)


def test_scalars_as_they_are_given() -> None:
    """Integers of any size are accepted; False is not a probability, although it equals 0."""
    ends, (q, k, v) = torch.tensor([0, 3], dtype=torch.int32), (torch.randn(3, 2, 16) * 1e-9 for _ in range(3))
    given = (q, k, v, ends, ends, 3, 3)
    assert torch.equal(flashmoe.attention_varlen(*given, scale=2**70), flashmoe.attention_varlen(*given, scale=2.0**70))
    for call in (
        lambda p: flashmoe.attention_varlen(*given, dropout_p=p),
        lambda p: flashmoe.attention(*(x[None] for x in (q, k, v)), dropout_p=p),
    ):
        with pytest.raises(ArgumentTypeError, match="dropout_p must be a number; found bool"):
            call(False)
        assert torch.equal(call(0), call(0.0))


def test_a_foreign_error_of_an_append_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory for seqused_k")

    monkeypatch.setattr(kvcache, "_append", fails)
    cache = torch.zeros(1, 2, 8, 16)
    with pytest.raises(RuntimeError, match=r"^no memory for seqused_k$"):
        flashmoe.attention_with_kvcache(
            *[cache[:, :, :1], cache, cache.clone()],
            *[cache[:, :, :1]] * 2,
            cache_seqlens=torch.tensor([1], dtype=torch.int32),
        )


def test_operations_of_values_of_another_width() -> None:
    ends_q, ends_k = (torch.tensor([0, rows], dtype=torch.int32) for rows in (3, 5))
    q, k, v = torch.randn(3, 2, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 24)
    with FlopCounterMode(display=False) as counter:
        flashmoe.attention_varlen(q, k, v, ends_q, ends_k, 3, 5)
    assert counter.get_total_flops() == 2 * 2 * 3 * 5 * (16 + 24)
