"""flash_attn 3's qv, and values of more than 256 columns, against float64 torch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe.compat import flash_attn_3, latent_query
from flashmoe.errors import ShapeError

fa3: Any = flash_attn_3
latents_module: Any = latent_query


def rows_of(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


def close(found: Tensor, wanted: Tensor) -> bool:
    limit = 2e-2 if found.dtype == torch.bfloat16 else 2e-5
    return torch.allclose(found.double(), wanted, atol=limit, rtol=limit)


def expected(given: Sequence[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out [Sq, H, Dv], lse [H, Sq]) for one sequence's q, k, v and qv, key by key."""
    q, k, v, qv = given
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    chunk, cap = options.get("attention_chunk", 0), options.get("softcap", 0.0)
    scale = (q.shape[-1] + v.shape[-1]) ** -0.5
    out, lse = torch.zeros_like(qv, dtype=torch.double), torch.full((q.shape[1], rows), -torch.inf).double()
    for row in range(rows):
        own = row + keys - rows
        seen = [
            key
            for key in range(keys)
            if (left < 0 or key >= own - left)
            and (right < 0 or key <= own + right)
            and (not chunk or key // chunk == own // chunk)
        ]
        if not seen:
            continue
        for head in range(q.shape[1]):
            of_keys, of_values = k[seen, head // group].double(), v[seen, head // group].double()
            scores = (of_keys @ q[row, head].double() + of_values @ qv[row, head].double()) * scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            out[row, head] = torch.softmax(scores, 0) @ of_values
            lse[head, row] = torch.logsumexp(scores, 0)
    return out, lse


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "softcap": 5.0},
    {"window_size": (4, 2)},
    {"causal": True, "attention_chunk": 5},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(7, 11), (9, 4)])
def test_queries_of_values(device: str, rows: int, keys: int, options: dict[str, Any]) -> None:
    q, k, v, qv = (rows_of(device, 2, *shape) for shape in ((rows, 4, 16), (keys, 2, 16), (keys, 2, 40), (rows, 4, 40)))
    out, lse = fa3.flash_attn_func(q, k, v, qv=qv, return_attn_probs=True, **options)
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (rows, keys)]
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    used_q = torch.tensor([rows, rows - 2], dtype=torch.int32, device=device)
    ragged = fa3.flash_attn_varlen_func(*flat, *starts, rows, keys, seqused_q=used_q, qv=qv.flatten(0, 1), **options)
    for b in range(2):
        wanted, wanted_lse = expected([tensor[b].cpu() for tensor in (q, k, v, qv)], options)
        assert close(out[b].cpu(), wanted)
        assert torch.allclose(lse[b].cpu().double(), wanted_lse, atol=1e-3)
    assert torch.equal(ragged[:rows], out[0])
    wanted, _ = expected([q[1, : rows - 2].cpu(), k[1].cpu(), v[1].cpu(), qv[1, : rows - 2].cpu()], options)
    assert close(ragged[rows : 2 * rows - 2].cpu(), wanted)
    assert not ragged[2 * rows - 2 :].any()
    with pytest.raises(ShapeError, match=r"qv has shape \[2, .*needed: q's with v's last dimension"):
        fa3.flash_attn_func(q, k, v, qv=qv[..., 1:])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("is_paged", [False, True])
def test_caches_of_latents(device: str, is_paged: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single tensor of latents and rotary columns uses mla_decode; two tensors give the same result."""
    latents = rows_of(device, 6, 16, 1, 576)
    q, qv = rows_of(device, 2, rows, 4, 64), rows_of(device, 2, rows, 4, 512)
    table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32, device=device)
    cache = latents if is_paged else latents[table.long()].flatten(1, 2)
    lengths = torch.tensor([37, 21], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table if is_paged else None, "causal": True}
    calls = []
    decode = latents_module.mla_decode

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return decode(*given, **named)

    monkeypatch.setattr(latents_module, "mla_decode", counted)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, cache[..., 512:], cache[..., :512], qv=qv, return_softmax_lse=True, **options
    )
    assert bool(calls) == (device == "cuda")  # only for 16-bit types
    copies = cache[..., 512:].contiguous(), cache[..., :512].contiguous()
    again, again_lse, *_ = fa3.flash_attn_with_kvcache(q, *copies, qv=qv, return_softmax_lse=True, **options)
    for b, length in enumerate((37, 21)):
        keys = latents[table[b].long()].flatten(0, 1)[:length].cpu()
        wanted, wanted_lse = expected([q[b].cpu(), keys[..., 512:], keys[..., :512], qv[b].cpu()], {"causal": True})
        for found, found_lse in ((out, lse), (again, again_lse)):
            assert close(found[b].cpu(), wanted)
            assert torch.allclose(found_lse[b].cpu().double(), wanted_lse, atol=1e-2)


def test_values_of_512_columns_have_gradients(device: str) -> None:
    q, k, v = (rows_of(device, 2, *shape).requires_grad_() for shape in ((9, 4, 64), (13, 2, 64), (13, 2, 512)))
    out = fa3.flash_attn_func(q, k, v, causal=True)
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (9, 13)]
    ragged = fa3.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), *starts, 9, 13, causal=True)
    inputs = [tensor.detach().cpu().double().requires_grad_() for tensor in (q, k, v)]
    keys, values = (tensor.repeat_interleave(2, 2).transpose(1, 2) for tensor in inputs[1:])
    hidden = torch.ones(9, 13).triu(5).bool()
    scores = (inputs[0].transpose(1, 2) @ keys.mT / 8).masked_fill(hidden, -torch.inf)
    wanted = (torch.softmax(scores, -1) @ values).transpose(1, 2)
    assert close(out.detach().cpu(), wanted.detach())
    gradient = torch.randn_like(out)
    exact = torch.autograd.grad(wanted, inputs, gradient.cpu().double())
    found = torch.autograd.grad(out, (q, k, v), gradient)
    of_ragged = torch.autograd.grad(ragged, (q, k, v), gradient.flatten(0, 1))
    for of, to in zip((*found, *of_ragged), (*exact, *exact), strict=True):
        assert torch.allclose(of.cpu().double(), to, atol=0.3 if device == "cuda" else 1e-4)
