"""The tables are consistent, and a table that is not is refused with the row that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoe.errors import TableError
from flashmoe.tools.tables import load_tables

GOOD_ROW = """
schema = 1
[virtual.sm80]
default = "compute_80"
[[kernel]]
operation = "attention_forward"
family = "sm80"
dtypes = ["f16"]
head_dim = 64
targets = ["sm_80"]
block_m = 128
block_n = 64
stages = 2
warps = 4
min_blocks = 2
schedule = "grid"
options = {query_in_registers = 0, split = 0, masked_loop = 1}
why = "a test"
"""


@pytest.fixture
def folder(tmp_path: Path, root: Path) -> Path:
    (tmp_path / "arch.toml").write_text((root / "csrc" / "arch.toml").read_text())
    (tmp_path / "kernels.toml").write_text(GOOD_ROW)
    return tmp_path


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "kernels.toml").read_text()
    assert text.count(old) == 1
    (folder / "kernels.toml").write_text(text.replace(old, new))


def test_the_fixture_is_good(folder: Path) -> None:
    assert len(list(load_tables(folder).units())) == 1


def test_every_gpu_has_a_kernel_for_each_head_dim() -> None:
    tables = load_tables()
    for gpu in tables.gpus:
        for head_dim in (64, 128, 256):
            rows = [
                unit
                for unit in tables.units()
                if gpu.name in unit.target.gpus
                and not unit.target.is_ptx
                and unit.row.operation == "attention_forward"
                and unit.row.head_dim == head_dim
                and unit.row.family in gpu.families
            ]
            assert rows, f"{gpu.name} has no kernel for head_dim {head_dim}"


def test_bf16_for_sm75_is_refused(folder: Path) -> None:
    edit(folder, 'dtypes = ["f16"]', 'dtypes = ["bf16"]')
    edit(folder, 'targets = ["sm_80"]', 'targets = ["sm_75"]')
    with pytest.raises(TableError, match=r"bf16 needs compute capability 8\.0; sm_75"):
        load_tables(folder)


def test_shared_memory_over_the_limit_names_gpu_and_bytes(folder: Path) -> None:
    """F15: the tile that does not fit is found in the table, before anything is compiled."""
    edit(folder, "stages = 2", "stages = 6")
    with pytest.raises(TableError, match=r"114688 bytes of shared memory, but a block on sm86 has at most 101376"):
        load_tables(folder)


def test_the_same_kernel_twice(folder: Path) -> None:
    text = (folder / "kernels.toml").read_text()
    (folder / "kernels.toml").write_text(text + text.replace("schema = 1", ""))
    with pytest.raises(TableError, match="twice"):
        load_tables(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('dtypes = ["f16"]', 'dtypes = ["f8"]', "dtype 'f8'"),
        ('targets = ["sm_80"]', 'targets = ["sm_81"]', "no target 'sm_81'"),
        ('schedule = "grid"', 'schedule = "stream"', "schedule 'stream'"),
        ("stages = 2", "", "stages"),
        ("stages = 2", "stages = 2\nflavour = 3", "flavour"),
        ("schema = 1", "schema = 7", "schema 7"),
        ("[[kernel]]", "[[colonel]]", r"no \[\[kernel\]\] row"),
        ("warps = 4", "warps = = 4", "not TOML"),
    ],
)
def test_damaged_rows(folder: Path, old: str, new: str, message: str) -> None:
    edit(folder, old, new)
    with pytest.raises(TableError, match=message):
        load_tables(folder)
