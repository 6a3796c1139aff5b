"""Every Python block of README.md and docs/ runs unchanged on the CPU, with its own imports."""

import re
from pathlib import Path

import pytest
import torch

import flashmoe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for name in ("csrc", "docs", "examples") for page in sorted((ROOT / name).rglob("*.md"))),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [
    (str(page.relative_to(ROOT)), number, text)
    for page in PAGES
    for number, text in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 20
    fences = sum(
        len(re.findall(r"^[ ]*(?:```|~~~)[ ]*py", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES
    )
    assert fences == len(BLOCKS), "a block is indented or called otherwise, and would not be run"
    assert {page for page, _, _ in BLOCKS} >= {"README.md", "docs/api.md", "docs/guides/serving.md"}


@pytest.mark.parametrize(("page", "number", "text"), BLOCKS, ids=lambda value: str(value)[:30])
@pytest.mark.filterwarnings("ignore::UserWarning")  # from torch, about a single rank and about small models
def test_a_block_runs_as_it_stands(page: str, number: int, text: str) -> None:
    if "init_process_group" in text and not torch.distributed.is_available():
        pytest.skip("a torch without torch.distributed")
    threads = torch.get_num_threads()
    try:
        exec(compile(text, f"{page}, block {number}", "exec"), {"__name__": "__main__"})
    finally:
        flashmoe.deactivate()
        torch.set_num_threads(threads)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
