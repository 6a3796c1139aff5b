"""The full results of attention's Python code, on each side of each of its limits and for every kind of input that it distinguishes."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe import fallback, keywords, rules, transforms, variables
from flashmoe.attn import api, arguments, autograd, backward, e4m3, flops, fp8, kvcache, module, smoothing, varlen
from flashmoe.attn.arguments import LAYOUT, PAGES, RAGGED
from flashmoe.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DifferentiationError,
    DtypeError,
    FlashmoeError,
    ShapeError,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
ROWS = torch.zeros(2, 3, 4, 8)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def of(*shape: int, device: torch.device = CPU, dtype: torch.dtype = F32, grad: bool = False) -> Any:
    """An object that looks like a tensor to the rules for devices, dtypes and shapes."""
    return SimpleNamespace(
        shape=torch.Size(shape), device=device, dtype=dtype, requires_grad=grad, dim=lambda: len(shape)
    )


# Sizes, numbers and types


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((8, 2, None, None), (8, 2, 2, 4)), ((1024, 2, None, None), (1024, 2, 2, 512)), ((7, 2, 1, 3), (7, 2, 1, 3)),
        ((7, 2, 1, 512), (7, 2, 1, 512)), ((1, 1, 1, 1), (1, 1, 1, 1)),
        ((1026, 2, None, None), "head_dim is 513; supported: 1 to 512; use more heads"),
        ((8, 2, None, 513), "head_dim is 513; supported: 1 to 512; use more heads"),
        ((8, 2, None, 0), "head_dim must be at least 1; found 0"), ((0, 2, None, 4), "dim must be at least 1; found 0"),
        ((8, 0, None, 4), "heads must be at least 1; found 0"), ((8, 2, 0, 4), "kv_heads must be at least 1; found 0"),
        ((8, 4, 3, 4), "heads must be a multiple of kv_heads; found 4 and 3; use a divisor of 4"),
        ((7, 2, None, None), "dim must be a multiple of heads; found 7 and 2; change one, or pass head_dim"),
    ],
)  # fmt: skip
def test_sizes_of_a_module(sizes: Any, told: Any) -> None:
    if isinstance(told, tuple):
        assert module._sizes(*sizes) == told
    else:
        with pytest.raises(ArgumentError) as caught:
            module._sizes(*sizes)
        assert str(caught.value) == told


@pytest.mark.parametrize("digits", [39, 40, 60])
def test_a_scale_of_many_digits(digits: int) -> None:
    shown = "9" * digits if digits < 40 else f"{'9' * 20}... ({digits} characters)"
    with pytest.raises(ArgumentError, match=re.escape(f"found {shown};")):
        arguments.check_scalars(10**digits - 1, causal=False)


ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
TABLE = torch.zeros(2, 1, dtype=torch.int32)
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, str]]] = {
    "dense": (flashmoe.attention, dict.fromkeys("qkv", torch.zeros(2, 2, 3, 8)), dict.fromkeys("qkv", LAYOUT)),
    "ragged": (flashmoe.attention_varlen, {**dict.fromkeys("qkv", torch.zeros(5, 2, 8)), "cu_seqlens_q": ENDS,
               "cu_seqlens_k": ENDS, "max_seqlen_q": 3, "max_seqlen_k": 3}, dict.fromkeys("qkv", RAGGED)),
    "pages": (flashmoe.attention_varlen, {"q": torch.zeros(5, 2, 8), **dict.fromkeys("kv", torch.zeros(2, 3, 2, 8)),
              "cu_seqlens_q": ENDS, "cu_seqlens_k": None, "max_seqlen_q": 3, "max_seqlen_k": 3, "block_table": TABLE,
              "seqused_k": ENDS[1:] - 2}, {"q": RAGGED, "k": PAGES, "v": PAGES}),
    "caches": (flashmoe.attention_with_kvcache, {"q": torch.zeros(2, 2, 1, 8), **dict.fromkeys(("k_cache", "v_cache"),
               torch.zeros(2, 2, 3, 8)), "cache_seqlens": ENDS[1:] - 2}, dict.fromkeys(("q", "k_cache", "v_cache"), LAYOUT)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_what_is_no_dense_tensor_hears_its_layout(kind: str) -> None:
    function, call, layouts = CALLS[kind]
    with torch.no_grad():
        function(**call)
    sparse = torch.zeros(2, 2, 3, 8).to_sparse()
    for name, layout in layouts.items():
        known = name.removesuffix("_cache")
        with pytest.raises(ArgumentTypeError) as caught:
            function(**{**call, name: [1.0]})
        told = f"must be a torch.Tensor {layout}; found list; convert it with torch.as_tensor"
        assert str(caught.value) in (f"{known} {told}", f"{known}_cache {told}")
        with pytest.raises(ArgumentError, match=r"must be a dense \(strided\) tensor; found a torch.sparse_coo tensor"):
            function(**{**call, name: sparse})


@pytest.mark.parametrize("kind", CALLS)
def test_slopes_have_no_gradient(kind: str) -> None:
    function, call, _ = CALLS[kind]
    slopes = torch.zeros(2, requires_grad=True)
    with torch.no_grad():
        function(**call, alibi_slopes=slopes)
    with pytest.raises(DifferentiationError, match="no gradient for alibi_slopes"):
        function(**call, alibi_slopes=slopes)


@pytest.mark.parametrize("cu", [None, ENDS])
@pytest.mark.parametrize("shape", [(), (2,), (2, 2), (1, 2), (3,), (3, 2), (2, 3), (1, 1, 2)])
def test_slopes_as_the_operator_gets_them(shape: tuple[int, ...], cu: Tensor | None) -> None:
    slopes = torch.arange(torch.Size(shape).numel(), dtype=F16).view(shape)
    found = varlen.expand_slopes(slopes, torch.zeros((2, 2, 1, 8) if cu is None else (5, 2, 8)), cu)
    fits = shape in ((), (2,), (2, 2), (1, 2))
    assert (found.dtype, found.dim()) == (F32, 2)
    assert found.equal(slopes.float().expand(2, 2) if fits else slopes.float().reshape(-1, shape[-1]))


@pytest.mark.parametrize("wrong", [(3,), (1, 2)])
def test_scales_of_ragged_codes(wrong: tuple[int, ...]) -> None:
    codes = torch.arange(20).view(5, 2, 2).to(torch.float8_e4m3fn)
    told = f"must be a number or float32 [], [2] (heads) or [2, 2] (sequences, heads); found {list(wrong)}; reshape it"
    with pytest.raises(ShapeError, match=re.escape(told)):
        fp8._dequantize_tokens("q_scale", codes, torch.ones(wrong), 1.0, ENDS, F32)
    of_sequences = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    each = {(): torch.tensor(2.0), (2,): of_sequences[0], (2, 2): of_sequences}
    expected = {
        (): codes.float() * 4,
        (2,): codes.float() * 2 * of_sequences[0][:, None],
        (2, 2): codes.float() * 2 * of_sequences[[0, 0, 1, 1, 1]][..., None],
    }
    for shape, values in each.items():
        assert fp8._dequantize_tokens("q_scale", codes, values, 2.0, ENDS, F32).equal(expected[shape])
    assert fp8._dequantize_tokens("q_scale", codes, None, 2.0, ENDS, F32).equal(codes.float() * 2)
    none = fp8._dequantize_tokens("q_scale", codes, torch.ones(0, 2), 2.0, ENDS[:1], F32)
    assert none.equal(codes.float())  # tokens that belong to no sequence


@pytest.mark.parametrize(
    ("rows", "blocks", "block"), [(130, 2, 128), (130, 3, 64), (128, 1, 128), (128, 2, 64), (64, 1, 128)]
)
def test_scales_of_blocks_of_rows(rows: int, blocks: int, block: int) -> None:
    codes, values = torch.ones(1, 1, rows, 2).to(torch.float8_e4m3fn), torch.arange(1.0, blocks + 1).view(1, 1, -1)
    found = fp8.dequantize(codes, values, 2.0, F32)[0, 0, :, 0]
    assert found.equal(2 * (torch.arange(rows) // block + 1).float())
    for shape in ((), (1,), (1, 1)):
        assert fp8.dequantize(codes, torch.full(shape, 3.0), 2.0, BF16).equal(torch.full_like(codes, 6.0, dtype=BF16))


def test_what_belongs_to_codes_alone() -> None:
    wide, codes = torch.zeros(2), torch.zeros(2).to(torch.float8_e4m3fn)
    assert [fp8.is_fp8_call(one, None, None, None, None) for one in (wide, codes, None)] == [False, True, False]
    for at in range(4):
        given: list[Any] = [None] * 4
        given[at] = BF16 if at == 3 else 1.0
        assert fp8.is_fp8_call(wide, *given)
        name = ("q_scale", "k_scale", "v_scale", "out_dtype")[at]
        told = f"{name} is only used with q, k and v of torch.float8_e4m3fn; found torch.float32; remove {name}=, or quantise all three"
        with pytest.raises(ArgumentError, match=re.escape(told)):
            fp8._raise_not_fp8(wide, tuple(given[:3]))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="found list"):
        fp8._raise_not_fp8([], (None, None, None))
    for scales, name in (((1.0, None), "k_scale"), ((None, 1.0), "v_scale"), ((1.0, 1.0), "k_scale")):
        for k, found in ((wide, "torch.float32"), (3, "int")):
            with pytest.raises(ArgumentError, match=f"^{name} is only used with k and v of .*; found {found};"):
                e4m3.check_unscaled(*scales, k)
    e4m3.check_unscaled(None, None, wide)


def test_codes_under_a_transform() -> None:
    codes = torch.zeros(2, 1, 1, 4, 8).to(torch.float8_e4m3fn)
    q, lengths = torch.zeros(2, 1, 1, 1, 8, dtype=BF16), torch.ones(1, dtype=torch.int32)
    for return_lse in (False, True):

        def call(rows: Tensor, keys: Tensor, with_lse: bool = return_lse) -> Any:
            given: Any = {"cache_seqlens": lengths, "return_lse": with_lse}
            return flashmoe.attention_with_kvcache(rows, keys, keys, **given)

        with pytest.raises(ArgumentError, match=r"torch\.func's transforms"):
            torch.func.vmap(call)(q, codes)


@pytest.mark.parametrize("wrong", [3, (1,), (1, 2, 3), "ab", None])
def test_windows(wrong: Any) -> None:
    if wrong is None or wrong == "ab":
        assert varlen._sides((1, -1)) == (1, -1)
        return
    with pytest.raises(ArgumentTypeError, match=re.escape(f"found {wrong!r}; use (n, 0) for the n keys before")):
        varlen._sides(wrong)


def test_keys_without_their_mean() -> None:
    for k, error, told in (
        ([1.0], ArgumentTypeError, "k must be a tensor; found list; use torch.as_tensor"),
        (
            ROWS.double(),
            DtypeError,
            "k must be float16, bfloat16 or float32; found torch.float64; smooth keys before quantising them",
        ),
        (
            ROWS[0],
            ShapeError,
            "k must be [batch, heads, keys, head_dim]; found [3, 4, 8]; add what is missing with .unsqueeze(0)",
        ),
    ):
        with pytest.raises(error) as caught:
            smoothing.smooth_keys(k)
        assert str(caught.value) == told
    k = torch.randn(2, 3, 4, 8)
    for dtype in (F32, F16, BF16):
        wide = k.to(dtype).float()
        assert smoothing.smooth_keys(k.to(dtype)).equal((wide - wide.mean(2, keepdim=True)).to(dtype))
    assert smoothing.smooth_keys(k[:, :, :0]).shape == (2, 3, 0, 8)


@pytest.mark.parametrize("name", ["lse_a", "out_b", "lse_b"])
def test_parts_of_other_kinds(name: str) -> None:
    parts = {
        "out_a": torch.zeros(1, 2, 3, 8),
        "lse_a": torch.zeros(1, 2, 3),
        "out_b": torch.zeros(1, 2, 3, 8),
        "lse_b": torch.zeros(1, 2, 3),
    }
    first = f"{name[:-1]}a"
    other = torch.int32 if name == first else torch.float32
    both = "both results must have one floating dtype; found {found}; convert them with .to()"
    for wrong, error, told in (
        (3, ArgumentTypeError, f"{name} must be a torch.Tensor, as the attention functions return it; found int"),
        (parts[name].to("meta"), DeviceError, f"{name} must be on out_a's device; found meta and cpu; move it with .to(out_a.device)"),
        (parts[name].int(), DtypeError, both.format(found=f"torch.int32 in {name} and {other} in {first}")),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            flashmoe.merge_attention(**{**parts, name: wrong})  # type: ignore[arg-type]
        assert str(caught.value) == told


def test_by_our_names() -> None:
    for text, ours in (
        ("k must be dense", "k_cache must be dense"),
        ("v must and k must", "v_cache must and k must"),
        ("seqused_k[0] is 3", "cache_seqlens[0] is 3"),
    ):
        assert str(kvcache._by_our_name(ShapeError(text))) == ours
        assert type(kvcache._by_our_name(ShapeError(text))) is ShapeError
    error = ArgumentError("q must")
    assert kvcache._by_our_name(error) is error
    pages: Any = torch.zeros(2, 16, 1, 8)
    assert kvcache._room(pages, torch.zeros(3, 5)) == 80
    assert kvcache._room(pages, torch.zeros(3)) == kvcache._room(pages, None) == 0  # type: ignore[arg-type]
    assert kvcache._room(of(1, 2**20), of(1, 2**20)) == arguments.MAX_LENGTH


# Keywords, variables, policies


def test_keywords_that_a_function_lacks() -> None:
    words = ("causal", "scale")
    for given, told in (
        (["softmax_scale"], "write scale="), (["causl"], "write causal="), (["zzz", "causl"], "it has causal, scale"),
        (["is_causal"], "write causal=, whose mask is aligned bottom-right; is_causal"),
    ):  # fmt: skip
        with pytest.raises(ArgumentTypeError) as caught:
            keywords.raise_unknown("attention", given, iter(words))
        assert str(caught.value).startswith(f"attention() has no argument {given[0]!r}: {told}")
    with pytest.raises(ArgumentTypeError, match=r"mine\(\) has no argument 'dropout': write dropout_p="):
        keywords.raise_unknown("mine", ["dropout"], words, like="attention")
    with pytest.raises(ArgumentTypeError, match=r"mine\(\) has no argument 'dropout': it has causal, scale$"):
        keywords.raise_unknown("mine", ["dropout"], words)
    with pytest.raises(ArgumentTypeError) as caught:
        keywords.raise_extra_positional("f", (True, 2, 0.5, "s", None, ROWS, []), words, 3)
    found = "True, 2, 0.5, 's', None, a Tensor, a list"
    assert (
        str(caught.value)
        == f"f() takes 3 arguments by position; found {found} after them; name what follows: causal=, scale="
    )


@pytest.mark.parametrize("policy", ["", "allow", "warn", "error", "never"])
def test_what_a_fallback_does(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("FLASHMOE_FALLBACK", policy)
    raised: Any = nullcontext()
    if policy == "warn":
        raised = pytest.warns(UserWarning, match="^flashmoe falls back to torch for a layer: because$")
    elif policy == "error":
        raised = pytest.raises(
            ArgumentError, match=r"^a layer would run on torch: because; FLASHMOE_FALLBACK=error forbids"
        )
    elif policy == "never":
        raised = pytest.raises(ArgumentError, match=r"^FLASHMOE_FALLBACK is 'never'; supported: allow, warn, error$")
    with raised:
        fallback.note_fallback("because", "a layer")


def test_variables_that_are_none_of_ours() -> None:
    with pytest.warns(UserWarning, match=r"no variable FLASHMOE_KERNLE, .*; did you mean FLASHMOE_KERNEL\?"):
        variables.check_variables({"FLASHMOE_KERNLE": "1", "FLASHMOE_ZZZ": "2"})
    anything, few = variables.Variable("A", "run", ""), variables.Variable("B", "run", "", ("0", "1"))
    found = [variables.is_possible(one, value) for one in (anything, few) for value in ("", "x", "1")]
    assert found == [True, True, True, True, False, True]


# Counts, and mapped dimensions


@pytest.mark.parametrize("needs", range(8))
def test_products_of_a_backward_pass(needs: int) -> None:
    """The scores always; dQ and dK over q's head_dim; dP for these two, and dV, over v's."""
    dq, dk, dv = (needs >> bit & 1 for bit in range(3))
    of_q, of_v = 1 + dq + dk, (1 if dq or dk else 0) + dv
    assert flops.backward_products(needs) == (of_q, of_v)
    q, k, v = (2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 16)
    whole = 2 * 2 * 4 * 3 * 5 * (of_q * 8 + of_v * 16)
    assert flops.backward_flops(None, None, q, k, v, None, None, 1.0, False, needs) == whole
    assert flops.backward_flops(None, None, q, k, v, None, None, 1.0, needs=needs) == whole
    assert flops.forward_flops(q, k, v) == 2 * 2 * 4 * 3 * 5 * 24


@pytest.mark.parametrize("is_meta", [False, True])
def test_lengths_that_are_counted(is_meta: bool) -> None:
    used, ends, table = (one.to("meta") if is_meta else one for one in (torch.tensor([1, 4]), ENDS, TABLE))
    ragged, dense = torch.zeros(5, 2, 8), torch.zeros(2, 2, 7, 8)
    assert flops._lengths(ends, ragged, 9) == ([9, 9] if is_meta else [2, 3])
    assert flops._lengths(None, dense, 9, used) == ([7, 7] if is_meta else [1, 4])
    assert flops._lengths(None, dense, 9, used, table) == ([9, 9] if is_meta else [1, 4])
    assert flops._lengths(None, dense, 9) == [7, 7]


@pytest.mark.parametrize("dim", [None, 0, 1, 2, 3, 4])
def test_a_mapped_dimension_is_part_of_the_batch(dim: int | None) -> None:
    size, plain = 3, torch.arange(3 * 2 * 2 * 4 * 6.0).view(3, 2, 2, 4, 6)
    given = plain[0] if dim is None else plain.movedim(0, dim)
    merged, nothing = transforms.merge_batches((given, None), (dim, None), size)
    each = plain[:1].expand(plain.shape) if dim is None else plain
    assert merged.equal(each.flatten(0, 1))
    assert merged.stride(-1) == 1
    assert nothing is None
    assert transforms.split_batch(merged, size, given, dim).equal(each)
    mask, q = torch.zeros(3, 1, 1, 1, 1), torch.zeros(3, 2, 1, 1, 1)
    assert not autograd._is_shared((q, None), (0, 0), 0, 1)
    assert autograd._is_shared((q, mask), (0, 0), 0, 1)
    assert not autograd._is_shared((q, mask.expand(3, 2, 1, 1, 1)), (0, 0), 0, 1)
    assert autograd._is_shared((q, mask[0]), (0, None), 0, 1)


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "keys"), [(5, 7), (7, 5), (4, 4), (1, 9), (9, 1)])
def test_gradients_by_torch_operations(
    monkeypatch: pytest.MonkeyPatch, given: tuple[bool, bool], causal: bool, rows: int, keys: int
) -> None:
    """In blocks that are smaller than the problem, against autograd in float64; for each subset of needed gradients."""
    monkeypatch.setattr(backward, "BLOCKS", {"cpu": backward.BlockSize(3, 1)})
    monkeypatch.setattr(backward, "MIN_ROWS_PER_BLOCK", 2)
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(2, heads, n, 8, dtype=torch.float64, generator=generator).requires_grad_()
               for heads, n in ((4, rows), (2, keys), (2, keys)))  # fmt: skip
    scores = 0.3 * q @ k.repeat_interleave(2, 1).mT
    if causal:
        scores = scores.masked_fill(torch.ones(rows, keys).triu(keys - rows + 1) > 0, -torch.inf)
    lse = scores.logsumexp(-1)
    seen = lse > -torch.inf
    weights = torch.where(seen[..., None], (scores - torch.where(seen, lse, 0.0)[..., None]).exp(), 0.0)
    out = weights @ v.repeat_interleave(2, 1)
    d_out = torch.randn_like(out) if given[0] else None
    d_lse = torch.randn_like(lse) if given[1] else None
    total = (0 if d_out is None else (out * d_out).sum()) + (
        0 if d_lse is None else torch.where(seen, lse * d_lse, 0.0).sum()
    )
    expected = torch.autograd.grad(total, (q, k, v), allow_unused=True) if any(given) else (None,) * 3
    for needs in range(8):
        detached = [one.detach() for one in (q, k, v, out, lse)]
        found = backward.backward(d_out, d_lse, *detached, 0.3, causal, needs)
        for index, (mine, right) in enumerate(zip(found, expected, strict=True)):
            if needs >> index & 1:
                wanted = torch.zeros_like(mine) if right is None else right.nan_to_num()
                torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)
            else:
                assert mine.shape == (0,)


@pytest.mark.parametrize(
    ("rows", "keys", "size", "expected"), [(2, 8, 64 * 64, 64), (2, 8, 2**20, 16384), (2, 8, 1, 64)]
)
def test_rows_of_a_block(rows: int, keys: int, size: int, expected: int) -> None:
    assert backward.rows_per_block(rows, keys, backward.BlockSize(8, size)) == expected


def test_pages_and_ragged_masks_have_no_gradient() -> None:
    ctx = SimpleNamespace(has_pages=True)
    with pytest.raises(DifferentiationError, match="attention over pages has no gradient"):
        autograd.varlen_gradient(ctx, torch.zeros(1), None)
    none = dict.fromkeys(autograd.VarlenBackward._fields)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        given: Any = autograd.VarlenBackward(**{**none, "mask": ROWS, name: ENDS})  # type: ignore[arg-type]
        with pytest.raises(DifferentiationError, match="has no gradient for attn_mask"):
            autograd._check_mask_gradient(given)
    slopes: Any = autograd.VarlenBackward(**{**none, "mask": torch.zeros(2, 2)})  # type: ignore[arg-type]
    with pytest.raises(FlashmoeError, match="no gradient for alibi_slopes"):
        autograd._check_mask_gradient(slopes)


@pytest.mark.parametrize(("scale", "is_plain"), [(0.5, True), (0.0, False), (-0.5, False)])
@pytest.mark.parametrize("change", ["", "softcap", "alibi_slopes", "grad", "cpu"])
def test_when_codes_are_multiplied_as_they_are(
    monkeypatch: pytest.MonkeyPatch, scale: float, is_plain: bool, change: str
) -> None:
    """On a meta device, which counts as having the kernel: if there is no option, no gradient, and a scale above zero."""
    place = "cpu" if change == "cpu" else "meta"
    codes, ends = torch.zeros(5, 2, 8, device=place).to(torch.float8_e4m3fn), ENDS.to(place)
    scales: Any = (torch.ones((), device=place, requires_grad=True) if change == "grad" else None, None, None)
    given: Any = {"causal": False, "scale": scale, "return_lse": False}
    options: dict[str, Any] = dict.fromkeys((*fp8._SCORE_OPTIONS, "block_table", "out")) | {
        "softcap": 0.0,
        "consistent": False,
    }
    options |= {change: 1.0} if change in options else {}
    monkeypatch.setattr(fp8, "_call", lambda *_: "codes")
    monkeypatch.setattr(fp8, "check", lambda *_: None)

    def wide(*tensors: Any, **_: Any) -> Any:
        return tensors[0]

    ragged = fp8.attend_varlen(wide, (codes,) * 3, scales, None, (ends, ends, None, 3, 3), **given, options=options)
    dense = {name: value for name, value in options.items() if name in fp8._SCORE_OPTIONS}
    batch = fp8.attend(wide, (codes[None],) * 3, scales, None, **given, consistent=False, options=dense)
    for found in (ragged, batch):
        assert (isinstance(found, str) and found == "codes") is (is_plain and not change)
        assert isinstance(found, str) or found.dtype is BF16
    for function, rest in ((fp8.attend, {"consistent": False}), (fp8.attend_varlen, {})):
        lengths = () if function is fp8.attend else ((ends, ends, None, 3, 3),)
        with pytest.raises(ArgumentError, match=r"q_scale is only used with .*found list"):
            function(wide, ([], codes, codes), (1.0, None, None), None, *lengths, **given, **rest, options=options)  # type: ignore[operator]


def test_sizes_without_a_hint_are_not_asked_about() -> None:
    known, unknown = (torch.SymInt(SimpleNamespace(has_hint=lambda has=has: has, hint=7)) for has in (True, False))  # type: ignore[call-arg]
    assert (rules._hint(known), rules._hint(3), rules._hint(None)) == (7, 3, None)
    with pytest.raises(rules._NoHintError):
        rules._hint(unknown)
    rules.check("no_such_operator", (unknown,))
    described = [rules._describe(one) for one in (None, "a\nb", True, 2, known, ROWS)]
    assert described == ["none", "text a b", "value 1", "value 2", "value 7", "tensor float32 cpu 4 2 3 4 8 96 32 8 1"]
    assert rules.translate(ValueError("no rule")) is None
    for text in ("flashmoe:nothing.known|a=1", "flashmoe:nothing: text"):
        assert "nothing" in str(rules.translate(ValueError(text)))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("shape", [(), (4,), (3, 1, 4), (2, 1, 1, 4), (1, 2, 3, 4, 4)])
def test_a_mask_is_expanded_unless_it_has_a_gradient(grad: bool, enabled: bool, shape: tuple[int, ...]) -> None:
    mask = torch.zeros(shape, requires_grad=grad)
    with torch.set_grad_enabled(enabled):
        found = api._expand_mask(mask, ROWS, ROWS)
    if len(shape) > 4:
        assert found.shape == shape
    elif grad and enabled:
        assert found.shape == (1,) * (4 - len(shape)) + shape
    else:
        assert found.shape == (2, 3, 4, 4)
