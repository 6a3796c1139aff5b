"""The gradient of an additive mask: against autograd and finite differences in float64, for every broadcast and every code path."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashmoe
from flashmoe.attn import bias_gradient
from flashmoe.errors import DifferentiationError
from flashmoe_tools.operations.attention.reference import ScoreOptions

from .drawn import lengths
from .reference import DTYPES, reference_dtype
from .test_dropout import dropped, state_on

# Relative to the largest gradient, as for dq, dk and dv; the mask's gradient is rounded once more.
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make(device: str, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=device).to(dtype).requires_grad_()


def wanted_gradients(
    leaves: tuple[Tensor, ...], upstream: Tensor, options: ScoreOptions, factors: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of q, k, v and the mask, by autograd through the definition; and how much the rounding of out may change the mask's: the
    error of each row's row_dot, weighted with the row's share in each sum."""
    high = reference_dtype(upstream.device)
    q, k, v, bias = exact = [leaf.detach().to(high).requires_grad_() for leaf in leaves]
    shape = (*q.shape[:3], k.shape[2])
    ones = torch.ones(shape, device=q.device, dtype=high)
    out, lse = dropped(q, k, v, options, bias, ones if factors is None else factors)
    lost = (out.detach() * upstream).abs().sum(-1) * torch.finfo(leaves[0].dtype).eps
    lost = torch.where(lse.detach().isfinite(), lost, 0.0).to(lse.dtype)
    (rounding,) = torch.autograd.grad(lse, bias, lost, retain_graph=True)
    return torch.autograd.grad(out, exact, upstream.to(high)), rounding


def check(leaves: tuple[Tensor, ...], options: ScoreOptions, dropout_p: float = 0.0) -> None:
    """The gradients of a call, compared with the definition, including those of q, k and v."""
    q, k, v, bias = leaves
    state = state_on(str(q.device)) if dropout_p else None
    out = flashmoe.attention(
        *(q, k, v),
        attn_mask=bias,
        causal=options.causal,
        window=options.window,
        softcap=options.softcap,
        scale=options.scale,
        dropout_p=dropout_p,
        rng_state=state,
    )
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, upstream)
    factors = None
    if state is not None:
        factors = flashmoe.dropout_mask(state, dropout_p, *q.shape[:3], k.shape[2]) / (1 - dropout_p)
    wanted, rounding = wanted_gradients(leaves, upstream, options, factors)
    largest = max(gradient.abs().max().item() for gradient in wanted[:3])
    for name, ours, theirs, leaf in zip(("dq", "dk", "dv", "dbias"), found, wanted, leaves, strict=True):
        assert ours.shape == leaf.shape
        assert ours.dtype == leaf.dtype
        limit = LIMITS[leaf.dtype] * (theirs.abs().max().item() if name == "dbias" else largest) + 1e-6
        error = (ours.to(theirs.dtype) - theirs).abs() - (rounding if name == "dbias" else 0.0)
        assert error.max().item() <= limit, (
            f"{name} of {tuple(leaf.shape)}: {error.max().item():.3e}, at most {limit:.3e}"
        )


