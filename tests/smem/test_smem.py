"""The shared-memory calculator: sums, limits, occupancy compared with hand-computed numbers, and its errors."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ArgumentError, DtypeError, ExitCode
from flashmoe_tools.descriptors import KernelRow
from flashmoe_tools.smem import cli as smem
from flashmoe_tools.smem.occupancy import (
    Layout,
    check_dtype,
    families,
    has_head_dim,
    largest_tile,
    layout,
    operations,
    pick_family,
    rows_on,
    tile_problem,
    tiles,
    with_head_dim,
)
from flashmoe_tools.tables import entries, load_tables

TABLES = load_tables()


def row(**changes: object) -> KernelRow:
    base = next(r for r in TABLES.kernels if r.family == "sm80" and r.operation == "attention_forward")
    plain = replace(base, block_m=128, block_n=64, stages=2, warps=4, variant="")
    head_dim = changes.pop("head_dim", 128)
    return replace(with_head_dim(plain, head_dim), **changes)


def on(gpu: str, registers: int | None = None, dtype: str = "bf16", **changes: object) -> Layout:
    return layout(TABLES.gpu(gpu), row(**changes), dtype, registers)


def test_the_bytes_of_a_known_tile() -> None:
    found = on("sm89")
    # Q 128 x 128 x 2; K and V two stages each of 64 x 128 x 2.
    assert sum(size for _, size in found.items) == 128 * 128 * 2 + 4 * 64 * 128 * 2 == found.total
    assert found.left == 101376 - 98304
    assert found.fits


def test_one_stage_more_does_not_fit_on_99_kib_but_on_163() -> None:
    assert not on("sm89", stages=3).fits
    assert on("sm80", stages=3).fits


@pytest.mark.parametrize(
    ("gpu", "changes", "registers", "blocks", "bound"),
    [
        ("sm89", {}, None, 1, "shared memory"),
        ("sm80", {}, None, 1, "shared memory"),
        ("sm90", {}, None, 2, "shared memory"),
        # 48 KiB + 1 KiB reserved of 164 KiB: three; 255 registers: 8192 per warp, 32768 per block: two.
        ("sm80", {"head_dim": 64}, None, 3, "shared memory"),
        ("sm80", {"head_dim": 64}, 255, 2, "registers"),
        ("sm80", {"head_dim": 64}, 168, 3, "shared memory"),
        # 16 warps per block, 1536 threads per SM: three by threads, one by shared memory.
        ("sm86", {"warps": 16, "head_dim": 64, "block_m": 64, "block_n": 16, "stages": 1}, None, 3, "threads"),
    ],
)
def test_blocks_per_multiprocessor(
    gpu: str, changes: dict[str, int], registers: int | None, blocks: int, bound: str
) -> None:
    found = on(gpu, registers, **changes)
    assert found.blocks_per_sm == blocks
    assert found.limits[0].resource == bound


def test_what_does_not_fit_has_no_blocks() -> None:
    assert on("sm75", dtype="f16", head_dim=256).blocks_per_sm == 0
    assert not on("sm90", warps=33).fits


def test_the_largest_tile_is_the_largest() -> None:
    gpu = TABLES.gpu("sm89")
    best = largest_tile(gpu, row(), "bf16")
    assert best is not None
    assert best.fits
    for tile in tiles(row()):
        other = layout(gpu, tile, "bf16")
        assert not other.fits or tile.block_m * tile.block_n <= best.row.block_m * best.row.block_n


def test_no_tile_fits() -> None:
    assert largest_tile(TABLES.gpu("sm75"), row(head_dim=256, stages=4), "f16") is None


@pytest.mark.parametrize("gpu", TABLES.gpus, ids=lambda gpu: gpu.name)
def test_every_row_of_the_table_fits_where_it_runs(gpu: object) -> None:
    checked = 0
    for family in set(gpu.families) & set(families(TABLES)):
        for dtype in ("f16", "bf16") if gpu.bf16 else ("f16",):
            for found in rows_on(TABLES, gpu, family, dtype, 64):
                assert layout(gpu, found, dtype).blocks_per_sm >= 1
                checked += 1
    assert checked or not any(gpu.name in unit.target.gpus for unit in TABLES.units())


def test_a_head_dim_between_kernels_runs_in_the_next_one() -> None:
    gpu = TABLES.gpu("sm80")
    widths = sorted({r.axes["head_dim"] for r in TABLES.kernels if r.family == "sm80" and "head_dim" in r.axes})
    assert {r.axes["head_dim"] for r in rows_on(TABLES, gpu, "sm80", "f16", 40)} == {widths[0]}
    assert rows_on(TABLES, gpu, "sm80", "f16", widths[-1] + 1) == ()


def test_refusals() -> None:
    with pytest.raises(DtypeError, match=r"bf16 needs compute capability 8\.0; sm75 is 7\.5; use --dtype f16"):
        check_dtype(TABLES.gpu("sm75"), "bf16")
    with pytest.raises(ArgumentError, match="no kernel family 'sm70'; known: "):
        pick_family(TABLES, TABLES.gpu("sm75"), "sm70")


@pytest.mark.parametrize("text", ["sm89", "sm_89", "89", "8.9", "SM89", "sm_89a"])
def test_spellings_of_a_gpu(text: str) -> None:
    assert smem.arch_name(text) == "sm89"


@pytest.mark.parametrize(("text", "name"), [("sm_120a", "sm120"), ("10.0", "sm100"), ("ampere", "ampere")])
def test_longer_spellings(text: str, name: str) -> None:
    assert smem.arch_name(text) == name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arch", "sm99", "--head-dim", "64"], "no GPU architecture 'sm99'; known: sm75"),
        (["--arch", "sm80"], "attention_forward has a head dim: add --head-dim"),
        (["--operation", "grouped_gemm", "--head-dim", "64"], "grouped_gemm has no head dim: drop --head-dim"),
        (["--operation", "moe_combine"], "'moe_combine' has no formula of shared memory; known: attention_forward, "),
        (["--arch", "sm80", "--head-dim", "0"], "--head-dim 0 is not in 1 to 512"),
        (["--arch", "sm80", "--head-dim", "64", "--tile", "128"], "--tile '128' is not a tile"),
        (["--arch", "sm80", "--head-dim", "64", "--tile", "0x64"], "is not a tile"),
        (["--arch", "sm80", "--head-dim", "64", "--stages", "0"], "--stages 0 is not in 1 to 64"),
        (
            ["--arch", "sm75", "--head-dim", "64", "--dtype", "bf16", "--family", "sm80"],
            "bf16 needs compute capability",
        ),
    ],
)
def test_the_program_refuses_with_the_reason(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["smem", *arguments]) == ExitCode.USAGE, "1 says that a tile does not fit"
    assert says in capsys.readouterr().err


def test_the_program_itemises(capsys: pytest.CaptureFixture[str]) -> None:
    tile = ["--tile", "128x64", "--stages", "2", "--warps", "4"]
    assert main(["smem", "--arch", "8.9", "--head-dim", "128", "--family", "sm80", *tile]) == 0
    text = capsys.readouterr().out
    for part in (
        "Q tile",
        "32,768 bytes",
        "98,304 bytes",
        "101,376 bytes",
        "3,072 bytes",
        "blocks per SM: 1",
        "largest tile that fits",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arch", "sm89", "--tile", "17x64"], "4 warps of sm80 share 64 rows of Q, or a multiple; not 17"),
        (["--arch", "sm89", "--tile", "64x63"], "rows of K come in multiples of 16 with 4 warps of sm80; not 63"),
        (["--arch", "sm89", "--tile", "128x16", "--warps", "8"], "multiples of 32 with 8 warps of sm80; not 16"),
        (["--arch", "sm90", "--tile", "128x64", "--warps", "16"], "with 16 warps a tile of sm90 has 192 rows of Q, not 128"),
        (["--arch", "sm90", "--tile", "128x64", "--warps", "4"], "one that loads and one or more that compute; not 4 warps"),
    ],
)  # fmt: skip
def test_a_tile_that_no_kernel_has_is_said_to_be_one(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["smem", "--head-dim", "64", "--stages", "1", *arguments])
    text = capsys.readouterr().out
    assert "no kernel has this tile: " in text
    assert says in text


def test_every_tile_of_the_table_and_every_largest_one_can_be_had() -> None:
    for row in (row for row in TABLES.kernels if row.operation == "attention_forward"):
        assert tile_problem(row) == ""
        assert all(tile_problem(tile) == "" for tile in tiles(row))


def test_a_tile_that_does_not_fit_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smem", "--arch", "sm86", "--head-dim", "256", "--tile", "128x128", "--family", "sm80"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_all_gpus_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smem", "--head-dim", "64", "--family", "sm80", "--tile", "64x64", "--stages", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    able = [gpu.name for gpu in TABLES.gpus if "sm80" in gpu.families]
    assert [item["gpu"] for item in found] == able
    assert {item["total"] for item in found} == {64 * 64 * 2 * 3}
    assert main(["smem", "--head-dim", "64", "--family", "sm80", "--tile", "64x64"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(able)


@pytest.mark.parametrize("operation", [one for one in operations(TABLES) if one != "attention_forward"])
def test_every_operation_with_a_formula_is_calculated(operation: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--head-dim", "64"] if has_head_dim(TABLES, operation) else []
    status = main(["smem", "--operation", operation, *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (status == ExitCode.OK) == all(item["fits"] for item in found)
    ran = {gpu.name for gpu in TABLES.gpus if set(families(TABLES, operation)) & set(gpu.families)}
    assert {item["gpu"] for item in found} == ran
    assert all(item["total"] == sum(one["bytes"] for one in item["items"]) > 0 for item in found)
    # For a GPU that the operation is not built for it shows another GPU's rows, which need not fit.
    built = {unit.target.name.removesuffix("a") for unit in TABLES.units() if unit.row.operation == operation}
    fitting = [item["gpu"] for item in found if item["fits"]]
    assert {name.replace("sm_", "sm") for name in built if name.startswith("sm_")} & ran <= set(fitting)
    assert main(["smem", "--operation", operation, *words]) == status
    assert capsys.readouterr().out.startswith(f"shared memory of {operation}")
    assert main(["smem", "--operation", operation, *words, "--arch", fitting[0]]) in (status, ExitCode.OK)
    assert "dynamic shared memory" in capsys.readouterr().out


def test_registers_of_the_last_build_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = TABLES.gpu("sm80")
    known = rows_on(TABLES, gpu, "sm80", "bf16", 64)[0]
    symbol = entries(known, "bf16")[-1].symbol
    unit = {"target": "sm_80", "kernels": [{"symbol": symbol, "registers": 123}]}
    report = tmp_path / "build.json"
    report.write_text(json.dumps({"data": {"units": [unit]}}), encoding="utf-8")
    monkeypatch.setattr(smem, "BUILD_REPORT", report)
    assert smem.built_registers(gpu, known, "bf16") == 123
    assert smem.built_registers(gpu, known, "f16") is None
    report.unlink()
    assert smem.built_registers(gpu, known, "bf16") is None


def test_a_reader_that_stops_early_is_no_error() -> None:
    program = [sys.executable, "-u", "-m", "flashmoe", "smem", "--head-dim", "64"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == ExitCode.PIPE_CLOSED
