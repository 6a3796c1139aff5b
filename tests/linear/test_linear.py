"""linear: values and gradients compared with float64, and the guarantee that a row's bits do not depend on other rows or the tile."""

import pytest
import torch
from torch import Tensor, nn

import flashmoe
from flashmoe import _extension
from flashmoe.errors import ArgumentTypeError, DtypeError, FlashmoeError, ShapeError
from flashmoe_tools.operations.moe.reference import allowed

BF16, F16 = torch.bfloat16, torch.float16
ROWS = (1, 2, 7, 9, 16, 33, 64, 65, 130, 300)  # both sides of every tile's edge


def tensors(rows: int, n: int, k: int, dtype: torch.dtype, device: str, *, transposed: bool = False) -> list[Tensor]:
    """x, w and bias; ``transposed``: the weight is a view of [k, n]."""
    generator = torch.Generator().manual_seed(rows + n + k)
    shapes = ((rows, k), (k, n) if transposed else (n, k), (n,))
    x, w, bias = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return [x, w.mT if transposed else w, bias]


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    return (BF16, F16, torch.float32) if device == "cpu" else (BF16, F16)


def assert_close(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    assert found.dtype == plain.dtype
    assert found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= allowed(exact, plain, plain.dtype)


@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
def test_values_and_gradients(device: str, transposed: bool) -> None:
    for dtype in dtypes(device):
        given = tensors(70, 136, 200, dtype, device, transposed=transposed)
        leaves = [one.detach().requires_grad_() for one in given]
        grad = torch.randn(5, 14, 136, device=device, dtype=dtype)

        def gradients(out: Tensor, of: list[Tensor], grad: Tensor = grad) -> list[Tensor]:
            return [out.detach(), *torch.autograd.grad(out, of, grad.to(out.dtype).view(out.shape))]

        found = gradients(flashmoe.linear(leaves[0].view(5, 14, 200), *leaves[1:]), leaves)
        assert found[0].shape == (5, 14, 136)
        exact_leaves = [one.detach().double().requires_grad_() for one in given]
        exact = gradients(torch.nn.functional.linear(*exact_leaves), exact_leaves)
        plain = gradients(torch.nn.functional.linear(*leaves), leaves)
        for one, expected, own in zip(found, exact, plain, strict=True):
            assert_close(one.reshape(expected.shape), expected, own.reshape(expected.shape))


def test_a_row_has_the_same_bits_among_any_others(device: str) -> None:
    for dtype in dtypes(device):
        for n, k, transposed in ((136, 200, False), (520, 72, False), (136, 200, True)):
            x, w, bias = tensors(max(ROWS), n, k, dtype, device, transposed=transposed)
            x[3] = float("inf")  # must not affect its neighbours
            whole = flashmoe.linear(x, w, bias)
            for rows in ROWS:
                for start in (0, max(ROWS) - rows):
                    part = flashmoe.linear(x[start : start + rows].clone(), w, bias)
                    torch.testing.assert_close(part, whole[start : start + rows], rtol=0, atol=0, equal_nan=True)
            leaf = x.detach().nan_to_num(posinf=1.0).requires_grad_()
            out = flashmoe.linear(leaf, w)
            grad = torch.randn_like(out)
            (dx,) = torch.autograd.grad(out, leaf, grad, retain_graph=True)
            one = leaf[5:6].detach().requires_grad_()
            assert torch.equal(torch.autograd.grad(flashmoe.linear(one, w), one, grad[5:6])[0], dx[5:6])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_tile_gives_the_same_bits(dtype: torch.dtype) -> None:
    """For all families that run here, mma.sync and wgmma, whether or not the number of rows would select them. The kernels for Turing, whose
    instructions use 8 of k, only agree among themselves; no other GPU selects them."""
    call = torch.ops.flashmoe._linear.default
    for transposed in (False, True):
        for rows, n, k in ((1, 264, 4096), (300, 1288, 4168), (70, 4096, 4096), (300, 1288, 1032), (9, 72, 24)):
            x, w, bias = tensors(rows, n, k, dtype, "cuda", transposed=transposed)
            results: dict[bool, Tensor] = {"sm75" in chosen_kernel(x, w, bias): flashmoe.linear(x, w, bias)}
            seen = set()
            for tile in range(100):
                try:
                    found = call(x, w, bias, tile)
                except Exception as error:
                    assert "linear.tile" in str(error)  # noqa: PT017 - this was the last tile
                    break
                kernel = _extension.last_kernel()
                assert torch.equal(found, results.setdefault("sm75" in kernel, found)), kernel
                seen.add(kernel)
            assert len(seen) >= 2


def chosen_kernel(*given: Tensor) -> str:
    flashmoe.linear(*given)
    return _extension.last_kernel()


@pytest.mark.gpu
def test_in_a_graph_and_again() -> None:
    x, w, bias = tensors(5, 1280, 4096, BF16, "cuda")
    expected = flashmoe.linear(x, w, bias)
    for _ in range(200):
        assert torch.equal(flashmoe.linear(x, w, bias), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flashmoe.linear(x, w, bias)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)


def test_strides_empty_and_transforms(device: str) -> None:
    x, w, bias = tensors(12, 40, 64, BF16, device)
    expected = flashmoe.linear(x, w, bias)
    wide = torch.randn(12, 71, device=device, dtype=BF16)
    wide[:, 3:67] = x
    assert torch.equal(flashmoe.linear(wide[:, 3:67], w, bias), expected)
    assert torch.equal(flashmoe.linear(x.mT.contiguous().mT, w, bias), expected)
    for shape in ((0, 64), (2, 0, 64), (0, 3, 64)):
        given = [one.detach().requires_grad_() for one in (x.new_empty(shape), w, bias)]
        out = flashmoe.linear(*given)
        assert out.shape == (*shape[:-1], 40)
        assert not any(one.any() for one in torch.autograd.grad(out.sum(), given))
    for shape in ((0,), (12, 0), (0, 0), (3, 0, 0)):
        with pytest.raises(ShapeError, match="k is 0"):
            flashmoe.linear(x.new_empty(shape), w[:, :0], bias)
    assert torch.equal(flashmoe.linear(x[0], w, bias), expected[0])
    assert torch.equal(torch.vmap(flashmoe.linear, (0, None, None))(x.view(3, 4, 64), w, bias).view(12, 40), expected)
    jacobian = torch.func.grad(lambda one: flashmoe.linear(one, w, bias).sum().float())(x)
    leaf = x.detach().requires_grad_()
    assert torch.equal(torch.autograd.grad(flashmoe.linear(leaf, w, bias).sum().float(), leaf)[0], jacobian)
    compiled = torch.compile(flashmoe.linear, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w, bias), expected)
    with torch.autocast(device, dtype=BF16):
        assert torch.equal(flashmoe.linear(x.float(), w.float(), bias.float()), expected)


