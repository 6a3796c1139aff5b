"""The tables are consistent, and an inconsistent one is rejected with the name of the wrong row."""

from pathlib import Path

import pytest

from flashmoe.errors import TableError
from flashmoe_tools.tables import load_tables

ROWS, DESCRIPTORS = "attention/kernels.toml", "attention/operations.toml"
GOOD_ROW = """
schema = 1
[[attention_forward.sm80]]
dtypes = ["f16"]
head_dim = 64
targets = ["sm_80"]
tile = { block_m = 128, block_n = 64, stages = 2, warps = 4, min_blocks = 2 }
options = { masked_loop = 1 }
why = "a test"
"""


@pytest.fixture
def folder(tmp_path: Path, root: Path) -> Path:
    for name in ("tables/arch.toml", "attention/operations.toml"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text((root / "csrc" / name).read_text())
    (tmp_path / ROWS).write_text(GOOD_ROW)
    return tmp_path


def edit(folder: Path, old: str, new: str, name: str = ROWS) -> None:
    text = (folder / name).read_text()
    assert text.count(old) >= 1
    (folder / name).write_text(text.replace(old, new, 1))


def test_the_fixture_is_good(folder: Path) -> None:
    assert len(list(load_tables(folder).units())) == 1


def test_further_kernels_of_a_tile_differ_in_what_they_state(folder: Path) -> None:
    also = '[attention_forward.sm80.also.split]\noptions = { split = 1 }\nallow = { spill = "a reason" }\n'
    (folder / ROWS).write_text(GOOD_ROW + also)
    plain, further = load_tables(folder).units()
    assert [unit.row.variant for unit in (plain, further)] == ["", "split"]
    assert further.row.options == {**plain.row.options, "split": 1}
    assert (further.row.tile, further.row.targets, further.row.why) == (plain.row.tile, plain.row.targets, "a test")
    assert (plain.row.allow, further.row.allow) == ({}, {"spill": "a reason"})


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            "options = { split = 1 }\ntargets = []",
            r"row 1, also, split: key 'targets': known: options, why, allow, by_dtype",
        ),
        ('why = "x"', "row 1, also, split: options is missing"),
        ("options = { splits = 1 }", r"row 1 \(attention_forward sm80 d64 split\), options: unknown key 'splits'"),
    ],
)
def test_what_a_further_kernel_may_state(folder: Path, own: str, words: str) -> None:
    (folder / ROWS).write_text(f"{GOOD_ROW}[attention_forward.sm80.also.split]\n{own}\n")
    with pytest.raises(TableError, match=words):
        load_tables(folder)


def test_where_scores_have_kernels_of_their_own_no_other_can_be_taken_for_them() -> None:
    """The host uses the plain kernel if no ``scores`` kernel can be loaded, so that must only happen if none is ever compiled."""
    found: dict[tuple[str, str], dict[str, set[tuple[str, str, tuple[tuple[str, int], ...]]]]] = {}
    for unit in load_tables().units():
        row = unit.row
        is_wide = row.axes.get("head_dim", 0) > 256  # the host selects these by name (select_wide.cpp)
        if "varlen" in row.operation and row.variant in ("", "scores") and not is_wide:
            kinds = found.setdefault((row.operation, row.family), {"": set(), "scores": set()})
            kinds[row.variant].add((unit.dtype, unit.target.name, tuple(sorted(row.axes.items()))))
    two = {key: kinds for key, kinds in found.items() if kinds["scores"]}
    assert {family for _, family in two} >= {"sm80", "sm90"}
    assert [key for key, kinds in two.items() if not kinds[""] <= kinds["scores"]] == []


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
                and unit.row.axes["head_dim"] == head_dim
                and unit.row.family in gpu.families
            ]
            assert rows, f"{gpu.name} has no kernel for head_dim {head_dim}"


def test_bf16_for_sm75_is_refused(folder: Path) -> None:
    edit(folder, 'dtypes = ["f16"]', 'dtypes = ["bf16"]')
    edit(folder, 'targets = ["sm_80"]', 'targets = ["sm_75"]')
    with pytest.raises(TableError, match=r"bf16 needs compute capability 8\.0; sm_75"):
        load_tables(folder)


