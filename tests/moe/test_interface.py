"""flashmoe.fused_moe, topk_route, grouped_mm: what they accept, reject and return, and how they work with torch's machinery."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashmoe
from flashmoe.errors import ArgumentError, DifferentiationError
from flashmoe.moe import options
from tests.torch_warnings import COMPILED

from .layer import FULL, SMALL, call, leaf_names, run
from .reference import Case, Inputs, compare, expect, local_experts, make_inputs

pytestmark = [
    *COMPILED,
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def with_gradients(case: Case, device: str) -> Inputs:
    inputs = make_inputs(case, device=device)
    for leaf in inputs.leaves():
        leaf.requires_grad_()
    return inputs


def gradients(out: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return torch.autograd.grad(out, inputs.leaves(), weights)


# Results


@pytest.mark.parametrize(
    "case", [SMALL, FULL, replace(FULL, layout="interleaved", transposed=True, mapped=True)], ids=str
)
def test_the_three_operators_give_the_same_bits(case: Case, device: str) -> None:
    """With a gradient to record, without one, and with the caller's output."""
    inputs = with_gradients(case, device)
    recorded = call(case, inputs)
    with torch.no_grad():
        plain = call(case, inputs)
        wide = torch.full((case.tokens, 2 * case.hidden), float("nan"), dtype=case.dtype, device=device)
        out = wide[:, : case.hidden]
        assert call(case, inputs, out=out) is out
        assert call(case, inputs, out=out.requires_grad_()) is out  # nothing is recorded
    assert recorded.requires_grad
    assert torch.equal(recorded, plain)
    assert torch.equal(plain, out)
    assert wide[:, case.hidden :].isnan().all()


@pytest.mark.parametrize("top_k", [1, 3])
def test_weights_on_input(top_k: int, device: str) -> None:
    """The experts get the weighted input; their outputs are not weighted."""
    case = replace(FULL, top_k=top_k, sentinels=True)
    inputs = make_inputs(case, device=device)
    single = replace(case, top_k=1, tokens=1, shared=False)
    exact = torch.zeros(case.tokens, case.hidden, dtype=torch.float64, device=device)
    tolerance = 0.0
    for token in range(case.tokens):
        for choice in range(top_k):
            x = (inputs.x[token] * inputs.topk_weights[token, choice]).to(case.dtype)
            ids = inputs.topk_ids[token, choice].view(1, 1)
            one = torch.ones(1, 1, device=device)
            slot = Inputs(x[None], inputs.w13, inputs.w2, one, ids, b13=inputs.b13, b2=inputs.b2)
            expected = expect(single, slot)
            exact[token] += expected.out[0]
            tolerance = max(tolerance, expected.tolerance)
    assert inputs.shared is not None
    exact += inputs.shared.double()
    found = call(case, inputs, weights_on_input=True)
    compare("out", found, exact, top_k * tolerance + torch.finfo(case.dtype).eps * exact.abs().max().item())
    out = torch.empty_like(found)
    assert torch.equal(call(case, inputs, weights_on_input=True, out=out), found)
    assert torch.equal(out, found)


def test_no_tokens(device: str) -> None:
    """Results without rows; weight gradients are zeros."""
    case = replace(FULL, tokens=0)
    inputs = with_gradients(case, device)
    out = call(case, inputs)
    assert out.shape == (0, case.hidden)
    for name, gradient in zip(
        ["x", "w13", "w2", "weights", "b13", "b2", "shared"], gradients(out, inputs), strict=True
    ):
        assert torch.equal(gradient, torch.zeros_like(gradient)), name
    weights, ids, counts = flashmoe.topk_route(torch.empty(0, 5, device=device), 2, return_counts=True)
    assert (weights.shape, ids.shape, counts.tolist()) == ((0, 2), (0, 2), [0] * 5)


def test_ids_that_name_no_expert_leave_shared_alone(device: str) -> None:
    inputs = make_inputs(FULL, device=device)
    inputs.topk_ids = torch.full_like(inputs.topk_ids, FULL.experts)
    inputs.topk_ids[::2] = -1
    assert inputs.shared is not None
    assert torch.equal(call(FULL, inputs), inputs.shared)


