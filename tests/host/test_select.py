"""Which kernel each GPU gets, and what it is told when there is none."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest

from flashmoe.tables import load_tables

if TYPE_CHECKING:
    from collections.abc import Callable

    Chooser = Callable[..., object]

GPUS = {gpu.name: 10 * gpu.compute_capability[0] + gpu.compute_capability[1] for gpu in load_tables().gpus}
OWN_TARGET = {
    "sm75": "sm_75",
    "sm80": "sm_80",
    "sm86": "sm_86",
    "sm89": "sm_89",
    "sm90": "sm_90a",
    "sm100": "sm_100a",
    "sm120": "sm_120a",
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_gpu_gets_its_own_machine_code_and_best_family(choose: Chooser, gpu: str, causal: bool) -> None:
    tables = load_tables()
    for head_dim, bf16 in product((8, 64, 72, 128, 136, 256), (False, True)):
        if bf16 and not tables.gpu(gpu).bf16:
            continue
        choice = choose(GPUS[gpu], head_dim=head_dim, causal=causal, bf16=bf16)
        assert choice.target == OWN_TARGET[gpu]
        assert f"_{tables.gpu(gpu).families[0]}_{'bf16' if bf16 else 'f16'}_" in choice.symbol
        assert choice.symbol.endswith("_causal" if causal else "_full")
        held = int(choice.symbol.split("_d")[1].split("_")[0])
        assert held == min(size for size in (64, 128, 256) if size >= head_dim)
        assert choice.splits == 1


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        (87, "sm_86"),
        (101, "compute_80"),
        (103, "compute_80"),
        (121, "compute_80"),
        (130, "compute_80"),
        (91, "compute_80"),
    ],
)
def test_gpu_that_the_table_lacks(choose: Chooser, capability: int, target: str) -> None:
    """Older machine code of the same major version, else PTX; arch-specific code never."""
    choice = choose(capability)
    assert choice.target == target
    assert "_sm80_" in choice.symbol


def test_bf16_below_8_0(choose: Chooser) -> None:
    with pytest.raises(
        Exception, match=r"flashmoe:dtype: BF16 needs compute capability 8\.0; this is 7\.5; use float16"
    ):
        choose(75, bf16=True)


def test_no_kernel_for_this_gpu(choose_of_hopper_build: Chooser) -> None:
    text = (
        r"flashmoe:gpu: no kernel for a GPU \(compute capability 8\.0\) in this build, which holds sm_90a; rebuild with"
    )
    with pytest.raises(Exception, match=text):
        choose_of_hopper_build(80)
    with pytest.raises(Exception, match=r"flashmoe:gpu: .*compute capability 10\.0"):
        choose_of_hopper_build(100)


def test_cpu_only_build_says_so(choose_of_cpu_build: Chooser) -> None:
    with pytest.raises(Exception, match=r"flashmoe:gpu: .*holds none \(a CPU-only build\)"):
        choose_of_cpu_build(90)


@pytest.mark.parametrize("family", load_tables().gpu("sm90").families)
def test_forced_family(choose: Chooser, family: str) -> None:
    for seq in (32, 4096):
        assert f"_{family}_" in choose(90, forced=family, seq_q=seq, seq_k=seq, batch=1, heads=8).symbol


def test_forced_family_that_does_not_exist(choose: Chooser) -> None:
    with pytest.raises(Exception, match=r"flashmoe:argument: FLASHMOE_KERNEL=sm70 names no kernel family"):
        choose(90, forced="sm70")


def test_forced_family_that_does_not_run_here(choose: Chooser) -> None:
    with pytest.raises(
        Exception, match=r"flashmoe:argument: FLASHMOE_KERNEL=sm90: this family has no kernel for float16"
    ):
        choose(80, forced="sm90")
    with pytest.raises(Exception, match=r"FLASHMOE_KERNEL=sm75: this family has no kernel for bfloat16"):
        choose(90, forced="sm75", bf16=True)


def test_few_query_tiles_get_small_ones(choose: Chooser) -> None:
    """The older family's 64-row kernel starts sooner; with more keys, or more tiles than fit at once, it is behind."""
    assert "_m64_" in choose(90, head_dim=64, batch=1, heads=8, seq_q=128, seq_k=128).symbol
    assert "_m64_" not in choose(90, head_dim=64, batch=64, heads=8, seq_q=128, seq_k=128).symbol
    assert "_sm80_f16_d128_m64_" in choose(90, head_dim=128, batch=1, heads=8, seq_q=128, seq_k=128).symbol
    for head_dim, seq in ((64, 2048), (128, 512), (256, 128)):
        choice = choose(90, head_dim=head_dim, batch=1, heads=8, seq_q=seq, seq_k=seq)
        assert "_sm90_" in choice.symbol, (head_dim, seq, choice)
    assert "_m64_" in choose(80, head_dim=128, batch=1, heads=8, seq_q=512, seq_k=512).symbol