def test_shared_memory_over_the_limit_names_gpu_and_bytes(folder: Path) -> None:
    """A tile that does not fit is found in the table, before anything is compiled."""
    edit(folder, "stages = 2", "stages = 6")
    with pytest.raises(TableError, match=r"114688 bytes of shared memory, but a block on sm86 has at most 101376"):
        load_tables(folder)


def test_the_same_kernel_twice(folder: Path) -> None:
    text = (folder / ROWS).read_text()
    (folder / ROWS).write_text(text + text.replace("schema = 1", ""))
    with pytest.raises(TableError, match=r"row 2 .* states .*_d64_causal for sm_80, and a row before it too"):
        load_tables(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('dtypes = ["f16"]', 'dtypes = ["f8"]', "dtypes 'f8': known: f16, bf16, f32"),
        ('targets = ["sm_80"]', 'targets = ["sm_81"]', "no target 'sm_81'"),
        ("stages = 2, ", "", "stages is missing"),
        ("stages = 2", "stages = 2, flavour = 3", r"row 1 \(attention_forward sm80 d64\), tile: unknown key 'flavour'"),
        ("head_dim = 64", "head_dim = 64\nflavour = 3", r"row 1 \(attention_forward sm80 d64\): unknown key 'flavour'"),
        ("stages = 2", 'stages = "2"', r"attention/kernels\.toml, row 1 .*: stages '2': int is needed"),
        ("head_dim = 64", "", "head_dim is missing"),
        (
            "head_dim = 64",
            "head_dim = 96",
            r"head_dim 96: known: 64, 128, 192, 256; tiles are swizzled .* 64 columns; others run",
        ),
        ("head_dim = 64", 'head_dim = 64\nmask = ["sliding"]', "mask 'sliding': known: causal, full"),
        ("forward.sm80", "forward.sm70", "family 'sm70': known: sm75, sm80, sm90"),
        ("attention_forward", "moe", "operation 'moe': known: attention_forward"),
        (
            "masked_loop = 1",
            "masked_lop = 1",
            r"sm80 d64\), options: unknown key 'masked_lop'; known: masked_loop, query_in",
        ),
        ("masked_loop = 1", "masked_loop = true", "masked_loop True: int is needed"),
        ("head_dim = 64", "head_dim = 64\ncost = { key = 1.0 }", r"sm80 d64\), cost: ends is missing"),
        ("schema = 1", "schema = 7", "schema 7"),
        (GOOD_ROW[11:], "", r"no \[\[OPERATION\.FAMILY\]\] row"),
        ("[[attention_forward.sm80]]", "[[kernel]]", "a table is needed"),
        ("warps = 4", "warps = = 4", "not TOML"),
    ],
)
def test_damaged_rows(folder: Path, old: str, new: str, message: str) -> None:
    edit(folder, old, new)
    with pytest.raises(TableError, match=message):
        load_tables(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('schedule = "grid"', 'schedule = "stream"', "schedule 'stream': known: grid, persistent"),
        ('entry = "flashmoe', 'enter = "flashmoe', "attention_forward, family, sm75: entry is missing"),
        ('schedule = "grid"', 'schedule = "grid"\nstages = 2', "unknown key 'stages'"),
        ("block_m * head_dim", "block_m * dim", "no value 'dim'; known: head_dim, block_m"),
        ("block_m * head_dim", "block_m ** head_dim", "'block_m [*][*] head_dim' is not allowed"),
        ("block_m * head_dim", "block_m * * head_dim", "is not an arithmetic expression"),
        ("block_m * head_dim", "block_m // 0", "division by 0"),
        ("allowed = [64,", 'allowed = ["64",', "head_dim: allowed '64': int is needed"),
        ('tile = ["block_m", "block_n", "stages"]', 'tile = ["block_k"]', "tile 'block_k': known: block_m"),
        ('"share"]', '"share", "more"]', r"cost 5: csrc/host/kernel_table\.h has room for 4"),
        ("needs_cost = true", "needs_cost = 1", "needs_cost 1: bool is needed"),
        (
            'like = "attention_forward"',
            'like = "attention_back"',
            "attention_varlen_forward: like 'attention_back': known: attention_forward, ",
        ),
        (
            'like = "sm75"',
            'like = "sm90"',
            "attention_forward, family, sm80: like 'sm90': known: attention_forward.*sm75",
        ),
    ],
)
def test_damaged_descriptors(folder: Path, old: str, new: str, message: str) -> None:
    edit(folder, "forward.sm80", "forward.sm75")
    edit(folder, 'targets = ["sm_80"]', 'targets = ["sm_75"]')
    edit(folder, "options = { masked_loop = 1 }", "")
    edit(folder, old, new, DESCRIPTORS)
    with pytest.raises(TableError, match=message):
        load_tables(folder)


