"""flashmoe.MLA: both forms, chunks and caches against the definition in float64, and against transformers' own layers."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import flashmoe
from flashmoe.errors import (
    ArgumentError,
    ArgumentTypeError,
    DifferentiationError,
    DtypeError,
    FlashmoeError,
    ShapeError,
)

DIM = 96
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # relative to the output's norm
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek v3": {"q_rank": 48},
    "deepseek v2 lite": {"heads": 2, "scale": 0.11, "bias": True},
    "glm lite": {"q_rank": 32, "nope_dim": 192, "value_dim": 256, "interleaved": False, "rope_theta": 1e6, "eps": 1e-5},
}


def make(device: str = "cpu", dtype: torch.dtype = torch.float32, heads: int = 3, **options: Any) -> flashmoe.MLA:
    torch.manual_seed(0)
    module = flashmoe.MLA(DIM, heads, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() == 2 else 1.0)
    return module.to(device, dtype).requires_grad_(requires_grad=False)


def formula(module: flashmoe.MLA, x: Tensor, theta: float, eps: float) -> Tensor:
    """The result for x [B, S, dim] in float64: keys and values of each head, and a softmax per row."""
    weights = {name: tensor.cpu().double() for name, tensor in module.state_dict().items()}
    x = x.cpu().double()

    def linear(name: str, rows: Tensor) -> Tensor:
        return functional.linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, rows: Tensor) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def turn(rows: Tensor) -> Tensor:
        """Pairs as complex numbers, multiplied by e^(i angle)."""
        pairs = rows.unflatten(-1, (32, 2)) if module.interleaved else rows.unflatten(-1, (2, 32)).mT
        angles = torch.arange(rows.shape[1])[:, None].double() * theta ** (-torch.arange(32).double() / 32)
        angles = angles.view(rows.shape[1], *(1,) * (rows.dim() - 3), 32)
        return torch.view_as_real(
            torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
        ).flatten(-2)

    q = (
        linear("q_proj", x)
        if module.q_rank is None
        else linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", x)))
    )
    q = q.unflatten(2, (module.heads, -1))
    both = linear("kv_a_proj_with_mqa", x)
    expanded = linear("kv_b_proj", norm("kv_a_layernorm", both[..., :512])).unflatten(2, (module.heads, -1))
    n = module.nope_dim
    scores = torch.einsum("bqhn,bkhn->bhqk", q[..., :n], expanded[..., :n])
    scores = (scores + torch.einsum("bqhr,bkr->bhqk", turn(q[..., n:]), turn(both[..., 512:]))) * module.scale
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    out = torch.einsum("bhqk,bkhv->bqhv", scores.masked_fill(hidden, -torch.inf).softmax(-1), expanded[..., n:])
    return linear("o_proj", out.flatten(2))


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert (out.cpu().double() - expected).norm() <= BOUNDS[out.dtype] * expected.norm()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_both_forms_are_the_formula(device: str, name: str, dtype: torch.dtype) -> None:
    if device == "cuda":
        dtype = torch.bfloat16
    options = SHAPES[name]
    module = make(device, dtype, **options)
    x = torch.randn(2, 21, DIM).to(device, dtype)
    expected = formula(module, x, options.get("rope_theta", 1e4), options.get("eps", 1e-6))
    assert_close(module(x), expected)
    assert_close(module(x, absorbed=True), expected)


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "pages"])
@pytest.mark.parametrize("absorbed", [None, True, False], ids=["chosen", "absorbed", "expanded"])
def test_chunks_over_a_cache(device: str, paged: bool, absorbed: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences, one of which is ahead; memory after them is NaN. By default chunks of more than 4 tokens are expanded."""
    monkeypatch.setattr("flashmoe.mla.module.MOST_ABSORBED", 4)
    module = make(device, torch.bfloat16, q_rank=48)
    x = torch.randn(2, 40, DIM).to(device, torch.bfloat16)
    expected = formula(module, x, 1e4, 1e-6)
    cache = torch.full((7, 16, 576) if paged else (2, 48, 576), float("nan"), device=device, dtype=torch.bfloat16)
    options: dict[str, Any] = {"absorbed": absorbed}
    if paged:
        options["block_table"] = torch.tensor([[5, 0, 3], [1, 6, 2]], dtype=torch.int32, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    ahead = x[:1].expand(2, -1, -1)  # both sequences get the same 9 tokens, which the second one then forgets
    module(ahead[:, :9], cache, lengths, **options)
    lengths = lengths + torch.tensor([9, 0], dtype=torch.int32, device=device)
    for tokens in (10, 1, 3, 7):
        first = lengths.tolist()
        given = torch.stack([own[start : start + tokens] for own, start in zip(x, first, strict=True)])
        out = module(given, cache, lengths, **options)
        for sequence, start in enumerate(first):
            assert_close(out[sequence], expected[sequence, start : start + tokens])
        lengths = lengths + tokens


def test_pages_that_no_sequence_reached_are_not_read() -> None:
    module, x = make(), torch.randn(2, 1, DIM)
    cache, lengths = torch.randn(3, 16, 576), torch.tensor([20, 3], dtype=torch.int32)
    options = {"block_table": torch.tensor([[0, 1], [2, 10**6]], dtype=torch.int32)}
    found, expected = (module(x, cache, lengths, **options, absorbed=absorbed) for absorbed in (False, True))
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_gradients_are_those_of_the_formula() -> None:
    module, x = make(q_rank=48), torch.randn(1, 9, DIM)
    module.requires_grad_()
    weight, moved = module.kv_b_proj.weight, torch.randn(1, 9, DIM)
    (gradient,) = torch.autograd.grad((module(x) * moved).sum(), weight)
    step, direction = 1e-5, torch.randn_like(weight)
    with torch.no_grad():
        sides = []
        for sign in (1, -1):
            twin = make(q_rank=48).double()
            twin.kv_b_proj.weight += sign * step * direction.double()
            sides.append((formula(twin, x, 1e4, 1e-6) * moved.double()).sum())
    expected = (sides[0] - sides[1]) / (2 * step)
    assert abs((gradient.double() * direction).sum() - expected) < 1e-4 * gradient.norm() * direction.norm()


@pytest.mark.parametrize("kind", ["DeepseekV2", "DeepseekV3", "Glm4MoeLite"])
def test_transformers_layers_are_this_module(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = {"DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3", "Glm4MoeLite": "glm4_moe_lite"}[kind]
    modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
    sizes = {"hidden_size": DIM, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 48}
    sizes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_hidden_layers=1, attn_implementation="eager")
    torch.manual_seed(0)
    theirs = getattr(modeling, f"{kind}Attention")(config, 0).eval().requires_grad_(requires_grad=False)
    theta = config.rope_parameters["rope_theta"]
    interleaved = getattr(config, "rope_interleave", True)
    module = flashmoe.MLA(DIM, 3, q_rank=48, rope_theta=theta, interleaved=interleaved, scale=theirs.scaling)
    module.load_state_dict(theirs.state_dict())
    module.requires_grad_(requires_grad=False)
    x = torch.randn(2, 11, DIM)
    rotary = getattr(modeling, f"{kind}RotaryEmbedding")(config)(x, torch.arange(11)[None])
    hidden = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    expected = theirs(x, position_embeddings=rotary, attention_mask=hidden)[0]
    for absorbed in (False, True):
        torch.testing.assert_close(module(x, absorbed=absorbed), expected, atol=2e-6, rtol=2e-5)


def test_frequencies_stay_float32_and_are_those_given() -> None:
    own = torch.linspace(1.0, 0.01, 32)
    module = flashmoe.MLA(DIM, 2, frequencies=own).to(torch.bfloat16)
    assert torch.equal(module._frequency_bits.view(torch.float32), own)
    assert set(module.state_dict()) == {
        f"{name}.weight" for name in ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    }


CACHE, LENGTHS, X = torch.zeros(2, 8, 576), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, DIM)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((X[0],), ShapeError, r"x must be \[batch, tokens, 96\]; found \[3, 96\]"),
        (([1.0],), ArgumentTypeError, "found list"),
        ((X.bfloat16(),), DtypeError, "x is torch.bfloat16 and the layer's parameters torch.float32"),
        ((X, CACHE), ArgumentError, "belong together"),
        ((X, CACHE[..., :512], LENGTHS), ShapeError, r"cache must be .* found \[2, 8, 512\]"),
        (
            (X, CACHE.bfloat16(), LENGTHS),
            DtypeError,
            "cache is torch.bfloat16 and the layer's parameters torch.float32",
        ),
        ((X, CACHE, LENGTHS + 6), ArgumentError, "room for 8 keys; it holds 6, and 3 are appended"),
        ((X, CACHE, LENGTHS.long()), DtypeError, "cache_seqlens must be torch.int32"),
    ],
    ids=range(8),
)
def test_misuse(given: tuple[Any, ...], error: type[FlashmoeError], message: str) -> None:
    with pytest.raises(error, match=message):
        make()(*given)