def test_a_patched_model_keeps_its_parameters(device: str) -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), Other(128, 64), nn.Linear(64, 5)).to(device, BF16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert flashmoe.patch_linear(model) == 1  # 5 is not a multiple of 8
    assert flashmoe.patch_linear(model) == 1
    assert type(model[2]) is Other
    assert isinstance(model[0], nn.Linear)
    assert state.keys() == model.state_dict().keys()
    x = torch.randn(9, 64, device=device, dtype=BF16)
    model[0](x)
    assert ("cpu:" if device == "cpu" else "linear") in _extension.last_kernel()
    assert torch.equal(model[0](x[:1]), model[0](x)[:1])
    with pytest.raises(ArgumentTypeError, match="found int"):
        flashmoe.patch_linear(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x, w, b: (x[0, 0], w, b), ShapeError, r"x has shape \[\]"),
        (lambda x, w, b: (x, w.half(), b), DtypeError, "weight is float16; x's bfloat16"),
        (lambda x, w, b: (x, None, b), FlashmoeError, "weight is None; a tensor is needed"),
        (lambda x, w, b: (x.tolist(), w, b), FlashmoeError, "x must be a torch.Tensor"),
    ],
)
def test_refusals_name_the_value(change: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        flashmoe.linear(*change(*tensors(12, 40, 64, BF16, "cpu")))  # type: ignore[operator]


def test_no_tile_can_be_named_on_the_cpu() -> None:
    x, w, _ = tensors(12, 40, 64, BF16, "cpu")
    with pytest.raises(Exception, match=r"linear\.tile"):
        torch.ops.flashmoe._linear(x, w, None, 0)


@pytest.mark.gpu
def test_sizes_that_no_kernel_takes() -> None:
    x, w, _ = tensors(12, 44, 64, BF16, "cuda")
    with pytest.raises(ShapeError, match="n is 44; on a GPU it must be a multiple of 8"):
        flashmoe.linear(x, w)