def test_what_is_like_another_leaves_out_what_that_one_states(folder: Path) -> None:
    kinds = {(kind.operation, kind.family): kind for kind in load_tables(folder).descriptors}
    dense, ragged = kinds["attention_forward", "sm80"], kinds["attention_varlen_forward", "sm80"]
    assert (ragged.header, ragged.tile, ragged.params) == (dense.header, dense.tile, dense.params)
    assert (ragged.entry, [axis.name for axis in ragged.axes]) == (
        "flashmoe::attention::sm80::forward_varlen",
        ["head_dim"],
    )
    assert list(ragged.shared_memory) == [*dense.shared_memory, "terms", "tile"]
    maps = kinds["attention_mask_forward", "sm90"].tensor_maps
    assert maps is not None
    assert (maps.names[-1], maps.header) == ("mask", kinds["attention_varlen_forward", "sm90"].tensor_maps.header)  # type: ignore[union-attr]


def test_the_order_of_options_is_the_descriptors(folder: Path) -> None:
    edit(folder, "{ masked_loop = 1 }", "{ masked_loop = 1, query_in_registers = 1 }")
    (row,) = load_tables(folder).kernels
    assert list(row.options.items()) == [("query_in_registers", 1), ("split", 0), ("masked_loop", 1)]


def test_a_tile_chosen_by_cost_states_it(folder: Path, root: Path) -> None:
    """Otherwise it would never be chosen, and nothing else would report it."""
    text = (root / "csrc" / ROWS).read_text()
    line = "cost = { key = 0.0227, ends = 3.0, split = 13.0, share = 0.4 }\n"
    assert text.count(line) == 1
    (folder / ROWS).write_text(text.replace(line, ""))
    with pytest.raises(TableError, match=r"\(attention_forward sm90 d256 split\): cost is missing"):
        load_tables(folder)


def test_a_folder_lacks_one_of_its_two_files(folder: Path) -> None:
    (folder / DESCRIPTORS).rename(folder / "kept.toml")
    with pytest.raises(TableError, match=r"cannot read .*attention/operations\.toml"):
        load_tables(folder)
    (folder / "kept.toml").rename(folder / DESCRIPTORS)
    (folder / ROWS).unlink()
    with pytest.raises(TableError, match=r"cannot read .*attention/kernels\.toml"):
        load_tables(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("smem_static_limit", "smem_static_limt", "arch.toml: smem_static_limit is missing"),
        ("[[target]]\nname", "[[targets]]\nname", "arch.toml: unknown key 'targets'; known: gpu, "),
        ('gpus = ["sm75"]', 'gpu = ["sm75"]', r"arch.toml: \[\[target\]\]: gpus is missing"),
        ('families = ["sm75"]', "", r"arch.toml: \[\[gpu\]\] 'sm75': 'families'"),
        ("[virtual.sm80]", "[virtual.sm81]", r"arch.toml: \[virtual.sm80\] states no virtual architecture for sm_80"),
    ],
)
def test_damaged_architectures(folder: Path, old: str, new: str, message: str) -> None:
    edit(folder, old, new, "tables/arch.toml")
    with pytest.raises(TableError, match=message):
        load_tables(folder)