def test_gradients_with_a_cache_are_refused() -> None:
    module = make().requires_grad_()
    with pytest.raises(DifferentiationError, match="a cache is for inference"):
        module(X, CACHE.clone(), LENGTHS)
    with pytest.raises(DifferentiationError, match="mla_decode has no gradient"):
        module(X, absorbed=True)


def test_whose_gradient_a_cache_refuses() -> None:
    """A gradient of the input or of the parameters, if one is recorded."""
    frozen, rows = make(), X.clone().requires_grad_()
    for module, x in ((frozen, rows), (make().requires_grad_(), X)):
        with pytest.raises(DifferentiationError, match="a cache is for inference"):
            module(x, CACHE.clone(), LENGTHS)
        with torch.no_grad():
            assert module(x, CACHE.clone(), LENGTHS).equal(frozen(X, CACHE.clone(), LENGTHS))


@pytest.mark.parametrize("absorbed", [None, False, True])
@pytest.mark.parametrize(("tokens", "has_cache"), [(4, True), (5, True), (4, False), (5, False)])
def test_which_form_is_taken(
    monkeypatch: pytest.MonkeyPatch, tokens: int, has_cache: bool, absorbed: bool | None
) -> None:
    monkeypatch.setattr("flashmoe.mla.module.MOST_ABSORBED", 4)
    module, taken = make(), list[str]()
    for name in ("_attend_absorbed", "_attend_expanded"):
        way = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, name=name, way=way: taken.append(name) or way(*given))
    module(torch.zeros(2, tokens, DIM), *((CACHE.clone(), LENGTHS) if has_cache else ()), absorbed=absorbed)
    is_absorbed = has_cache and tokens == 4 if absorbed is None else absorbed
    assert taken == ["_attend_absorbed" if is_absorbed else "_attend_expanded"]


