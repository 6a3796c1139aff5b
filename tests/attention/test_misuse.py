"""Common mistakes: odd tensors, wrong scalars, tracers, forks, environment variables. No mistake passes silently."""

import ctypes
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import flashmoe
from flashmoe import _extension
from flashmoe.attn.arguments import MAX_SCALE, is_finite_number
from flashmoe.errors import (
    ArgumentError,
    ArgumentTypeError,
    DifferentiationError,
    DtypeError,
    FlashmoeError,
    ShapeError,
)
from flashmoe.variables import CPU_ISAS
from tests.forked_python import run_python

from .reference import DTYPES, Problem, check_attention, make_inputs


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Calls the operator by its name."""
    _extension.load()
    result: tuple[Tensor, Tensor] = torch.ops.flashmoe.flash_attention_forward(*arguments)
    return result


def _inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return make_inputs(Problem(5, 7, 16, 4, 2, batch=2), device, dtype)


def test_a_misspelt_fallback_policy_stops_the_import() -> None:
    code = "import flashmoe; flashmoe.attention"
    done = run_python("-c", code, environ={"FLASHMOE_FALLBACK": "eror"})
    assert done.returncode == 1
    assert "ArgumentError: FLASHMOE_FALLBACK is 'eror'; supported: allow, warn, error" in done.stderr


MISSPELT: list[tuple[Any, str, str]] = [
    (flashmoe.attention, "is_causal", "write causal=, whose mask is aligned bottom-right"),
    (flashmoe.attention, "softmax_scale", "write scale="),
    (flashmoe.attention, "return_softmax_lse", "write return_lse=True"),
    (flashmoe.attention, "attention_mask", "write attn_mask="),
    (flashmoe.attention, "causl", "write causal="),
    (flashmoe.attention, "window_size", "write window="),
    (flashmoe.attention, "rotary", "it has q, k, v, causal, scale, return_lse, window, softcap, sinks, attn_mask"),
    (flashmoe.scaled_dot_product_attention, "causal", "write is_causal=, whose mask is aligned top-left"),
    (flashmoe.scaled_dot_product_attention, "return_lse", "flashmoe.attention takes it"),
    (flashmoe.scaled_dot_product_attention, "enable_gqua", "write enable_gqa="),
    (flashmoe.explain, "causal", "write is_causal="),
]


@pytest.mark.parametrize(("function", "name", "hint"), MISSPELT, ids=lambda value: getattr(value, "__name__", value))
def test_a_misspelt_keyword_is_told_the_right_one(function: Any, name: str, hint: str) -> None:
    q, k, v = _inputs()
    with pytest.raises(ArgumentTypeError, match=re.escape(hint)) as caught:
        function(q, k, v, **{name: True})
    assert str(caught.value).startswith(f"{function.__name__}() has no argument {name!r}: ")


UNFIT: dict[str, tuple[Any, type[FlashmoeError], str]] = {
    "quantized": (lambda q: torch.quantize_per_tensor(q, 0.1, 0, torch.qint8), DtypeError, "qint8"),
    "float8": (lambda q: q.to(torch.float8_e4m3fn), DtypeError, "float8_e4m3fn"),
    "bool": (lambda q: q > 0, DtypeError, "torch.bool"),
    "complex": (lambda q: q.to(torch.complex64).conj(), DtypeError, "complex64"),
    "mkldnn": (lambda q: q.to_mkldnn(), ArgumentError, "_mkldnn"),
    "sparse csr": (lambda q: q[0, 0].to_sparse_csr(), ArgumentError, "sparse_csr"),
    "named": (lambda q: q.rename("B", "H", "S", "D"), ArgumentError, r"names.*rename\(None\)"),
    "zero tensor": (lambda q: torch._efficientzerotensor(q.shape), ArgumentError, r"zero tensor.*clone"),
    "scalar": (lambda q: q.sum(), ShapeError, "0 dimensions"),
    "numpy": (lambda q: q.numpy(), ArgumentTypeError, "ndarray"),
    "list of tensors": (lambda q: [q, q], ArgumentTypeError, "found list"),
    "channels last": (lambda q: q.to(memory_format=torch.channels_last), ShapeError, "last dimension"),
    "repeated columns": (lambda q: q[..., :1].expand(q.shape), ShapeError, "last dimension"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own warnings about sparse CSR, names and quantization
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_do_not_fit(name: str) -> None:
    if name == "named" and not hasattr(Tensor, "rename"):
        pytest.skip("this torch knows no named dimensions")
    change, error, words = UNFIT[name]
    q, k, v = _inputs()
    with pytest.raises(error, match=words):
        flashmoe.attention(change(q), k, v)


def test_negative_views_and_odd_memory_are_right() -> None:
    """Lazy negation, overlaps, offsets, addresses that are not a multiple of the element size: all give the result of a clean copy."""
    for dtype in DTYPES["cpu"]:
        q, k, v = _inputs(dtype=dtype)
        size = q.numel()
        bytes_of = torch.finfo(dtype).bits // 8
        memory = ctypes.create_string_buffer(size * bytes_of + 1)
        odd = torch.frombuffer(memory, dtype=dtype, count=size, offset=1).view(q.shape)
        odd.copy_(q)
        assert odd.data_ptr() % bytes_of == 1
        overlapping = torch.randn(1000).to(dtype).as_strided(q.shape, (50, 9, 3, 1))
        offset = torch.cat((q.new_zeros(3), q.flatten()))[3:].view(q.shape)
        for strange in (odd, overlapping, offset, torch._neg_view(q), q[:1, :1, :1].expand(q.shape), q.flip(0)):
            clean = strange.clone(memory_format=torch.contiguous_format)
            assert torch.equal(flashmoe.attention(strange, k, v), flashmoe.attention(clean, k, v))
            assert torch.equal(_forward(strange, k, v, 0.25, True)[0], _forward(clean, k, v, 0.25, True)[0])


@pytest.mark.parametrize(
    ("scale", "error", "words"),
    [
        (torch.tensor(0.5), ArgumentTypeError, "multiply q by it"),
        (torch.nn.Parameter(torch.tensor(0.5)), ArgumentTypeError, "Parameter"),
        (1 + 2j, ArgumentTypeError, "complex"),
        ([1.0], ArgumentTypeError, "list"),
        (10**400, ArgumentError, r"100000.*\(401 characters\)"),
        (1e300, ArgumentError, "finite in float32"),
        (2.4e38, ArgumentError, "finite in float32"),
        (-2.4e38, ArgumentError, "finite in float32"),
    ],
)
def test_scale_that_is_no_number_or_too_large(scale: Any, error: type[FlashmoeError], words: str) -> None:
    """A tensor's gradient would be lost silently; a number that is too large would make every result NaN."""
    q, k, v = _inputs()
    for tensors in ((q, k, v), tuple(t.to("meta") for t in (q, k, v))):
        with pytest.raises(error, match=words):
            flashmoe.attention(*tensors, scale=scale)