# B, Hq, Hkv, Sq, Sk, D, Dv; the mask's shape in the sizes' letters or 1, possibly fewer; options; dropout
CASES = [
    ((2, 4, 2, 70, 133, 64, 64), "bhqk", ScoreOptions(causal=True), 0.0),
    ((3, 4, 4, 130, 65, 64, 64), "1hqk", ScoreOptions(), 0.0),
    ((2, 3, 1, 65, 200, 40, 72), "b1qk", ScoreOptions(window=(33, 5)), 0.0),
    ((2, 2, 2, 97, 97, 128, 128), "11qk", ScoreOptions(causal=True, softcap=2.0), 0.0),
    ((2, 4, 2, 96, 150, 128, 64), "qk", ScoreOptions(softcap=1.0, scale=-0.2), 0.0),
    ((2, 2, 2, 150, 150, 64, 64), "1h1k", ScoreOptions(causal=True), 0.0),
    ((2, 2, 1, 150, 75, 111, 111), "bhq1", ScoreOptions(softcap=1.5), 0.0),
    ((2, 2, 2, 100, 140, 64, 64), "b111", ScoreOptions(softcap=2.0), 0.0),
    ((2, 4, 2, 40, 70, 256, 256), "1hqk", ScoreOptions(causal=True), 0.0),
    ((1, 2, 2, 33, 70, 192, 192), "hqk", ScoreOptions(), 0.0),
    ((4, 6, 3, 1, 300, 64, 64), "1hqk", ScoreOptions(), 0.0),
    ((2, 2, 2, 200, 64, 64, 64), "1hqk", ScoreOptions(causal=True), 0.0),  # rows that see no key
    ((2, 4, 2, 70, 133, 64, 64), "1hqk", ScoreOptions(causal=True), 0.3),
    ((2, 2, 2, 150, 150, 128, 128), "b11k", ScoreOptions(), 0.3),
    ((1, 2, 2, 50, 90, 256, 256), "hqk", ScoreOptions(window=(20, 0), softcap=3.0), 0.2),
]
LONG = [  # more tiles than multiprocessors
    ((2, 8, 4, 700, 904, 64, 64), "1hqk", ScoreOptions(causal=True), 0.0),
    ((2, 8, 8, 600, 777, 128, 72), "bhqk", ScoreOptions(softcap=3.0), 0.0),
    # dq, dk and dv from one kernel, which streams the mask.
    ((2, 8, 4, 600, 776, 128, 72), "bhqk", ScoreOptions(causal=True), 0.0),
    ((3, 4, 4, 1000, 520, 64, 40), "b1qk", ScoreOptions(window=(300, 5)), 0.0),
    # The mask's gradient also comes from the stored gradient of the scores if every row sees every key: summed over all heads and sequences,
    # over some, over a group; with rows of 650 keys the mask is copied first.
    ((2, 4, 4, 520, 648, 128, 128), "11qk", ScoreOptions(), 0.0),
    ((2, 4, 4, 600, 520, 64, 64), "bhqk", ScoreOptions(), 0.0),
    ((3, 4, 2, 513, 584, 128, 120), "1hqk", ScoreOptions(scale=-0.1), 0.0),
    ((2, 4, 1, 577, 640, 64, 48), "b1qk", ScoreOptions(), 0.0),
    ((2, 2, 2, 520, 650, 64, 64), "bhqk", ScoreOptions(), 0.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG, ids=lambda case: case[1])
def test_long_rows(case: tuple[tuple[int, ...], str, ScoreOptions, float]) -> None:
    test_against_autograd("cuda", case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}-q{case[0][3]}k{case[0][4]}d{case[0][5]}")
def test_against_autograd(device: str, case: tuple[tuple[int, ...], str, ScoreOptions, float]) -> None:
    (batch, heads, kv_heads, rows, keys, dim, dim_v), letters, options, dropout_p = case
    sizes = {"b": batch, "h": heads, "q": rows, "k": keys, "1": 1}
    for dtype in DTYPES[device]:
        q = make(device, dtype, batch, heads, rows, dim)
        k, v = make(device, dtype, batch, kv_heads, keys, dim), make(device, dtype, batch, kv_heads, keys, dim_v)
        bias = make(device, dtype, *(sizes[letter] for letter in letters))
        check((q, k, v, bias), options, dropout_p)


@settings(max_examples=15, deadline=None)
@given(
    sizes=lengths(most=140),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    dim=st.sampled_from([16, 64, 72, 128]),
    ones=st.lists(st.booleans(), min_size=4, max_size=4),
    options=st.builds(
        ScoreOptions,
        causal=st.booleans(),
        softcap=st.sampled_from([0.0, 2.0]),
        window=st.sampled_from([None, (17, 3), (0, 64)]),
    ),
    dropout_p=st.sampled_from([0.0, 0.0, 0.4]),
)
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_drawn(
    on: str,
    sizes: tuple[int, int],
    batch: int,
    heads: tuple[int, int],
    dim: int,
    ones: list[bool],
    options: ScoreOptions,
    dropout_p: float,
) -> None:
    rows, keys = sizes
    dtype = DTYPES[on][0]
    q = make(on, dtype, batch, heads[0], rows, dim)
    k, v = (make(on, dtype, batch, heads[1], keys, dim) for _ in range(2))
    full = (batch, heads[0], rows, keys)
    bias = make(on, dtype, *(1 if one else size for one, size in zip(ones, full, strict=True)))
    check((q, k, v, bias), options, dropout_p)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["mask", "alibi"])
