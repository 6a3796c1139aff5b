"""Generated tables: up to date, and generated from what they claim."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashmoe.errors import TableError
from flashmoe.tools.tables import load_tables
from flashmoe_build import docs

ROOT = Path(__file__).resolve().parents[2]
TABLES = load_tables(ROOT / "csrc")


def test_the_committed_tables_are_up_to_date() -> None:
    stale = [
        path.name for path, text in docs.generate(ROOT, TABLES).items() if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run `nox -s docs`"


def test_every_gpu_and_every_row_is_there() -> None:
    text = docs.gpu_table(TABLES)
    assert all(gpu.products in text for gpu in TABLES.gpus)
    page = docs.kernel_page(TABLES)
    assert page.count("\n- **") == len(TABLES.kernels)
    for row in TABLES.kernels:
        assert f"{row.block_m}x{row.block_n}" in page


def test_a_changed_table_makes_it_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("README.md", "docs/kernels/table.md", "csrc/arch.toml", "csrc/kernels.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert docs.main(["--check"]) == 0
    arch = tmp_path / "csrc" / "arch.toml"
    text = arch.read_text(encoding="utf-8")
    arch.write_text(text.replace("A100, A30", "A100, A30, A800"), encoding="utf-8")
    load_tables.cache_clear()
    assert docs.main(["--check"]) == 1
    assert "README.md: stale; run `nox -s docs`" in capsys.readouterr().out
    assert docs.main([]) == 0
    assert "A100, A30, A800" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert docs.main(["--check"]) == 0
    load_tables.cache_clear()


def test_a_gpu_that_only_ptx_serves_says_so() -> None:
    gpu = next(gpu for gpu in TABLES.gpus if "sm80" in gpu.families and "sm75" not in gpu.families)
    ptx_only = tuple(replace(row, targets=("compute_80",)) for row in TABLES.kernels if row.family == "sm80")
    row = docs.gpu_row(replace(TABLES, kernels=ptx_only), gpu)
    assert row[3] == "PTX only"
    assert docs.gpu_row(replace(TABLES, kernels=()), gpu)[3] == "none"


def test_a_lost_marker_is_an_error() -> None:
    with pytest.raises(TableError, match=r"x\.md: needs one line '<!-- generated: gpus -->'"):
        docs.replace_part("nothing here", "gpus", "body", "x.md")
    with pytest.raises(TableError):
        docs.replace_part("<!-- end: a -->\n<!-- generated: a -->", "a", "body", "x.md")


def test_only_the_marked_part_changes() -> None:
    text = "before\n<!-- generated: a -->\nold\n<!-- end: a -->\nafter\n"
    assert docs.replace_part(text, "a", "new", "x.md") == text.replace("old", "new")


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        kept = "results/" not in target or (ROOT / "docs" / "results").is_dir()  # an sdist is without them
        if "://" not in target and kept:
            assert (page.parent / target).exists(), target


def test_the_results_are_summaries_small_enough_to_review() -> None:
    files = [path for path in (ROOT / "docs" / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    assert all("samples_ns" not in path.read_text(encoding="utf-8") for path in files)
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".toml", ".txt", ".md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sessions_named_in_the_docs_exist(page: Path) -> None:
    source = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    sessions = set(re.findall(r"@nox\.session[^\n]*\ndef (\w+)\(", source))
    named = set(re.findall(r"nox -s (\w+)", page.read_text(encoding="utf-8"))) - {"SESSION"}
    assert named <= sessions