def test_scale_of_any_kind_of_number(device: str) -> None:
    q, k, v = _inputs(device, torch.float16)
    expected = flashmoe.attention(q, k, v, scale=1.0)
    for scale in (1, np.float32(1), np.float64(1), np.int64(1)):
        assert torch.equal(flashmoe.attention(q, k, v, scale=scale), expected)
    small = flashmoe.attention(q, k, v, scale=1e-300)  # zero in float32: the mean of the values
    torch.testing.assert_close(small, flashmoe.attention(q, k, v, scale=0.0))
    assert flashmoe.attention(q, k, v, scale=2.3e38).shape == q.shape


def test_the_largest_scale_is_the_same_in_cpp_and_python() -> None:
    q, k, v = _inputs()
    for scale in (MAX_SCALE, -MAX_SCALE):
        _forward(q, k, v, scale, False)
        assert is_finite_number(scale)
        with pytest.raises(ArgumentError):
            _forward(q, k, v, scale * (1 + 1e-12), False)
        assert not is_finite_number(scale * (1 + 1e-12))


@pytest.mark.parametrize(
    "causal", [torch.tensor(True), torch.tensor([True, False]), torch.ones(5, 7, dtype=torch.bool)]
)
def test_a_mask_is_not_causal(causal: Tensor) -> None:
    q, k, v = _inputs()
    with pytest.raises(ArgumentTypeError, match=r"causal must be True or False; found a Tensor.*attn_mask"):
        flashmoe.attention(q, k, v, causal=causal)