def test_weights_of_experts_that_nobody_chose_are_not_looked_at(device: str) -> None:
    inputs = make_inputs(FULL, device=device)
    inputs.topk_ids = inputs.topk_ids % 2  # of four experts
    expected = call(FULL, inputs)
    for tensor in (inputs.w13, inputs.w2, inputs.b13, inputs.b2):
        assert tensor is not None
        tensor[2:] = float("nan")
    assert torch.equal(call(FULL, inputs), expected)


def test_a_nan_stays_in_its_token(device: str) -> None:
    inputs = make_inputs(FULL, device=device)
    expected = call(FULL, inputs)
    inputs.x[3, 5] = float("nan")
    found = call(FULL, inputs)
    others = [token for token in range(FULL.tokens) if token != 3]
    assert found[3].isnan().all()
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("name", ["x", "w13", "w2", "shared", "topk_weights", "topk_ids", "b13"])
def test_any_strides(name: str, device: str) -> None:
    """Rows apart, rows in reverse order in memory, expanded, misaligned, transposed: the same bits."""
    inputs = make_inputs(FULL, device=device)
    expected = call(FULL, inputs)
    tensor = getattr(inputs, name)
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype, device=device)
    wide[..., 1:-2] = tensor
    swapped = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    for strided in (wide[..., 1:-2], swapped):
        assert torch.equal(strided, tensor)
        assert torch.equal(call(FULL, replace(inputs, **{name: strided})), expected)


def test_expanded_inputs(device: str) -> None:
    inputs = make_inputs(FULL, device=device)
    expanded = replace(inputs, x=inputs.x[:1].expand_as(inputs.x), w13=inputs.w13[:1].expand_as(inputs.w13))
    dense = replace(expanded, x=expanded.x.contiguous(), w13=expanded.w13.contiguous())
    assert torch.equal(call(FULL, expanded), call(FULL, dense))


# Gradients


def test_only_what_is_needed_is_computed(device: str) -> None:
    """Each gradient on its own equals the one computed with all others."""
    inputs = with_gradients(FULL, device)
    everything = gradients(call(FULL, inputs), inputs)
    for index, leaf in enumerate(inputs.leaves()):
        for other in inputs.leaves():
            other.requires_grad_(other is leaf)
        out = call(FULL, inputs)
        weights = torch.linspace(-1, 1, out.numel(), device=device).view_as(out).to(out.dtype)
        (alone,) = torch.autograd.grad(out, leaf, weights)
        assert torch.equal(alone, everything[index]), index


def test_gradients_have_their_inputs_dtypes(device: str) -> None:
    inputs = with_gradients(replace(FULL, weights_dtype=torch.float16), device)
    for leaf, gradient in zip(inputs.leaves(), gradients(call(FULL, inputs), inputs), strict=True):
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape)


def test_a_second_derivative_and_forward_mode_are_refused(device: str) -> None:
    inputs = with_gradients(SMALL, device)
    (first,) = torch.autograd.grad(call(SMALL, inputs).float().sum(), inputs.x, create_graph=True)
    with pytest.raises(DifferentiationError, match="once"):
        first.float().sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs.x.detach(), torch.ones_like(inputs.x))
        with pytest.raises(DifferentiationError, match="forward-mode"):
            call(SMALL, replace(inputs, x=dual))


def test_out_takes_no_gradient(device: str) -> None:
    inputs = with_gradients(SMALL, device)
    with pytest.raises(ArgumentError, match="no_grad"):
        call(SMALL, inputs, out=torch.empty_like(inputs.x))


def test_checkpointed(device: str) -> None:
    inputs = with_gradients(FULL, device)
    again = checkpoint(lambda: call(FULL, inputs), use_reentrant=False)
    for a, b in zip(gradients(again, inputs), gradients(call(FULL, inputs), inputs), strict=True):
        assert torch.equal(a, b)


def test_backward_twice_gives_the_same_bits(device: str) -> None:
    inputs = with_gradients(FULL, device)
    out = call(FULL, inputs)
    first = torch.autograd.grad(out, inputs.leaves(), torch.ones_like(out), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, inputs.leaves(), torch.ones_like(out)), strict=True):
        assert torch.equal(a, b)


def test_functional_gradient(device: str) -> None:
    inputs = with_gradients(SMALL, device)

    def loss(x: Tensor, w13: Tensor) -> Tensor:
        return call(SMALL, replace(inputs, x=x, w13=w13)).float().square().sum()

    found = torch.func.grad(loss, (0, 1))(inputs.x.detach(), inputs.w13.detach())
    expected = torch.autograd.grad(loss(inputs.x, inputs.w13), (inputs.x, inputs.w13))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", [FULL, replace(FULL, transposed=True, layout="interleaved")], ids=str)
