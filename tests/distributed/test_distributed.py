"""Several processes against one: attention of a divided sequence, divided experts, DTensor, ranks that fail. Over gloo, and over NCCL
where there are two GPUs. A group is started once for all of its jobs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flashmoe.distributed import ExpertParallel, context_parallel_attention
from flashmoe.errors import ArgumentTypeError, DistributedError

PROGRAM = Path(__file__).parent / "jobs.py"
LIMIT = 300  # seconds
BOTH = [
    "attention",
    "ragged",
    "experts",
    "uneven_tokens",
    "dtensor",
    "dtensor_caches",
    "dtensor_layer",
    "models",
    "torch_context",
]
GROUPS = {
    "two": (2, "cpu", [*BOTH, "suite", "disagreement", "stalled", "absence"]),
    "four": (4, "cpu", ["attention", "ragged", "experts", "killed"]),
    "two-gpus": (2, "cuda", BOTH),
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def _run(group: str, folder: Path) -> None:
    size, device, jobs = GROUPS[group]
    command = [sys.executable, "-P", str(PROGRAM)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder), device, *jobs], stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    expected = [-signal.SIGKILL if "killed" in jobs and rank == 1 else 0 for rank in range(size)]
    assert [process.returncode for process in processes] == expected, "\n".join(said)


def _cases() -> list[object]:
    return [
        pytest.param(group, job, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for group, (_, device, jobs) in GROUPS.items()
        for job in jobs
    ]


@pytest.mark.parametrize(("group", "job"), _cases())
def test_every_rank_finds_what_one_process_finds(
    group: str, job: str, finished: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    size, device, _ = GROUPS[group]
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip("needs two CUDA GPUs")
    if group not in finished:
        finished[group] = tmp_path_factory.mktemp(group)
        _run(group, finished[group])
    said = [(finished[group] / f"{job}-{rank}.txt").read_text(encoding="utf-8") for rank in range(size)]
    assert not any(said), "\n".join(said)


def test_without_torch_distributed_the_error_says_so() -> None:
    q = torch.randn(1, 2, 8, 64)
    assert not dist.is_initialized()
    with pytest.raises(DistributedError, match="init_process_group"):
        context_parallel_attention(q, q, q)


def test_a_flag_is_true_or_false() -> None:
    """Not whatever counts as true, on which the ranks would agree."""
    for padded in (1, None, "no"):
        with pytest.raises(ArgumentTypeError, match="padded must be True or False"):
            ExpertParallel(padded=padded)  # type: ignore[arg-type]