def test_finite_differences(kind: str, dropout_p: float) -> None:
    """Central differences of the definition in float64 against our float32: all elements of the mask's gradient, and 30 each of q's, k's and v's."""
    q, k, v = (torch.randn(2, 2, length, 16, dtype=torch.float64) for length in (5, 7, 7))
    options, upstream = ScoreOptions(causal=True, softcap=2.0), torch.randn(2, 2, 5, 16, dtype=torch.float64)
    bias, slopes = torch.randn(1, 2, 5, 7, dtype=torch.float64), torch.rand(2, 2, dtype=torch.float64)
    if kind == "alibi":
        distance = torch.arange(2, 7).unsqueeze(1) - torch.arange(7)
        bias = -slopes[..., None, None] * distance.abs()
    state = state_on("cpu")
    factors = flashmoe.dropout_mask(state, dropout_p, 2, 2, 5, 7).double() / (1.0 - dropout_p)
    exact = [q, k, v, *([bias] if kind == "mask" else [])]
    leaves = [tensor.float().requires_grad_() for tensor in exact]
    scores: dict[str, Any] = {"attn_mask": leaves[3]} if kind == "mask" else {"alibi_slopes": slopes.float()}
    drawn: dict[str, Any] = {"dropout_p": dropout_p, "rng_state": state} if dropout_p else {}
    out = flashmoe.attention(*leaves[:3], **scores, causal=True, softcap=2.0, **drawn)
    found = torch.autograd.grad(out, leaves, upstream.float())
    step = 1e-5
    for number, tensor in enumerate(exact):
        indices = torch.cartesian_prod(*(torch.arange(size) for size in tensor.shape))
        if number < 3:
            indices = indices[torch.randperm(len(indices))[:30]]
        for index in map(tuple, indices.tolist()):
            sides = []
            for sign in (1, -1):
                moved = [t.clone() if at == number else t for at, t in enumerate([*exact, bias][:4])]
                moved[number][index] += sign * step
                sides.append(float((dropped(*moved[:3], options, moved[3], factors)[0] * upstream).sum()))
            assert abs(found[number][index].item() - (sides[0] - sides[1]) / (2 * step)) < 2e-5


def test_strides_and_expanded_leaves(device: str) -> None:
    """Any strides of the mask; a gradient through expand and transpose equals the plain one."""
    dtype = DTYPES[device][0]
    q, k, v = (make(device, dtype, 2, 4, 70, 64) for _ in range(3))
    upstream = torch.randn_like(q)
    bias = make(device, dtype, 4, 70, 70)
    (plain,) = torch.autograd.grad(flashmoe.attention(q, k, v, attn_mask=bias), bias, upstream)
    turned = bias.detach().mT.contiguous().requires_grad_()
    (found,) = torch.autograd.grad(flashmoe.attention(q, k, v, attn_mask=turned.mT), turned, upstream)
    assert torch.equal(found.mT, plain)
    wide = torch.zeros(4, 70, 91, device=device, dtype=dtype)
    wide[..., 5:75] = bias.detach()
    wide.requires_grad_()
    (found,) = torch.autograd.grad(flashmoe.attention(q, k, v, attn_mask=wide[..., 5:75]), wide, upstream)
    assert torch.equal(found[..., 5:75], plain)
    assert not found[..., 75:].any()
    (found,) = torch.autograd.grad(flashmoe.attention(q, k, v, attn_mask=bias.expand(2, 4, 70, 70)), bias, upstream)
    scale = plain.abs().max().item()
    assert (found - plain).abs().max().item() <= LIMITS[dtype] * scale