def test_a_graph_that_is_kept_can_be_run_again(case: Case, device: str) -> None:
    """Only the last pass may overwrite what the forward pass kept."""
    inputs = make_inputs(case, device=device)
    leaves = [leaf.requires_grad_() for leaf in inputs.to(case.dtype).leaves()]
    out = run(case, Inputs(**{**vars(inputs), **dict(zip(leaf_names(inputs), leaves, strict=True))}))
    dout = torch.randn_like(out)
    passes = [torch.autograd.grad(out, leaves, dout, retain_graph=keep) for keep in (True, True, False)]
    for gradients in passes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, passes[0], strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, dout)


# Torch's machinery


def arguments_of(case: Case, inputs: Inputs) -> tuple[Any, ...]:
    tensors = (inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, inputs.topk_ids)
    words = (case.activation, case.layout, case.transposed)
    return (*tensors, inputs.b13, inputs.b2, inputs.expert_map, inputs.shared, *words)


@pytest.mark.parametrize("case", [SMALL, replace(FULL, transposed=True), replace(SMALL, tokens=0)], ids=str)
def test_opcheck(case: Case, device: str) -> None:
    inputs = make_inputs(case, device=device)
    operators = torch.ops.flashmoe
    torch.library.opcheck(operators._fused_moe_inference.default, arguments_of(case, inputs))
    torch.library.opcheck(operators._fused_moe_out.default, (torch.empty_like(inputs.x), *arguments_of(case, inputs)))
    torch.library.opcheck(operators._fused_moe.default, (*arguments_of(case, inputs), True))
    out, *kept = operators._fused_moe.default(*arguments_of(case, inputs), True)
    for needs in (63, 5, 8):
        biases = (inputs.b13, inputs.b2)
        wanted = needs if biases[0] is not None else needs & 15
        layer = (torch.ones_like(out), inputs.x, inputs.w13, inputs.w2, *biases, *kept)
        words = (case.activation, case.layout, case.transposed)
        torch.library.opcheck(operators._fused_moe_backward.default, (*layer, *words, wanted))
        # Never called in a compiled graph.
        eager = ("test_schema", "test_faketensor")
        consuming = operators._fused_moe_backward_consuming.default
        torch.library.opcheck(consuming, (*layer, *words, wanted), test_utils=eager)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_last_pass_of_a_graph_overwrites_what_it_kept(device: str, keeps: bool) -> None:
    """No other pass does: a second pass needs the preactivation."""
    inputs = make_inputs(SMALL, device=device)
    called: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(operator))
            return operator(*args, **(kwargs or {}))

    x = inputs.x.detach().requires_grad_()
    out = flashmoe.fused_moe(
        x, inputs.w13, inputs.w2, inputs.topk_weights, inputs.topk_ids, activation=SMALL.activation
    )
    with Names():
        out.sum().backward(retain_graph=keeps)
    assert any("_fused_moe_backward_consuming" in name for name in called) is not keeps


@pytest.mark.parametrize("scoring", options.SCORINGS)
def test_opcheck_routing(scoring: str, device: str) -> None:
    logits = torch.randn(9, 8, device=device, requires_grad=True)
    options = (scoring, torch.zeros(8, device=device), 4, 2, True, 2.0)
    torch.library.opcheck(torch.ops.flashmoe.topk_route.default, (logits, 3, *options))
    weights, ids = flashmoe.topk_route(logits.detach(), 3)
    torch.library.opcheck(torch.ops.flashmoe.moe_sort.default, (ids, weights, None, 8))


