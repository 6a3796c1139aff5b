"""Occupancy and limits, against numbers computed by hand from the programming guide."""

import pytest

from flashmoe_tools.audit.launch import Launch, Need, launchability
from flashmoe_tools.smem.occupancy import warp_registers
from flashmoe_tools.tables import load_tables


def launch(gpu: str, *, registers: int | None = 64, threads: int = 128, static: int = 0, dynamic: int = 0) -> Launch:
    tables = load_tables()
    need = Need("k", "u", "t", registers, threads, static, dynamic, 0)
    return launchability(
        need,
        tables.gpu(gpu),
        smem_static_limit=tables.smem_static_limit,
        registers_limit=tables.registers_per_thread_limit,
    )


@pytest.mark.parametrize(
    ("gpu", "registers", "threads", "dynamic", "blocks", "limited_by"),
    [
        ("sm80", 168, 128, 0, 3, "registers"),  # 5,376 per warp; 3 warps per scheduler; 12 warps, in blocks of 4
        ("sm80", 128, 128, 0, 4, "registers"),
        ("sm80", 32, 128, 0, 16, "threads"),  # 2,048 threads
        ("sm86", 32, 128, 0, 12, "threads"),  # 1,536 threads
        ("sm75", 32, 128, 0, 8, "threads"),  # 1,024 threads
        ("sm80", 32, 32, 0, 32, "blocks"),
        ("sm90", 168, 384, 230 * 1024 - 4096, 1, "shared memory"),
        ("sm90", 168, 384, 0, 1, "registers"),
        ("sm80", 64, 128, 81920, 2, "shared memory"),  # 2 x (80 + 1) KiB of 164
        ("sm80", 64, 128, 82944, 2, "shared memory"),  # 2 x (81 + 1) KiB: exactly 164
        ("sm80", 64, 128, 83072, 1, "shared memory"),
        ("sm75", 64, 128, 32768, 2, "shared memory"),
        ("sm75", 64, 128, 65536, 1, "shared memory"),
        ("sm89", 128, 256, 49152, 2, "shared memory"),
    ],
)
def test_blocks_on_a_multiprocessor(
    gpu: str, registers: int, threads: int, dynamic: int, blocks: int, limited_by: str
) -> None:
    result = launch(gpu, registers=registers, threads=threads, dynamic=dynamic)
    assert (result.blocks_per_sm, result.problems) == (blocks, ())
    if limited_by == "registers" or dynamic:
        assert result.limited_by == limited_by or result.blocks_per_sm == blocks


@pytest.mark.parametrize(
    ("gpu", "limit"),
    [
        ("sm75", 65536),
        ("sm80", 166912),
        ("sm86", 101376),
        ("sm89", 101376),
        ("sm90", 232448),
        ("sm100", 232448),
        ("sm120", 101376),
    ],
)
def test_shared_memory_limit_is_exact(gpu: str, limit: int) -> None:
    assert not launch(gpu, dynamic=limit).problems
    assert f"{limit + 1} bytes of shared memory per block" in launch(gpu, dynamic=limit + 1).problems[0]
    assert launch(gpu, static=1024, dynamic=limit).problems, "static and dynamic count together"


def test_static_limit() -> None:
    assert not launch("sm90", static=49152).problems
    assert "49153 bytes of static shared memory" in launch("sm90", static=49153).problems[0]


def test_threads_limit() -> None:
    assert not launch("sm90", registers=32, threads=1024).problems
    assert "1056 threads per block" in launch("sm90", registers=32, threads=1056).problems[0]


def test_registers_of_a_block() -> None:
    assert not launch("sm90", registers=64, threads=1024).problems
    assert "65 registers x 1024 threads take 73728 registers" in launch("sm90", registers=65, threads=1024).problems[0]
    assert not launch("sm90", registers=255, threads=256).problems
    assert "256 registers per thread" in launch("sm90", registers=256, threads=128).problems[0]


def test_register_allocation_unit() -> None:
    assert [warp_registers(r) for r in (1, 8, 9, 168, 255)] == [256, 256, 512, 5376, 8192]


def test_ptx_has_no_register_count() -> None:
    result = launch("sm120", registers=None, dynamic=65536)
    assert (result.blocks_per_sm, result.problems) == (1, ())