def test_alone_and_together_are_the_same_bits(device: str) -> None:
    """On every run, and whichever other gradients are needed; if no other is, the mask's gradient needs none of their kernels."""
    for shape in ((1, 4, 150, 150), (1, 1, 150, 150), (1, 4, 1, 150)):
        dtype = DTYPES[device][0]
        q, k, v, bias = (*(make(device, dtype, 3, 4, 150, 64) for _ in range(3)), make(device, dtype, *shape))
        upstream = torch.randn_like(q)
        out = flashmoe.attention(q, k, v, attn_mask=bias, causal=True)
        first = torch.autograd.grad(out, (q, k, v, bias), upstream, retain_graph=True)[3]
        again = torch.autograd.grad(out, bias, upstream)[0]
        frozen = flashmoe.attention(q.detach(), k.detach(), v.detach(), attn_mask=bias, causal=True)
        alone = torch.autograd.grad(frozen, bias, upstream)[0]
        assert torch.equal(first, again)
        assert torch.equal(first, alone)


def test_lse_and_sinks(device: str) -> None:
    """The gradient through the log-sum-exp, with a sink in it."""
    dtype = DTYPES[device][0]
    q, k, v = (make(device, dtype, 2, 2, 40, 64) for _ in range(3))
    bias, sinks = make(device, dtype, 1, 2, 40, 40), torch.randn(2, device=device, requires_grad=True)
    _, lse = flashmoe.attention(q, k, v, attn_mask=bias, sinks=sinks, return_lse=True)
    (found,) = torch.autograd.grad(lse.sum(), bias)
    high = reference_dtype(q.device)
    exact = bias.detach().to(high).requires_grad_()
    scores = q.detach().to(high) @ k.detach().to(high).mT / 8 + exact
    column = sinks.detach().to(high)[None, :, None, None].expand(2, 2, 40, 1)
    (wanted,) = torch.autograd.grad(torch.cat((scores, column), -1).logsumexp(-1).sum(), exact)
    assert (found - wanted).abs().max().item() <= LIMITS[dtype] * wanted.abs().max().item()


def test_hidden_keys_have_none(device: str) -> None:
    """-inf in the mask: no gradient there and no NaN, including rows whose keys are all hidden."""
    dtype = DTYPES[device][0]
    q, k, v = (make(device, dtype, 2, 2, 70, 64) for _ in range(3))
    bias = torch.zeros(1, 2, 70, 70, device=device, dtype=dtype)
    bias[..., 40:] = -torch.inf
    bias[:, :, 3] = -torch.inf
    bias.requires_grad_()
    (found,) = torch.autograd.grad(flashmoe.attention(q, k, v, attn_mask=bias).float().square().sum(), bias)
    assert found.isfinite().all()
    assert not found[..., 40:].any()
    assert not found[:, :, 3].any()
    assert found[:, :, 4, :40].any()


def test_what_is_on_no_cpu_is_done_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias_gradient, "_by_kernels", lambda given: given.mask)
    q, mask, lse = (torch.empty(1, 2, 5, *last, device="meta") for last in ((16,), (5,), ()))
    found = bias_gradient.bias_gradient(q, None, q, q, q, mask, q, lse, 0.25, -1, -1, 0.0, 0.0, None)
    assert found is mask


def test_empty(device: str) -> None:
    for batch, rows, keys in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        dtype = DTYPES[device][0]
        q, k = make(device, dtype, batch, 2, rows, 64), make(device, dtype, batch, 2, keys, 64)
        bias = make(device, dtype, 1, 2, rows, keys)
        flashmoe.attention(q, k, k, attn_mask=bias).sum().backward()
        assert bias.grad is not None
        assert bias.grad.shape == bias.shape
        assert not bias.grad.any()