def test_opcheck_grouped(device: str) -> None:
    a = torch.randn(20, 16, device=device).half().requires_grad_()
    b = torch.randn(3, 16, 24, device=device).half().requires_grad_()
    offsets = torch.tensor([5, 5, 20], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.flashmoe.grouped_mm.default, (a, b, offsets))
    torch.library.opcheck(torch.ops.flashmoe._grouped_mm_2d2d.default, (a.mT.detach().requires_grad_(), a, offsets))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_layer_is_one_graph_and_equal(dynamic: bool, device: str) -> None:
    torch._dynamo.reset()

    def layer(logits: Tensor, x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        weights, ids = flashmoe.topk_route(logits, 2, scale=0.5)
        return flashmoe.fused_moe(x * 2, w13, w2, weights, ids, shared=x)

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 9, 16):
        inputs = with_gradients(replace(SMALL, tokens=tokens), device)
        logits = torch.randn(tokens, SMALL.experts, device=device, requires_grad=True)
        leaves = (logits, inputs.x, inputs.w13, inputs.w2)
        expected, found = layer(*leaves), compiled(*leaves)
        assert torch.equal(found, expected)
        weights = torch.randn_like(expected)
        pairs = zip(
            torch.autograd.grad(found, leaves, weights), torch.autograd.grad(expected, leaves, weights), strict=True
        )
        for a, b in pairs:
            assert torch.equal(a, b)
        with torch.no_grad():
            assert torch.equal(compiled(*leaves), expected)


def test_compiled_into_out(device: str) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(SMALL, device=device)
    compiled = torch.compile(
        lambda x, out: call(SMALL, replace(inputs, x=x), out=out).clone(), fullgraph=True, backend="aot_eager"
    )
    out = torch.empty_like(inputs.x)
    expected = call(SMALL, inputs)
    assert torch.equal(compiled(inputs.x, out), expected)
    assert torch.equal(out, expected)


def test_autocast(device: str) -> None:
    """Everything of x's dtype is cast; the routing weights are not, and gradients have the parameters' dtype."""
    inputs = with_gradients(replace(FULL, dtype=torch.float32), device)
    with torch.autocast(device, torch.bfloat16):
        out = call(FULL, inputs)
    assert out.dtype is torch.bfloat16
    half = inputs.to(torch.bfloat16)
    half.topk_weights = inputs.topk_weights.detach()
    assert torch.equal(out, call(FULL, half))
    mixed = replace(inputs, x=half.x)  # the output of an earlier layer under autocast, with the parameters
    with torch.autocast(device, torch.bfloat16):
        on_input = call(FULL, mixed, weights_on_input=True)
    assert torch.equal(on_input, call(FULL, half, weights_on_input=True))
    for leaf, gradient in zip(inputs.leaves(), gradients(out, inputs), strict=True):
        assert gradient.dtype is leaf.dtype


def test_vmap(device: str) -> None:
    """More tokens or, if weights are mapped, more calls."""
    many = [make_inputs(FULL, seed, device=device) for seed in range(3)]
    first = many[0]
    expected = [call(FULL, replace(first, x=one.x, topk_ids=one.topk_ids)) for one in many]

    def one_of(x: Tensor, ids: Tensor, w2: Tensor) -> Tensor:
        return call(FULL, replace(first, x=x, topk_ids=ids, w2=w2))

    stacked = torch.stack([one.x for one in many], 1), torch.stack([one.topk_ids for one in many])
    with torch.no_grad():
        found = torch.vmap(one_of, (1, 0, None))(*stacked, first.w2)
    for index, out in enumerate(expected):
        assert torch.equal(found[index], out)
    for grad in (torch.enable_grad, torch.no_grad):
        with grad():
            mapped = torch.vmap(one_of, (1, 0, 0))(*stacked, first.w2.expand(3, *first.w2.shape))
        assert torch.equal(mapped, found)


def test_per_sample_gradients(device: str) -> None:
    inputs = make_inputs(SMALL, device=device)

    def loss(w2: Tensor, x: Tensor) -> Tensor:
        return call(SMALL, replace(inputs, x=x, w2=w2)).float().square().sum()

    xs = torch.stack([inputs.x, inputs.x * 2])
    found = torch.vmap(torch.func.grad(loss), (None, 0))(inputs.w2, xs)
    for index, x in enumerate(xs):
        w2 = inputs.w2.clone().requires_grad_()
        assert torch.equal(found[index], torch.autograd.grad(loss(w2, x), w2)[0])


def test_several_gradients_at_once(device: str) -> None:
    """With torch.func; the older is_grads_batched has no rule for an operator like this one."""
    inputs = with_gradients(FULL, device)
    out = call(FULL, inputs)
    given = torch.randn(2, *out.shape, device=device).to(out.dtype)
    expected = torch.stack([torch.autograd.grad(out, inputs.x, one, retain_graph=True)[0] for one in given])
    with pytest.raises(DifferentiationError, match=r"does not support is_grads_batched=True.*torch\.func\.vjp"):
        torch.autograd.grad(out, inputs.x, given, is_grads_batched=True)
    _, pull = torch.func.vjp(lambda x: call(FULL, replace(inputs, x=x)), inputs.x.detach())
    assert torch.equal(torch.vmap(pull)(given)[0], expected)


