"""The operator inside torch's machinery: opcheck, compile, export, autocast, fake and meta tensors."""

import copy
import io
import pickle
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import flashmoe
from flashmoe.errors import DeviceError, DtypeError, ShapeError
from tests.torch_warnings import COMPILED

from .reference import DTYPES, Problem, make_inputs

CASES = {
    "plain": {},
    "grouped": {"heads_q": 4, "heads_kv": 2},
    "causal, more queries": {"seq_q": 40, "seq_k": 9},
    "odd head dim": {"head_dim": 59},
    "no keys": {"seq_k": 0},
    "no queries": {"seq_q": 0},
}
pytestmark = COMPILED


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def _operator() -> torch._ops.OpOverload:
    assert flashmoe.attention  # loads the extension
    return torch.ops.flashmoe.flash_attention_forward.default


def _inputs(
    device: str, *, grad: bool = False, dtype: torch.dtype = torch.float16, bshd: bool = False, **sizes: int
) -> list[Tensor]:
    problem = Problem(**{"seq_q": 33, "seq_k": 45, "head_dim": 16, "batch": 2, **sizes})
    return [tensor.requires_grad_(grad) for tensor in make_inputs(problem, device, dtype, bshd=bshd)]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
@pytest.mark.parametrize("case", CASES)
def test_opcheck_forward(case: str, grad: bool, device: str) -> None:
    operator = _operator()
    for bshd in (False, True):
        tensors = _inputs(device, grad=grad, bshd=bshd, **CASES[case])
        torch.library.opcheck(operator, (*tensors, 0.25, "causal" in case))


@pytest.mark.parametrize("scale", [None, 0.25], ids=["default", "scale"])
@pytest.mark.parametrize("case", CASES)
def test_opcheck_without_gradients(case: str, scale: float | None, device: str) -> None:
    assert flashmoe.attention  # loads the extension
    operators = torch.ops.flashmoe
    tensors, causal = _inputs(device, **CASES[case]), "causal" in case
    torch.library.opcheck(operators._flash_attention_inference.default, (*tensors, scale, causal))
    torch.library.opcheck(operators._flash_attention_drop_in.default, (*tensors, scale, causal, True))