def test_sdpa_has_it(device: str) -> None:
    """torch's signature: flashmoe's path, torch's gradients; also with grouped heads and more batch dimensions."""
    dtype = DTYPES[device][0]
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = [
        ((2, 4, 33, 64), (2, 4, 47, 64), (1, 4, 33, 47), False),
        ((2, 4, 33, 64), (2, 2, 47, 64), (4, 33, 47), True),
        ((2, 3, 2, 33, 64), (2, 3, 2, 47, 64), (3, 1, 33, 47), False),
    ]
    for query, key, mask, enable_gqa in shapes:
        leaves = (make(device, dtype, *query), make(device, dtype, *key), make(device, dtype, *key))
        bias = make(device, dtype, *mask)
        assert flashmoe.explain(*leaves, attn_mask=bias, enable_gqa=enable_gqa).path.value == "flashmoe"
        out = flashmoe.scaled_dot_product_attention(*leaves, attn_mask=bias, enable_gqa=enable_gqa)
        upstream = torch.randn_like(out)
        found = torch.autograd.grad(out, (*leaves, bias), upstream)
        exact = [leaf.detach().double().requires_grad_() for leaf in (*leaves, bias)]
        theirs = F.scaled_dot_product_attention(*exact[:3], attn_mask=exact[3], enable_gqa=enable_gqa)
        wanted = torch.autograd.grad(theirs, exact, upstream.double())
        for ours, expected in zip(found, wanted, strict=True):
            assert (ours - expected).abs().max().item() <= LIMITS[dtype] * expected.abs().max().item()


def test_autocast(device: str) -> None:
    """The mask's gradient has the mask's own dtype."""
    q, k, v, bias = (torch.randn(2, 2, 33, n, device=device, requires_grad=True) for n in (64, 64, 64, 33))
    with torch.autocast(device, torch.bfloat16):
        out = flashmoe.attention(q, k, v, attn_mask=bias)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, bias), upstream)
    assert [gradient.dtype for gradient in found] == [torch.float32] * 4
    wanted, _ = wanted_gradients((q, k, v, bias), upstream, ScoreOptions())
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max().item() <= LIMITS[torch.bfloat16] * theirs.abs().max().item()


def test_compiled(device: str) -> None:
    """One graph, forward and backward, with eager's bits."""
    dtype = DTYPES[device][0]
    q, k, v = (make(device, dtype, 2, 2, 70, 64) for _ in range(3))
    bias = make(device, dtype, 1, 2, 70, 70)

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flashmoe.attention(q, k, v, attn_mask=bias * 2, causal=True).float().square().sum()

    compiled: Callable[..., Tensor] = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(loss(q, k, v, bias), (q, k, v, bias))
    found = torch.autograd.grad(compiled(q, k, v, bias), (q, k, v, bias))
    assert all(torch.equal(ours, eager) for ours, eager in zip(found, wanted, strict=True))


def test_the_operator_keeps_torch_s_rules(device: str) -> None:
    dtype = DTYPES[device][0]
    q, k, v, bias = (make(device, dtype, 2, 2, 20, n).detach() for n in (64, 64, 64, 20))
    out, lse = flashmoe.attention(q, k, v, attn_mask=bias, return_lse=True)
    given = (torch.randn_like(out), None, q, k, v, bias[:1], out, lse, 0.125, -1, 0, 0.0, 0.0, None)
    torch.library.opcheck(torch.ops.flashmoe.attention_bias_gradient.default, given)