def test_the_layers_parts_under_transforms(device: str) -> None:
    """Per-sample gradients through router and layer, and of grouped_mm; no tangent is lost silently."""
    module = flashmoe.MoE(32, 24, 4, 2, device=device, dtype=torch.float16, shared_intermediate=8)
    parameters, xs = dict(module.named_parameters()), torch.randn(3, 32, device=device).half()

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(module, parameters, (x[None],))
        return out.float().square().sum()

    found = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, xs)
    for index, x in enumerate(xs):
        expected = torch.autograd.grad(loss(parameters, x), list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[name][index], gradient, rtol=1e-2, atol=1e-3)
    a, b = torch.randn(6, 16, device=device).half(), torch.randn(3, 16, 8, device=device).half()
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32, device=device)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return flashmoe.grouped_mm(a, b, offsets).float().square().sum()

    mapped = torch.vmap(torch.func.grad(product, (0, 1)), (0, None))(torch.stack([a, a * 2]), b)
    for index, factor in enumerate((1, 2)):
        leaves = [(a * factor).requires_grad_(), b.clone().requires_grad_()]
        for gradient, expected_one in zip(mapped, torch.autograd.grad(product(*leaves), leaves), strict=True):
            assert torch.equal(gradient[index], expected_one)
    logits = torch.randn(6, 8, device=device)
    for function, value in (
        (lambda a: flashmoe.grouped_mm(a, b, offsets), a),
        (lambda logits: flashmoe.topk_route(logits, 2)[0], logits),
    ):
        with pytest.raises(DifferentiationError, match="no forward-mode derivative"):
            torch.func.jvp(function, (value,), (value,))
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(DifferentiationError, match="no forward-mode derivative"),
        ):
            function(torch.autograd.forward_ad.make_dual(value, value))


def test_autocast_under_transforms(device: str) -> None:
    inputs = make_inputs(replace(SMALL, dtype=torch.float32), device=device)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return call(SMALL, replace(inputs, x=x)).float().square().sum()

    leaf = inputs.x.clone().requires_grad_()
    assert torch.equal(torch.func.grad(loss)(inputs.x), torch.autograd.grad(loss(leaf), leaf)[0])


def test_flops(device: str) -> None:
    """Two operations per multiply-add of each slot; the backward pass has two products for each forward product."""
    inputs = with_gradients(FULL, device)
    layer = 6 * FULL.tokens * FULL.top_k * FULL.hidden * FULL.intermediate
    with FlopCounterMode(display=False) as counter:
        out = call(FULL, inputs)
    assert counter.get_total_flops() == layer
    with FlopCounterMode(display=False) as counter:
        gradients(out, inputs)
    assert counter.get_total_flops() == 2 * layer
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(FULL, inputs, out=torch.empty_like(out))
    assert counter.get_total_flops() == layer


def test_fake_tensors_have_the_shapes_that_real_ones_have(device: str) -> None:
    case = replace(FULL, layout="interleaved")
    inputs = make_inputs(case, device=device)
    operator = torch.ops.flashmoe._fused_moe.default
    for keep in (True, False):
        real = operator(*arguments_of(case, inputs), keep)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments_of(case, inputs)]
            for a, b in zip(operator(*fakes, keep), real, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_sentinels_and_the_map_meet(device: str) -> None:
    """An id is looked up in the map, and the result may also be no expert of this layer."""
    case = replace(FULL, mapped=True, sentinels=True)
    inputs = make_inputs(case, device=device)
    local = local_experts(case, inputs)
    plain = replace(inputs, expert_map=None, topk_ids=local)
    assert torch.equal(call(case, inputs), call(case, plain))


def test_only_a_tangent_is_refused_not_the_level() -> None:
    from torch.autograd import forward_ad

    from flashmoe.moe.autograd import check_no_tangents

    with forward_ad.dual_level():
        check_no_tangents("fused_moe", torch.ones(2), 3, None)
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(DifferentiationError, match="fused_moe"):
            check_no_tangents("fused_moe", torch.ones(2), dual)