@pytest.mark.parametrize("missing", ["none", "grad_out", "grad_lse"])
def test_opcheck_backward(missing: str, device: str) -> None:
    q, k, v = _inputs(device, heads_q=4, heads_kv=2)
    out, lse = _operator()(q, k, v, 0.25, True)
    gradients = [None if missing == name else torch.randn_like(t) for name, t in (("grad_out", out), ("grad_lse", lse))]
    torch.library.opcheck(
        torch.ops.flashmoe.flash_attention_backward.default, (*gradients, q, k, v, out, lse, 0.25, True)
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_attention_is_one_graph_and_equal(dynamic: bool, device: str) -> None:
    compiled = torch.compile(
        lambda q, k, v: flashmoe.attention(q, k, v, causal=True, return_lse=True),
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    for length in (33, 40, 64):
        tensors = _inputs(device, grad=True, seq_q=length, heads_q=4, heads_kv=2)
        expected = flashmoe.attention(*tensors, causal=True, return_lse=True)
        actual = compiled(*tensors)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        weights = [torch.randn_like(tensor) for tensor in expected]
        ours = torch.autograd.grad(actual, tensors, weights)
        for a, b in zip(ours, torch.autograd.grad(expected, tensors, weights), strict=True):
            assert torch.equal(a, b)


def test_compiled_with_inductor(device: str) -> None:
    """The default backend, with operations to fuse around the operator."""
    pytest.importorskip("setuptools", reason="torch's inductor imports setuptools, which is not installed here")
    if device == "cpu" and not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("torch's inductor compiles against Python.h, which this Python came without (Debian: python3-dev)")
    if " " in torch.__path__[0]:
        pytest.skip("torch's inductor does not quote its own path for g++, and there is a space in it here")

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmoe.attention(q * 0.5, k + 1, v.relu()).transpose(1, 2).flatten(2).sin()

    tensors = _inputs(device, bshd=True)
    torch.testing.assert_close(torch.compile(block, fullgraph=True)(*tensors), block(*tensors), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_sdpa(dynamic: bool, device: str) -> None:
    """Square, wide and tall causal, and a mask."""
    compiled = torch.compile(
        flashmoe.scaled_dot_product_attention, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for seq_q, seq_k in ((33, 33), (33, 60), (60, 33)):
        tensors = _inputs(device, seq_q=seq_q, seq_k=seq_k)
        expected = flashmoe.scaled_dot_product_attention(*tensors, is_causal=True)
        torch.testing.assert_close(compiled(*tensors, is_causal=True), expected)
    mask = torch.ones(60, 33, dtype=torch.bool, device=device)
    expected = torch_attention(*tensors, attn_mask=mask)
    torch.testing.assert_close(compiled(*tensors, attn_mask=mask), expected, rtol=0, atol=2e-3)


def test_wrong_arguments_do_not_compile_silently(device: str) -> None:
    q, k, v = _inputs(device)
    compiled = torch.compile(flashmoe.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="share head_dim"):
        compiled(q[..., :8].contiguous(), k, v)


def test_a_misspelt_keyword_is_named_in_a_whole_graph(device: str) -> None:
    compiled = torch.compile(flashmoe.attention, fullgraph=True, backend="aot_eager")
    # Without quotes where Dynamo traces the message under Python 3.13.
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"no argument '?softmax_scale'?: write scale="):
        compiled(*_inputs(device), softmax_scale=1.0)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_length(strict: bool) -> None:
    module = flashmoe.Attention(64, 4, 2, causal=True)
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(module, (torch.randn(2, 10, 64),), dynamic_shapes={"x": {1: length}}, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "flashmoe.flash_attention_forward.default" in targets
    x = torch.randn(2, 77, 64)
    torch.testing.assert_close(exported.module()(x), module(x))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # in torch's own loader
def test_export_can_be_saved() -> None:
    module = flashmoe.Attention(32, 2)
    x = torch.randn(1, 8, 32)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(module, (x,)), buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.export.load(buffer).module()(x), module(x))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
def test_autocast_casts_as_for_sdpa(grad: bool, device: str) -> None:
    tensors = _inputs(device, grad=grad, dtype=torch.float32)
    mixed = [tensors[0].detach().half().requires_grad_(grad), *tensors[1:]]
    for target in (torch.bfloat16, torch.float16):
        with torch.autocast(device, target):
            for inputs in (tensors, mixed):
                expected = torch_attention(*inputs)
                for out in (flashmoe.attention(*inputs), flashmoe.scaled_dot_product_attention(*inputs)):
                    assert out.dtype == expected.dtype == target
                    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
            if grad:
                out.float().sum().backward()
                assert tensors[1].grad.dtype == torch.float32
                assert tensors[1].grad.isfinite().all()
            with torch.autocast(device, enabled=False):
                half = [tensor.half() for tensor in tensors]
                assert flashmoe.attention(*half).dtype == torch.float16


def test_autocast_leaves_float64_alone() -> None:
    doubles = [tensor.double() for tensor in _inputs("cpu", dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(DtypeError, match="float64"):
            flashmoe.attention(*doubles)
        assert flashmoe.scaled_dot_product_attention(*doubles).dtype == torch.float64


def test_meta_and_fake_tensors_have_the_real_shapes(device: str) -> None:
    for bshd in (False, True):
        q, k, v = _inputs(device, bshd=bshd, heads_q=4, heads_kv=2)
        out, lse = flashmoe.attention(q, k, v, return_lse=True)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(tensor) for tensor in (q, k, v)]
            fake_out, fake_lse = flashmoe.attention(*fakes, return_lse=True)
        metas = [tensor.to("meta") for tensor in (q, k, v)]
        meta_out, meta_lse = flashmoe.attention(*metas, return_lse=True)
        for a, b in ((fake_out, out), (fake_lse, lse), (meta_out, out), (meta_lse, lse)):
            assert a.shape == b.shape
            assert a.stride() == b.stride()
            assert a.dtype == b.dtype
        assert fake_out.device == out.device


def test_fake_tensors_break_the_same_rules() -> None:
    with FakeTensorMode():
        good = torch.empty(1, 2, 5, 64, dtype=torch.float16)
        with pytest.raises(ShapeError, match="head_dim"):
            flashmoe.attention(good, good[..., :32], good[..., :32])
        with pytest.raises(DtypeError):
            flashmoe.attention(good, good.float(), good.float())
        with pytest.raises(DeviceError):
            flashmoe.attention(good, good.to("meta"), good.to("meta"))


def test_every_dtype_under_make_fx() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmoe.attention(q, k, v)

    for dtype in DTYPES["cpu"]:
        tensors = _inputs("cpu", dtype=dtype)
        graph = make_fx(call)(*tensors)
        assert "flash_attention_forward" in graph.code
        assert torch.equal(graph(*tensors), flashmoe.attention(*tensors))


def test_module_copies_and_pickles() -> None:
    module = flashmoe.Attention(32, 4, 2, causal=True, bias=True)
    x = torch.randn(2, 9, 32)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))
