"""The site's pages and the long description: every link works where its reader sees it. ``nox -s lint`` builds the site."""

import importlib
import re
from pathlib import Path

import pytest

import flashmoe.compat
import flashmoe.distributed
from flashmoe._version import DISTRIBUTION
from flashmoe.errors import BuildError
from flashmoe_build import links, site

ROOT = Path(__file__).resolve().parents[2]
HOME = links.repository()


def test_the_long_description_has_no_relative_link_and_names_the_distribution() -> None:
    text = links.absolute((ROOT / "README.md").read_text(encoding="utf-8"), "", "v1", HOME)
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert f"{HOME}/blob/v1/docs/api.md" in targets
    assert f"{HOME}/tree/v1/docs/notebook" in targets
    assert f"{HOME}/raw/v1/docs/forward.svg" in targets
    assert f"**{DISTRIBUTION}**" in text


def test_a_link_leads_to_a_page_of_the_site_or_into_the_repository() -> None:
    pages = {"README.md": "index.md", "docs/api.md": "api.md", "docs/kernels/cpu.md": "kernels/cpu.md"}
    text = "[a](../api.md#x) [b](../../csrc/tables/arch.toml) [c](https://e.org) [d](#y)\n```\n[e](gone.md)\n```\n"
    assert site.rewrite_links(text, "docs/kernels/cpu.md", pages, HOME) == (
        f"[a](../api.md#x) [b]({HOME}/blob/main/csrc/tables/arch.toml) [c](https://e.org) [d](#y)\n```\n[e](gone.md)\n```\n"
    )
    assert site.rewrite_links("[a](docs/kernels/cpu.md)", "README.md", pages, HOME) == "[a](kernels/cpu.md)"
    with pytest.raises(BuildError, match=r"docs/api\.md: the link to 'gone\.md' leads to docs/gone\.md"):
        site.rewrite_links("[a](gone.md)", "docs/api.md", pages, HOME)


def test_long_names_in_tables_break_behind_punctuation_alone() -> None:
    code = '<code><span class="pre">{}</span></code>'
    cell = "<td><p>" + code + "</p></td>"
    soft = cell.format("FLASHMOE_<wbr>CHECK_<wbr>VALUES=<wbr>1")
    assert site.breakable(cell.format("FLASHMOE_CHECK_VALUES=1")) == soft
    outside = (
        code.format("flashmoe.compat.flash_attn") + cell.format("block_table") + "<td>a_long_word_that_is_no_code</td>"
    )
    assert site.breakable(outside) == outside


def left_behind(text: str) -> list[str]:
    """Rows without a table header, and sentences that end in a colon before a heading or another paragraph."""
    blocks = [block for block in re.sub(r"(?s)```.*?```", "```", text).split("\n\n") if block.strip()]
    rows = [block for block in blocks if block.startswith("| ") and not re.match(r"[^\n]*\n\| ?:?--", block)]
    shows = ("|", "```", "<", "- ", "* ", "1. ", "  ", "![", "**")
    open_ends = [
        block
        for block, after in zip(blocks, [*blocks[1:], "#"], strict=True)
        if block.rstrip().endswith(":") and not block.startswith(("|", "#")) and not after.startswith(shows)
    ]
    return rows + open_ends


def test_what_a_sentence_introduces_is_there() -> None:
    """A table that was moved to another page must not leave rows or an introduction behind."""
    assert left_behind("In us:\n\n## Next\n") == ["In us:"]
    assert left_behind("In us:\n\n| 1 | 2 |\n") == ["| 1 | 2 |\n"]
    assert left_behind("In us:\n\n| a |\n| --- |\n| 1 |\n\nx:\n```\ny\n```\n") == []
    pages = {name: left_behind((ROOT / name).read_text(encoding="utf-8")) for name in site.pages()}
    assert {name: found for name, found in pages.items() if found} == {}


def test_every_page_is_in_the_navigation() -> None:
    made = {"reference", "command", "kernels/table"}
    named = {name for names in site.NAVIGATION.values() for name in names}
    assert named | {"index"} == {name.removesuffix(".md") for name in site.pages().values()} | made


def test_the_reference_has_every_public_name() -> None:
    shown = {name.rpartition(".")[2] for names in site.FUNCTIONS.values() for name in names}
    public = {*flashmoe.__all__, *flashmoe.compat.__all__, *flashmoe.distributed.__all__} - {"__version__"}
    assert public - shown == set()
    for name in (one for names in site.FUNCTIONS.values() for one in names if one not in site.MODULES):
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


def test_the_citation_names_this_version_and_repository() -> None:
    from flashmoe._version import __version__

    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__.partition('.dev')[0]}\n" in text  # also for a build without a tag
    assert f"\nrepository-code: {HOME}\n" in text
