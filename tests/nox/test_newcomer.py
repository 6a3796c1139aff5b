"""The newcomer's script: which blocks it extracts from the pages, how it runs them, and what it reports about one that fails."""

import os
import re
from pathlib import Path

import pytest

from flashmoe_build import newcomer
from flashmoe_build.newcomer import PAGES, Block, blocks, environment, follow, run_block
from flashmoe_tools.report import Verdict

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "https://example.org/someone/project"


def test_every_guide_with_a_block_is_followed_and_readme_comes_first() -> None:
    taken = [block.page for block in blocks(ROOT)]
    assert taken[0] == "README.md"
    guides = [
        path
        for path in (ROOT / "docs" / "guides").glob("*.md")
        if re.search(r"^```(bash|python)$", path.read_text(), re.MULTILINE)
    ]
    assert {str(path.relative_to(ROOT)) for path in guides} <= set(PAGES)
    assert set(taken) == set(PAGES), "a page without a block is not followed"


def test_git_finds_this_checkout_at_the_address_of_the_page(tmp_path: Path) -> None:
    variables = environment(tmp_path, ROOT, here=False)
    address = variables["GIT_CONFIG_VALUE_0"]
    assert f"git clone {address}" in next(blocks(ROOT)).text
    assert variables["GIT_CONFIG_KEY_0"] == f"url.{ROOT.as_uri()}.insteadOf"
    assert variables["HOME"] == str(tmp_path / "home")
    assert not {name for name in variables if name.startswith("FLASHMOE")}


def test_blocks_share_a_folder_and_the_first_that_fails_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = tmp_path / "root", tmp_path / "folder"
    root.mkdir()
    folder.mkdir()
    (root / "pyproject.toml").write_text(f'Source = "{SOURCE}"\n')
    page = "```bash\nmkdir made && cd made\n```\n```python\nopen('z', 'w')\n```\n```\nnot run\n```\n```bash\necho told >&2\nls y\n```\n"
    (root / "README.md").write_text(page + "```python\nopen('never', 'w')\n```\n")
    monkeypatch.setattr(newcomer.blocks, "__defaults__", (("README.md",),))
    checks = follow(root, folder, 100.0, here=False)
    assert [check.verdict for check in checks] == [Verdict.PASS, Verdict.PASS, Verdict.FAIL, Verdict.SKIP]
    assert (folder / "made" / "z").is_file()
    assert "exit 2: ...told" in checks[2].found
    assert checks[2].name == "README.md, block 3: echo told >&2"
    assert not list(folder.rglob("never"))


def test_a_block_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    found, where = run_block(Block("a.md", 1, "bash", "sleep 60"), tmp_path, dict(os.environ), 0.5)
    assert (found, where) == ("the time limit was reached", tmp_path)
    found, _ = run_block(Block("a.md", 1, "bash", "true"), tmp_path, dict(os.environ), 0.0)
    assert found == "the time limit was reached before it"