@pytest.mark.parametrize("absorbed", [False, True])
def test_a_batch_of_none(absorbed: bool) -> None:
    assert make()(X[:0], CACHE[:0], LENGTHS[:0], absorbed=absorbed).shape == (0, 3, DIM)


def test_the_largest_sizes() -> None:
    module = flashmoe.MLA(8, 128, nope_dim=192, value_dim=256, device="meta")
    assert module.o_proj.weight.shape == (8, 128 * 256)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 129}, ArgumentError, "heads is 129; supported: 1 to 128"),
        ({"nope_dim": 193}, ArgumentError, "nope_dim is 193; supported: 1 to 192"),
        ({"value_dim": 257}, ArgumentError, "value_dim is 257; supported: 1 to 256"),
        ({"frequencies": torch.ones(64)}, ShapeError, r"frequencies must be \[32\]; found \[64\]"),
        ({"q_rank": 1.5}, ArgumentTypeError, "q_rank must be an integer"),
        ({"interleaved": 1}, ArgumentTypeError, "interleaved must be True or False"),
        ({"dtype": torch.float64}, DtypeError, "no kernel for torch.float64"),
    ],
    ids=range(7),
)
def test_sizes_that_no_kernel_takes(options: dict[str, Any], error: type[FlashmoeError], message: str) -> None:
    with pytest.raises(error, match=message):
        flashmoe.MLA(**{"dim": DIM, "heads": 2, **options})


def test_every_option_is_kept() -> None:
    """A value that is not the default changes that attribute of the module, and no other."""
    sizes = {"dim": 32, "heads": 2, "q_rank": 16, "nope_dim": 64, "value_dim": 64}
    plain = flashmoe.MLA(**sizes)
    for option, value in (("scale", 0.25), ("interleaved", False)):
        other = flashmoe.MLA(**sizes, **{option: value})
        changed = {name for name, kept in vars(plain).items() if name[0] != "_" and vars(other)[name] != kept}
        assert (changed, getattr(other, option)) == ({option}, value)
    assert plain.scale == (64 + 64) ** -0.5
