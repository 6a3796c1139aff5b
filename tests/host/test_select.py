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
    assert "_m64_" in choose(90, head_dim=64, batch=1, heads=8, seq_q=128, seq_k=128).symbol
    assert "_m64_" not in choose(90, head_dim=64, batch=64, heads=8, seq_q=128, seq_k=128).symbol


def test_decode_splits_the_keys(choose: Chooser) -> None:
    """B=1, 8 key heads, one row block each: 8 tiles for 132 multiprocessors."""
    choice = choose(90, batch=1, heads=8, seq_q=4, seq_k=8192)
    assert "_split_" in choice.symbol
    assert choice.splits == 16
    assert choose(90, batch=1, heads=8, seq_q=4, seq_k=512).splits == 1
    assert choose(90, batch=64, heads=8, seq_q=4, seq_k=8192).splits == 1


def test_every_choice_is_a_kernel_of_the_table(choose: Chooser) -> None:
    symbols = {symbol for unit in load_tables().units() for _, symbol in unit.entries}
    sizes = ((1, 1), (1, 100_000), (65, 65), (4096, 4096))
    for gpu, (seq_q, seq_k), batch, causal in product(GPUS, sizes, (1, 4, 1000), (False, True)):
        choice = choose(GPUS[gpu], seq_q=seq_q, seq_k=seq_k, batch=batch, causal=causal)
        assert choice.symbol in symbols
        assert 1 <= choice.splits <= 32