def test_the_operator_itself_raises_typed_errors() -> None:
    q, k, v = _inputs()
    with pytest.raises(ShapeError, match=r"3 dimensions.*unsqueeze"):
        _forward(q[0], k, v, 1.0, False)
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"flashmoe:attention\.too_few_dimensions"),
    ):  # no Python rule runs there
        _forward(q[0], k, v, 1.0, False)


def test_in_place_changes_are_noticed(device: str) -> None:
    """Changes to what the backward pass needs are detected, as with torch's own function."""
    for change in ("q", "out", "lse"):
        q, k, v = (t.requires_grad_() for t in _inputs(device, torch.float16))
        out, lse = flashmoe.attention(q, k, v, return_lse=True)
        with torch.no_grad():
            {"q": q, "out": out, "lse": lse}[change].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (out.sum() + lse.sum()).backward()


def test_deterministic_mode_and_anomaly_mode(device: str) -> None:
    q, k, v = (t.requires_grad_() for t in _inputs(device, torch.float16))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            flashmoe.attention(q, k, v, causal=True).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert q.grad.isfinite().all()


def test_defaults_of_torch_change_nothing() -> None:
    q, k, v = _inputs()
    expected = flashmoe.attention(q, k, v)
    with torch.device("meta"):
        assert torch.equal(flashmoe.attention(q, k, v), expected)
        leaf = q.clone().requires_grad_()
        flashmoe.attention(leaf, k, v).sum().backward()
    assert leaf.grad.device.type == "cpu"
    torch.set_default_dtype(torch.float64)
    try:
        leaf = q.clone().requires_grad_()
        out = flashmoe.attention(leaf, k, v)
        out.sum().backward()
        assert out.dtype == leaf.grad.dtype == torch.float32
        assert torch.equal(out, expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:.*not a double precision:UserWarning")
def test_gradcheck_in_float64_says_what_there_is() -> None:
    tensors = [t.double().requires_grad_() for t in _inputs()]
    with pytest.raises(DtypeError, match=r"float64.*float16, bfloat16, float32.*scaled_dot_product_attention"):
        torch.autograd.gradcheck(flashmoe.attention, tensors)
    small = [t[:1, :2, :2, :4].contiguous().requires_grad_() for t in _inputs()]
    assert torch.autograd.gradcheck(flashmoe.attention, small, eps=1e-2, atol=1e-2, rtol=1e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch.jit
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # 1 / sqrt(head_dim) becomes a constant of the trace
def test_torch_jit_traces() -> None:
    """Traced with gradients; and traced without them, then trained."""
    q, k, v = _inputs()
    module = flashmoe.Attention(16, 4, 2, causal=True)
    x = torch.randn(2, 5, 16)
    traced = torch.jit.trace(module, (x,))
    traced(x).sum().backward()
    ours = module.q_proj.weight.grad.clone()
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(module.q_proj.weight.grad, ours)
    with torch.no_grad():
        function = torch.jit.trace(flashmoe.attention, (q, k, v))
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(leaf, k, v).sum(), leaf)
    (expected,) = torch.autograd.grad(flashmoe.attention(leaf, k, v).sum(), leaf)
    torch.testing.assert_close(grad, expected)


def test_torch_fx_traces() -> None:
    """symbolic_trace records each of flashmoe's functions as one call; it neither fails nor silently passes the call to torch."""
    q, k, v = _inputs()
    graph = torch.fx.symbolic_trace(lambda q, k, v: flashmoe.attention(q, k, v, causal=True))
    assert torch.equal(graph(q, k, v), flashmoe.attention(q, k, v, causal=True))
    mask = torch.rand(q.shape[2], k.shape[2]) < 0.8
    graph = torch.fx.symbolic_trace(lambda q, k, v, mask: flashmoe.attention(q, k, v, window=(2, 1), attn_mask=mask))
    assert torch.equal(graph(q, k, v, mask), flashmoe.attention(q, k, v, window=(2, 1), attn_mask=mask))
    lengths, tokens, new = torch.tensor([0, 2, 5], dtype=torch.int32), torch.randn(5, 2, 8), torch.randn(2, 2, 1, 8)
    graph = torch.fx.symbolic_trace(lambda q, n: flashmoe.attention_varlen(q, q, q, n, n, 3, 3, window=(1, 0)))
    ragged = flashmoe.attention_varlen(tokens, tokens, tokens, lengths, lengths, 3, 3, window=(1, 0))
    assert torch.equal(graph(tokens, lengths), ragged)
    graph = torch.fx.symbolic_trace(lambda c, n: flashmoe.attention_with_kvcache(new, c, c, new, new, cache_seqlens=n))
    first, second = torch.zeros(2, 2, 2, 4, 8).unbind()
    assert torch.equal(
        graph(first, lengths[:2]),
        flashmoe.attention_with_kvcache(new, second, second, new, new, cache_seqlens=lengths[:2]),
    )
    assert torch.equal(first, second)
    graph = torch.fx.symbolic_trace(lambda q: flashmoe.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert flashmoe.scaled_dot_product_attention in {node.target for node in graph.graph.nodes}
    assert torch.equal(graph(q), flashmoe.scaled_dot_product_attention(q, q, q, is_causal=True))
    module = flashmoe.Attention(16, 4)
    x = torch.randn(2, 5, 16)
    assert torch.equal(torch.fx.symbolic_trace(module, concrete_args={"context": None})(x), module(x))


def test_flops_are_counted_as_torch_counts_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (t.requires_grad_() for t in _inputs())
    products = 2 * 2 * 4 * 5 * 7 * 16  # one product of 5 queries and 7 keys, for 2 batches of 4 heads of 16
    with FlopCounterMode(display=False) as forward:
        flashmoe.attention(q, k, v)
    assert forward.get_total_flops() == 2 * products
    with FlopCounterMode(display=False) as both:
        flashmoe.attention(q, k, v, causal=True).sum().backward()
    assert both.get_total_flops() == (2 + 5) * products


def test_hooks_of_tensor_subclasses_and_modes_see_the_operator() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = _inputs()
    for mode in (Functions(), Dispatches()):
        seen.clear()
        with mode:
            flashmoe.attention(q, k, v)
        assert any("flash_attention" in name for name in seen)


class _Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        q = torch.full((1, 2, 70, 64), float(index + 1))
        return flashmoe.attention(q, q, q)[0, 0, 0, :1]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than processors
def test_workers_of_a_data_loader() -> None:
    """Workers are forked after this process has used its own threads."""
    q = torch.randn(2, 4, 300, 64)
    flashmoe.attention(q, q, q)
    loader = torch.utils.data.DataLoader(_Samples(), batch_size=2, num_workers=2, timeout=60)
    torch.testing.assert_close(torch.cat(list(loader)).flatten(), torch.arange(1.0, 5.0))


USE_THE_CPU = "import torch, flashmoe\nt = torch.zeros(1, 1, 1, 8)\nflashmoe.attention(t, t, t)\nprint('ran')\n"
ASK_FOR_THE_ISA = "from flashmoe import _extension\nprint(_extension.cpu_isa())\n"


@pytest.mark.parametrize(
    ("variable", "value", "code", "words"),
    [
        (
            "FLASHMOE_CPU_ISA",
            "nonsense",
            USE_THE_CPU,
            f"ArgumentError: FLASHMOE_CPU_ISA.*'nonsense'.*supported here: {CPU_ISAS[0]}",
        ),
        ("FLASHMOE_CPU_ISA", "nonsense", ASK_FOR_THE_ISA, "ArgumentError: FLASHMOE_CPU_ISA is 'nonsense'.*unset it"),
        ("FLASHMOE_CPU_ISA", "", USE_THE_CPU, "ran"),
        ("FLASHMOE_CPU_ISA", CPU_ISAS[0], ASK_FOR_THE_ISA, CPU_ISAS[0]),
        (
            "FLASHMOE_KERNEL",
            "sm99",
            USE_THE_CPU,
            "ArgumentError: FLASHMOE_KERNEL is 'sm99'; supported: sm75, sm80, sm90",
        ),
        ("FLASHMOE_KERNEL", "sm90", USE_THE_CPU, "ran"),  # the variable only concerns GPU kernels
        (
            "FLASHMOE_LIBRARY",
            "no/such/file",
            USE_THE_CPU,
            "ExtensionError: FLASHMOE_LIBRARY is 'no/such/file', which is not a file",
        ),
    ],
)
def test_environment_variables(variable: str, value: str, code: str, words: str) -> None:
    done = run_python("-c", code, environ={_extension.LIBRARY_VARIABLE: str(_extension.load()), variable: value})
    last = (done.stdout or done.stderr).strip().splitlines()[-1]
    assert re.search(words, last), done.stderr
    assert (done.returncode == 0) == ("Error" not in words)


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["nonsense", "sm99", "SM80", "sm80,sm90"])
def test_kernel_family_that_does_not_exist(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_KERNEL", value)
    q, k, v = _inputs("cuda", torch.float16)
    with pytest.raises(ArgumentError, match=f"FLASHMOE_KERNEL={value}.*sm80"):
        flashmoe.attention(q, k, v)


@pytest.mark.gpu
def test_unaligned_and_overlapping_memory_on_a_gpu() -> None:
    for dtype in DTYPES["cuda"]:
        q, k, v = make_inputs(Problem(65, 130, 64, 4, 2, batch=2), "cuda", dtype)
        offset = torch.cat((k.new_zeros(1), k.flatten()))[1:].view(k.shape)
        assert offset.data_ptr() % 16
        assert torch.equal(flashmoe.attention(q, offset, v), flashmoe.attention(q, k, v))
        overlapping = torch.randn(20000, device="cuda").to(dtype).as_strided(k.shape, (500, 96, 24, 1))
        check_attention(q, overlapping, overlapping, causal=True)
        negated = flashmoe.attention(torch._neg_view(q), k, v)
        assert torch.equal(negated, flashmoe.attention(-q, k, v))


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
def test_mixed_precision_under_autocast_of_the_other_device() -> None:
    q, k, v = _inputs()
    with torch.autocast("cuda", torch.bfloat16, enabled=True):
        assert flashmoe.attention(q, k, v).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch_attention(q, q, q)
        assert flashmoe.attention(q, q, q).dtype == expected.dtype
        with pytest.raises(ArgumentTypeError, match="NoneType"):
            flashmoe.attention(None, k, v)
        with pytest.raises(ArgumentError, match="sparse"):
            flashmoe.attention(q.to_sparse(), k, v)


def test_inference_tensors_are_those_of_torch() -> None:
    with torch.inference_mode():
        q, k, v = _inputs()
        assert flashmoe.attention(q, k, v).is_inference()
    assert not flashmoe.attention(q, k, v).requires_grad
    leaf = k.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        flashmoe.attention(q, leaf, v)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch itself uses it
def test_forward_mode_on_the_operator_is_refused_and_not_dropped() -> None:
    q, k, v = _inputs()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(DifferentiationError, match="forward-mode"):
            _forward(dual, k, v, 0.25, False)
