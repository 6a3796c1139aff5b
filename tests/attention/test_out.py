"""``out=`` of attention_varlen and attention_with_kvcache: the bits of a call without it, in the caller's memory; unsuitable memory is rejected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.errors import ArgumentError, ArgumentTypeError, DeviceError, DtypeError, FlashmoeError, ShapeError

HEADS, KV_HEADS, D, PAGE = 8, 2, 64, 16
NAN = float("nan")
Given = tuple[tuple[Any, ...], dict[str, Any]]


def _random(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, torch.bfloat16)


def ragged(device: str, d: int = D) -> Given:
    starts = torch.tensor([0, 5, 5, 42], dtype=torch.int32, device=device)
    q, k, v = (_random(device, 42 + extra, heads, d) for extra, heads in ((0, HEADS), (0, KV_HEADS), (0, KV_HEADS)))
    return (q, k, v, starts, starts, 37, 37), {"causal": True, "sinks": torch.ones(HEADS, device=device)}


def paged(device: str, codes: bool = False) -> Given:
    pages = _random(device, 2, 12, PAGE, KV_HEADS, D)
    pages = pages.to(torch.float8_e4m3fn) if codes else pages
    table = torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(3, 4).int().to(device)
    starts, lengths = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 1, 2, 30], [40, 64, 29]))
    scales = {"k_scale": 0.5, "v_scale": torch.tensor(2.0, device=device)} if codes else {}
    options = {"seqused_k": lengths, "block_table": table, "causal": True, "window": (20, 0), **scales}
    return (_random(device, 30, HEADS, D), pages[0], pages[1], starts, None, 28, 64), options


CALLS: dict[str, Callable[[str], Given]] = {
    "ragged": ragged,
    "ragged, 20 columns": lambda device: ragged(device, 20),  # on a GPU through padded rows
    "paged": paged,
    "e4m3": lambda device: paged(device, codes=True),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("consistent", [False, True])
def test_out_has_the_bits_of_a_call_without_it(device: str, name: str, consistent: bool) -> None:
    given, options = CALLS[name](device)
    wanted = flashmoe.attention_varlen(*given, **options, consistent=consistent)
    memory = torch.full((wanted.shape[0] + 2, *wanted.shape[1:]), NAN, dtype=wanted.dtype, device=device)
    out = memory[: wanted.shape[0]]
    assert flashmoe.attention_varlen(*given, **options, consistent=consistent, out=out) is out
    assert torch.equal(out, wanted)
    assert bool(memory[wanted.shape[0] :].isnan().all())


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("order", ["heads first", "rows first"])
def test_decoding_writes_any_order_of_dimensions(device: str, order: str, codes: bool) -> None:
    (_, keys, values, *_), options = paged(device, codes)
    q = _random(device, 3, 4, HEADS, D).transpose(1, 2)
    scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
    cache = {"cache_seqlens": options["seqused_k"], "block_table": options["block_table"], "causal": True, **scales}
    wanted = flashmoe.attention_with_kvcache(q, keys, values, **cache)
    out = torch.full((3, HEADS, 4, D) if order == "heads first" else (3, 4, HEADS, D), NAN).to(wanted)
    out = out if order == "heads first" else out.transpose(1, 2)
    assert flashmoe.attention_with_kvcache(q, keys, values, **cache, out=out) is out
    assert torch.equal(out, wanted)


def test_a_row_of_each_sequence_by_itself_is_the_ragged_call(device: str) -> None:
    """The way engines call it: other kernels on a GPU, but the same bits in consistent calls."""
    (_, keys, values, *_), options = paged(device)
    q, starts = _random(device, 3, HEADS, D), torch.arange(4, dtype=torch.int32, device=device)
    shared = {"block_table": options["block_table"], "causal": True, "consistent": True}
    wanted = flashmoe.attention_varlen(q, keys, values, starts, None, 1, 64, seqused_k=options["seqused_k"], **shared)
    out = torch.empty_like(q)
    flashmoe.attention_with_kvcache(
        q.unsqueeze(2), keys, values, cache_seqlens=options["seqused_k"], **shared, out=out.unsqueeze(2)
    )
    assert torch.equal(out, wanted)


def _like(shape: tuple[int, ...] = (30, HEADS, D), **options: Any) -> Callable[[Given], Any]:
    return lambda given: torch.empty(shape, **{"dtype": torch.bfloat16, "device": given[0][0].device, **options})


REFUSED: dict[str, tuple[Callable[[Given], Any], type[FlashmoeError], str]] = {
    "a list": (lambda given: [1.0], ArgumentTypeError, "out must be a torch.Tensor .* found list"),
    "float32": (_like(dtype=torch.float32), DtypeError, "out must be torch.bfloat16; found torch.float32"),
    "fewer rows": (_like((29, HEADS, D)), ShapeError, r"here \[30, 8, 64\]; found \[29, 8, 64\]"),
    "flat": (_like((30, HEADS * D)), ShapeError, "out must be 3-dimensional"),
    "heads first": (_like((HEADS, 30, D)), ShapeError, r"found \[8, 30, 64\]"),
    "with gaps": (lambda g: _like((30, HEADS, 2 * D))(g)[..., :D], ShapeError, "out must be dense in memory"),
    "expanded": (lambda g: _like((1, HEADS, D))(g).expand(30, -1, -1), ShapeError, "out must be dense in memory"),
    "columns apart": (lambda g: _like((30, HEADS, 2 * D))(g)[..., ::2], ShapeError, "last dimension of out"),
    "q": (lambda given: given[0][0], ArgumentError, "out shares memory with q"),
    "a page": (lambda given: given[0][1].view(-1)[: 30 * HEADS * D].view(30, HEADS, D), ArgumentError, "with k,"),
    "meta": (_like(device="meta"), DeviceError, "out must be on q's device; found meta"),
    "a leaf": (_like(requires_grad=True), ArgumentError, "a gradient is requested"),
    "sparse": (lambda given: given[0][0].to_sparse(), ArgumentError, "out must be a dense"),
}


@pytest.mark.parametrize(
    ("name", "codes"),
    [(name, codes) for name in REFUSED for codes in (False, True) if (name, codes) != ("a page", True)],
)
def test_what_is_no_result_is_refused_in_words(device: str, name: str, codes: bool) -> None:
    given = paged(device, codes)
    make, error, text = REFUSED[name]
    before = given[0][0].clone()
    with pytest.raises(error, match=text):
        flashmoe.attention_varlen(*given[0], **given[1], out=make(given))
    assert torch.equal(before, given[0][0])


@pytest.mark.gpu
def test_an_address_that_the_kernels_cannot_store_to_is_refused() -> None:
    given, options = paged("cuda")
    out = torch.empty(30 * HEADS * D + 1, dtype=torch.bfloat16, device="cuda")[1:].view(30, HEADS, D)
    with pytest.raises(ArgumentError, match="out must start at a multiple of 16 bytes"):
        flashmoe.attention_varlen(*given, **options, out=out)


def test_what_out_does_not_go_with() -> None:
    given, options = ragged("cpu")
    out = torch.empty_like(given[0])
    with pytest.raises(ArgumentError, match="out= and return_lse=True are both given"):
        flashmoe.attention_varlen(*given, **options, out=out, return_lse=True)
    with pytest.raises(ArgumentError, match="out= and dropout_p are both given"):
        flashmoe.attention_varlen(*given, **options, out=out, dropout_p=0.5)
    with pytest.raises(ArgumentError, match="a gradient is requested"):
        flashmoe.attention_varlen(given[0].requires_grad_(), *given[1:], **options, out=out)
    with torch.no_grad():
        flashmoe.attention_varlen(*given, **options, out=out)
    with pytest.raises(ArgumentError, match=r"torch\.func's transforms"):
        torch.func.functionalize(lambda q: flashmoe.attention_varlen(q, *given[1:], **options, out=out))(
            given[0].detach()
        )


@pytest.mark.parametrize("codes", [False, True])
def test_opcheck(device: str, codes: bool) -> None:
    (q, k, v, starts, _, longest_q, longest_k), options = paged(device, codes)
    scales = (torch.tensor(0.5, device=device), None, 1.0, 2.0) if codes else ()
    lengths = (starts, None, options["seqused_k"], options["block_table"], None, None, longest_q, longest_k)
    call = getattr(torch.ops.flashmoe, "_attention_e4m3_out" if codes else "_attention_varlen_out").default
    tests = ("test_faketensor",) if codes else ("test_schema", "test_faketensor", "test_autograd_registration")
    every = (torch.zeros_like(q), q, k, v, *lengths, 0.125, -1, 0, 0.0, 0, *scales)
    torch.library.opcheck(call, every, test_utils=tests)  # torch's schema test would multiply codes


def test_a_compiled_call_writes_out() -> None:
    given, options = paged("cpu")
    wanted = flashmoe.attention_varlen(*given, **options)

    def step(q: Tensor, out: Tensor) -> Tensor:
        return flashmoe.attention_varlen(q, *given[1:], **options, out=out) + 1

    out = torch.full_like(wanted, NAN)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(given[0], out), wanted + 1)
    assert torch.equal(out, wanted)
