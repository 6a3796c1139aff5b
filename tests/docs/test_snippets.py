"""The Python in README.md and docs/ runs, on the CPU. A block is known by its page and the start of its text."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import flashmoe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [
    (str(page.relative_to(ROOT)), text) for page in PAGES for text in BLOCK.findall(page.read_text(encoding="utf-8"))
]
Names = dict[str, Any]


def nothing() -> Names:
    return {}


def dense() -> Names:
    q, k, v = (torch.randn(2, heads, 6, 16) for heads in (4, 2, 2))
    return {"q": q, "k": k, "v": v}


def equal_heads() -> Names:
    return dict(zip("qkv", torch.randn(3, 2, 4, 6, 16), strict=True))


def ragged() -> Names:
    def integers(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    q, k, v = (torch.randn(8, heads, 16) for heads in (4, 2, 2))
    ends = integers(0, 5, 8)
    names: Names = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens": ends,
        "cu_seqlens_q": ends,
        "longest": 5,
        "longest_q": 5,
        "longest_k": 7,
    }
    names |= {"k_pages": torch.randn(4, 4, 2, 16), "v_pages": torch.randn(4, 4, 2, 16)}
    names |= {"lengths": integers(7, 3), "table": integers([0, 2], [1, 3]), "q_new": torch.randn(2, 4, 1, 16)}
    return names | {"k_new": torch.randn(2, 2, 1, 16), "v_new": torch.randn(2, 2, 1, 16)}


def experts() -> Names:
    names: Names = {"x": torch.randn(5, 16), "logits": torch.randn(5, 3), "k": 2}
    names |= {"w13": torch.randn(3, 16, 16), "w2": torch.randn(3, 16, 8)}
    names["weights"], names["ids"] = flashmoe.topk_route(names["logits"], 2)
    return names


def scaled_experts() -> Names:
    names = experts() | {"w13_scale": torch.ones(3, 1, 1), "w2_scale": torch.ones(3, 1, 1)}
    names["x"] = names["x"].bfloat16()
    return names | {name: names[name].to(torch.float8_e4m3fn) for name in ("w13", "w2")}


def one_rank() -> Names:
    layer = experts()
    names = layer | dense() | {"group": torch.distributed.group.WORLD, "shared_expert": lambda x: x}
    return names | {"topk_weights": layer["weights"], "topk_ids": layer["ids"]}


RUN: Mapping[tuple[str, str], Callable[[], Names]] = {
    ("README.md", "import torch\nimport flashmoe\n"): nothing,
    ("docs/api.md", "out = flashmoe.attention(q"): dense,
    ("docs/api.md", "out = flashmoe.attention_varlen(q"): ragged,
    ("docs/api.md", ">>> flashmoe.explain(q"): equal_heads,
    ("docs/api.md", "weights, ids = flashmoe.topk_route"): experts,
    ("docs/api.md", "out = flashmoe.fused_moe(x, w13, w2, weights, ids, w13_scale"): scaled_experts,
    ("docs/distributed.md", "from flashmoe.distributed import"): one_rank,
    ("docs/integrations.md", "import flashmoe\n\nflashmoe.activate()"): equal_heads,
    ("docs/integrations.md", "from flashmoe.compat.flash_attn"): nothing,
}
NOT_RUN: Mapping[tuple[str, str], str] = {
    ("docs/distributed.md", "parallelize_module("): "a model on several ranks: tests/distributed/dtensor_jobs.py",
    (
        "docs/integrations.md",
        "from flashmoe.integrations.transformers",
    ): "loads a model: tests/integrations/test_transformers.py",
}


@contextmanager
def group_of_one(page: str) -> Iterator[None]:
    """What a page about several ranks has initialised."""
    if page != "docs/distributed.md":
        yield
        return
    if not torch.distributed.is_available():
        pytest.skip("a torch without torch.distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("page", "start"), RUN, ids=str)
def test_a_block_runs(page: str, start: str) -> None:
    text = next(text for where, text in BLOCKS if where == page and text.startswith(start))
    text = text.replace('device="cuda"', 'device="cpu"')
    with group_of_one(page):
        names = {"torch": torch, "flashmoe": flashmoe, **RUN[page, start]()}
        if text.startswith(">>>"):
            example = doctest.DocTestParser().get_doctest(text, names, page, page, 0)
            assert doctest.DocTestRunner().run(example).failed == 0
            return
        try:
            exec(compile(text, page, "exec"), names)
        finally:
            flashmoe.deactivate()


def test_every_block_is_run_or_has_a_reason() -> None:
    known = [*RUN, *NOT_RUN]
    owners = [[key for key in known if key[0] == page and text.startswith(key[1])] for page, text in BLOCKS]
    assert [text for (_, text), found in zip(BLOCKS, owners, strict=True) if len(found) != 1] == []
    assert {key for found in owners for key in found} == set(known), "a block that is gone"
