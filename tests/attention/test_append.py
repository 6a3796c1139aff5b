"""Appending new keys to caches: which calls are rejected, and that a rejected call leaves its caches unchanged."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.attn import kvcache
from flashmoe.errors import ArgumentError, DtypeError, FlashmoeError, ShapeError
from flashmoe.rules import check


def _ints(device: str, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


# Calls that attention rejects and the append does not: (changed arguments, a part of the message).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"q": _half(2, 3, 1, 16)}, "heads"),
    "batch": ({"q": _half(3, 4, 1, 16)}, "one for each sequence of q"),
    "head_dim": ({"q": _half(2, 4, 1, 24)}, "head_dim"),
    "dtype": ({"q": torch.zeros(2, 4, 1, 16, dtype=torch.bfloat16)}, "dtype"),
    "rank": ({"q": _half(2, 4, 16)}, "q must"),
    "no tensor": ({"q": [[0.0]]}, "q must be a torch.Tensor"),
    "strides": ({"q": _half(2, 4, 16, 2).mT}, "contiguous"),
    "softcap": ({"softcap": -1.0}, "softcap"),
    "window": ({"window": (-2, 0)}, "window"),
    "num_splits": ({"num_splits": 33}, "num_splits"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks"),
    "sinks, no tensor": ({"sinks": [0.0] * 4}, "sinks must be"),
    "slopes": ({"alibi_slopes": torch.zeros(3)}, "slopes"),
    "out": ({"out": _half(2, 4, 1, 8)}, "out"),
    "out and lse": ({"out": _half(2, 4, 1, 16), "return_lse": True}, "return_lse"),
    "scale": ({"k_scale": 2.0}, "k_scale"),
}


def test_an_expanded_cache_is_read_and_never_appended_to(device: str) -> None:
    """Two sequences would write to the same rows."""
    cache = torch.randn(1, 2, 9, 16, device=device).half()
    q, new = (torch.randn(2, h, 1, 16, device=device).half() for h in (4, 2))
    shared, lengths = cache.expand(2, -1, -1, -1), _ints(device, 6, 7)
    read = flashmoe.attention_with_kvcache(q, shared, shared, cache_seqlens=lengths)
    assert torch.equal(read, flashmoe.attention_with_kvcache(q, shared.clone(), shared.clone(), cache_seqlens=lengths))
    before = cache.clone()
    for caches in ((shared, shared.clone()), (shared.clone(), shared)):
        with pytest.raises(ShapeError, match=r"_cache is expanded, so new keys would overwrite each other.*\.clone"):
            flashmoe.attention_with_kvcache(q, *caches, new, new, cache_seqlens=lengths)
        with pytest.raises(ShapeError, match="is expanded"):
            check("attention_append_", (*caches, new, new, lengths, None))
    assert torch.equal(cache, before)


def test_new_keys_are_no_part_of_the_cache(device: str) -> None:
    """Rows are copied in any order. New rows in the same memory, next to the caches, are allowed."""
    memory = torch.randn(2, 2, 16, 32, device=device).half()
    q, lengths = torch.randn(2, 4, 1, 16, device=device).half(), _ints(device, 6, 7)
    keys, values = memory[:, :, :12, :16], memory[:, :, :12, 16:]
    for new in (keys[:, :, 3:4], values[:, :, 11:12]):
        for given, name in (((new, new.clone()), "k_new"), ((new.clone(), new), "v_new")):
            with pytest.raises(ShapeError, match=rf"{name} shares memory with [kv]_cache.*\.clone"):
                flashmoe.attention_with_kvcache(q, keys, values, *given, cache_seqlens=lengths)
    behind = memory[:, :, 12:13]
    found = flashmoe.attention_with_kvcache(q, keys, values, behind[..., :16], behind[..., 16:], cache_seqlens=lengths)
    assert torch.equal(keys[1, :, 7], behind[1, :, 0, :16])
    assert torch.equal(found, flashmoe.attention_with_kvcache(q, keys, values, cache_seqlens=lengths + 1))


def test_keys_and_values_in_the_same_memory(device: str) -> None:
    """Values may be part of their keys, in the cache and in the new rows. If only one of the two does so, the last write would win."""
    cache = torch.zeros(2, 2, 9, 16, device=device).half()
    q, new = torch.randn(2, 4, 1, 16, device=device).half(), torch.randn(2, 2, 1, 16, device=device).half()
    lengths = _ints(device, 6, 7)
    with pytest.raises(ShapeError, match="k_cache and v_cache are the same memory, but k_new and v_new are not"):
        flashmoe.attention_with_kvcache(q, cache, cache[..., :8], new, new[..., :8].clone(), cache_seqlens=lengths)
    assert not cache.any()
    found = flashmoe.attention_with_kvcache(q, cache, cache[..., :8], new, new[..., :8], cache_seqlens=lengths)
    assert torch.equal(cache[1, :, 7], new[1, :, 0])
    assert torch.equal(found, flashmoe.attention_with_kvcache(q, cache, cache[..., :8], cache_seqlens=lengths + 1))


def test_no_transform_follows_an_append(device: str) -> None:
    """All transforms give the same message."""
    q, cache, new = (torch.randn(3, 2, 2, rows, 16, device=device).half() for rows in (1, 9, 1))

    def step(q: Tensor, cache: Tensor, new: Tensor) -> Tensor:
        return flashmoe.attention_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=_ints(device, 6, 7))

    messages = set()
    for transform in (torch.vmap, lambda function: torch.vmap(torch.func.functionalize(function))):
        with pytest.raises(ArgumentError, match=r"in place.*batch") as raised:
            transform(step)(q, cache, new)
        messages.add(str(raised.value))
    assert len(messages) == 1


def test_a_cache_without_room(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CHECK_VALUES", "1")
    cache = torch.zeros(2, 2, 9, 16, device=device).half()
    q, new = (torch.randn(2, h, 3, 16, device=device).half() for h in (4, 2))
    with pytest.raises(ArgumentError, match="sequence 1 has room for 9 keys; it holds 7, and 3 are appended"):
        flashmoe.attention_with_kvcache(q, cache, cache, new, new, cache_seqlens=_ints(device, 6, 7))
    assert not cache.any()
    with pytest.raises(ArgumentError, match=r"cache_seqlens\[0\] is -1; a cache holds 0 keys or more"):
        flashmoe.attention_with_kvcache(q, cache, cache, new, new, cache_seqlens=_ints(device, -1, 5))
    with pytest.raises(ShapeError, match="k_new and k_cache must share the batch size; found 1 and 2"):
        flashmoe.attention_with_kvcache(q, cache, cache, new[:1], new[:1], cache_seqlens=_ints(device, 6, 5))
    with pytest.raises(ShapeError, match="v_new must be"):
        flashmoe.attention_with_kvcache(q, cache, cache, new, new[..., :8], cache_seqlens=_ints(device, 6, 5))
    with pytest.raises(DtypeError, match="k_new must have the dtype"):
        flashmoe.attention_with_kvcache(q, cache, cache, new.float(), new, cache_seqlens=_ints(device, 6, 5))


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_appends_nothing(name: str, is_paged: bool, device: str) -> None:
    """Even if a call with the same caches has been accepted before."""
    shape = (6, 8, 2, 16) if is_paged else (2, 2, 24, 16)
    caches, found = torch.zeros(2, *shape, device=device).half(), REFUSED[name][0]
    changed = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in found.items()}
    arguments: dict[str, Any] = {
        "q": torch.randn(2, 4, 1, 16, device=device).half(),
        "cache_seqlens": _ints(device, 6, 17),
        "block_table": _ints(device, *range(6)).view(2, 3) if is_paged else None,
    }
    new = torch.randn(2, 2, 1, 16, device=device).half()
    flashmoe.attention_with_kvcache(k_cache=caches[0], v_cache=caches[1], k_new=new, v_new=new, **arguments)
    assert caches.any()
    caches.zero_()
    with pytest.raises(FlashmoeError, match=REFUSED[name][1]):
        flashmoe.attention_with_kvcache(
            k_cache=caches[0], v_cache=caches[1], k_new=new, v_new=new, **{**arguments, **changed}
        )
    assert not caches.any()


def test_a_refused_call_of_codes_appends_nothing(device: str) -> None:
    caches = torch.zeros(2, 2, 2, 24, 16, device=device).to(torch.float8_e4m3fn)
    q, new = (torch.randn(2, h, 1, 16, device=device).half() for h in (4, 2))
    lengths = _ints(device, 6, 17)
    wrong: list[tuple[Tensor, Any]] = [(q[:, :3], {}), (q, {"v_scale": torch.ones(3, device=device)}), (q.float(), {})]
    for rows, options in wrong:
        with pytest.raises(FlashmoeError):
            flashmoe.attention_with_kvcache(rows, caches[0], caches[1], new, new, cache_seqlens=lengths, **options)
        assert not caches.float().any()
    flashmoe.attention_with_kvcache(q, caches[0], caches[1], new, new, cache_seqlens=lengths)
    assert caches.float().any()


def test_what_is_remembered_of_accepted_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcache, "_MOST_ACCEPTED", 2)
    caches, new = torch.zeros(2, 1, 2, 24, 16), torch.randn(1, 2, 1, 16)
    for heads in (2, 4, 6, 8):
        flashmoe.attention_with_kvcache(
            torch.randn(1, heads, 1, 16), caches[0], caches[1], new, new, cache_seqlens=_ints("cpu", 3)
        )
        assert len(kvcache._accepted) <= 2