def test_transforms(device: str) -> None:
    """torch.func: per-sample gradients, and mapped over masks."""
    dtype = DTYPES[device][0]
    q, k, v = (make(device, dtype, 3, 2, 2, 20, 64).detach() for _ in range(3))
    bias = make(device, dtype, 1, 2, 20, 20).detach()

    def loss(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmoe.attention(q, k, v, attn_mask=bias).float().square().sum()

    gradient = torch.func.grad(loss)
    each = torch.func.vmap(gradient, in_dims=(None, 0, 0, 0))(bias, q, k, v)
    for index in range(3):
        wanted = gradient(bias, q[index], k[index], v[index])
        assert torch.allclose(each[index], wanted, atol=1e-5, rtol=1e-3)
    masks = torch.stack((bias, 2 * bias))
    mapped = torch.func.vmap(gradient, in_dims=(0, None, None, None))(masks, q[0], k[0], v[0])
    assert torch.allclose(mapped[1], gradient(masks[1], q[0], k[0], v[0]), atol=1e-5, rtol=1e-3)


def test_what_has_none(device: str) -> None:
    dtype = DTYPES[device][0]
    q = make(device, dtype, 1, 2, 5, 64)
    slopes = torch.ones(2, device=device, requires_grad=True)
    with pytest.raises(DifferentiationError, match="no gradient for alibi_slopes"):
        flashmoe.attention(q, q, q, alibi_slopes=slopes)
    bias = make(device, dtype, 1, 2, 5, 5)
    out = flashmoe.attention(q, q, q, attn_mask=bias)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), bias, create_graph=True)
    with pytest.raises(DifferentiationError, match="differentiated once"):
        gradient.float().sum().backward()
    used = torch.tensor([5], dtype=torch.int32, device=device)
    numbers = (5, 5, 0.125, -1, -1, 0.0, 0)
    out, _ = torch.ops.flashmoe.attention_varlen_forward(q, q, q, None, None, used, None, None, bias, *numbers)
    with pytest.raises(DifferentiationError, match="with seqused_k, has no gradient for attn_mask"):
        out.float().sum().backward()


@pytest.mark.gpu
def test_kernels_take_additive_masks_alone() -> None:
    q = torch.randn(1, 2, 5, 64, device="cuda").half()
    out, lse = flashmoe.attention(q, q, q, return_lse=True)
    call = torch.ops.flashmoe._attention_bias_gradient
    for mask in (torch.ones(1, 2, 5, 5, device="cuda", dtype=torch.bool), torch.ones(1, 2, device="cuda")):
        with pytest.raises(RuntimeError, match=r"attention\.companion_dtype\|name=attn_mask"):
            call(out, q, q, q, mask, lse, lse, 0.125, -1, -1, 0.0, 0.0, None)


@pytest.mark.gpu
def test_no_tensor_of_the_scores_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast mask costs its size and some partial sums, and no [B, H, Sq, Sk] tensor if FLASHMOE_SPLIT_BACKWARD is 1 or it would exceed 1 GiB."""
    q, k, v = (make("cuda", torch.bfloat16, 8, 16, 1024, 64).detach() for _ in range(3))
    scores = 8 * 16 * 1024 * 1024 * 2
    monkeypatch.setenv("FLASHMOE_SPLIT_BACKWARD", "1")
    for shape in ((1, 1, 1024, 1024), (1, 16, 1024, 1024), (8, 1, 1, 1024), (1, 16, 1024, 1)):
        bias = make("cuda", torch.bfloat16, *shape)
        out = flashmoe.attention(q, k, v, attn_mask=bias)
        upstream = torch.randn_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, bias, upstream)
        assert torch.cuda.max_memory_allocated() - before < scores / 4, shape


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 4, 3, 5), (2, 1, 3, 1), (1, 1, 1, 5)])
def test_the_kernels_sums_fold_into_the_mask_s_shape(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], splits: int
) -> None:
    """Over splits, and over the dimensions in which the mask has size 1 and the sums do not. The operators' results are made up."""
    sums = torch.randn(splits, 2, 4, 3, 5)
    made = {"_attention_varlen_backward": (None, None), "_attention_bias_gradient": sums}
    operators = {name: SimpleNamespace(default=lambda *_, found=found: found) for name, found in made.items()}
    monkeypatch.setattr(
        bias_gradient, "torch", SimpleNamespace(ops=SimpleNamespace(flashmoe=SimpleNamespace(**operators)))
    )
    given: Any = SimpleNamespace(**dict.fromkeys(bias_gradient.BiasGradient._fields) | {"mask": torch.empty(shape)})
    expected = (
        sums.sum(0).sum([dim for dim in range(4) if shape[dim] == 1], keepdim=True) if 1 in shape else sums.sum(0)
    )
    torch.testing.assert_close(bias_gradient._by_kernels(given), expected)