def test_decode_splits_the_keys(choose: Chooser) -> None:
    """B=1, 8 key heads, one row block each: 8 tiles for 132 multiprocessors."""
    for gpu in (80, 90):
        choice = choose(gpu, batch=1, heads=8, seq_q=4, seq_k=8192)
        assert "_split_" in choice.symbol
        assert choice.splits == 16, gpu
        assert choose(gpu, batch=1, heads=8, seq_q=4, seq_k=512).splits == 1
        assert choose(gpu, batch=64, heads=8, seq_q=4, seq_k=8192).splits == 1


@pytest.mark.parametrize(
    ("head_dim", "batch", "heads", "seq_q", "seq_k", "splits"),
    [
        (128, 1, 16, 512, 8192, 2),  # 64 tiles: two shares fill 128 of 132 multiprocessors
        (128, 1, 16, 512, 32768, 2),
        (128, 1, 16, 256, 8192, 4),
        (128, 1, 16, 128, 8192, 8),
        (256, 1, 8, 512, 32768, 4),
        (128, 1, 16, 512, 1024, 1),  # the second pass would cost more than it saves
        (128, 2, 16, 512, 32768, 1),  # 128 tiles fill the machine
        (128, 32, 16, 512, 8192, 1),
        (64, 1, 1, 128, 1 << 20, 32),  # a lane of the combining warp each
    ],
)
def test_hopper_divides_keys_to_fill_the_machine(
    choose: Chooser, head_dim: int, batch: int, heads: int, seq_q: int, seq_k: int, splits: int
) -> None:
    for causal in (False, True):
        shape = {"batch": batch, "heads": heads, "seq_q": seq_q, "seq_k": seq_k}
        choice = choose(90, head_dim=head_dim, causal=causal, **shape)
        assert choice.splits == splits, choice
        assert "_sm90_" in choice.symbol
        assert ("_split_" in choice.symbol) == (splits > 1)


def test_short_causal_rows_get_narrow_blocks(choose: Chooser) -> None:
    assert "_n64_" in choose(90, head_dim=128, causal=True, batch=32, heads=16, seq_q=512, seq_k=512).symbol
    assert "_n64_" not in choose(90, head_dim=128, causal=False, batch=32, heads=16, seq_q=512, seq_k=512).symbol
    assert "_n64_" not in choose(90, head_dim=128, causal=True, batch=4, heads=16, seq_q=4096, seq_k=4096).symbol
    assert "_n64_" not in choose(90, head_dim=128, causal=True, batch=1, heads=8, seq_q=1024, seq_k=1024).symbol


def test_every_choice_is_a_kernel_of_the_table(choose: Chooser) -> None:
    symbols = {symbol for unit in load_tables().units() for _, symbol in unit.entries}
    sizes = ((1, 1), (1, 100_000), (65, 65), (4096, 4096))
    for gpu, (seq_q, seq_k), batch, causal in product(GPUS, sizes, (1, 4, 1000), (False, True)):
        choice = choose(GPUS[gpu], seq_q=seq_q, seq_k=seq_k, batch=batch, causal=causal)
        assert choice.symbol in symbols
        assert 1 <= choice.splits <= 32
