"""Several processes compared with one: attention of a sharded sequence, sharded experts, DTensor, failing ranks. Over gloo, and over NCCL
if there are two GPUs. Each group is started once for all of its jobs."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flashmoe.distributed import ExpertParallel, context_parallel_attention
from flashmoe.errors import ArgumentTypeError, DistributedError
from tests.forked_python import SAFE_PATH

PROGRAM = Path(__file__).parent / "jobs.py"
LIMIT = 300  # seconds
BOTH = [
    "attention",
    "ragged",
    "experts",
    "experts_e4m3",
    "uneven_tokens",
    "dtensor",
    "exchanges",
    "dtensor_caches",
    "dtensor_layer",
    "models",
    "torch_context",
    "ring_flash_attention",
]
GROUPS = {
    "two": (2, "cpu", [*BOTH, "suite", "disagreement", "stalled", "absence"]),
    "four": (4, "cpu", ["attention", "ragged", "experts", "killed"]),
    "eight": (8, "cpu", ["attention", "ragged", "experts_e4m3", "disagreement", "stalled", "absence", "killed"]),
    "two-gpus": (2, "cuda", BOTH),
    "four-gpus": (4, "cuda", ["attention", "ragged", "experts", "experts_e4m3", "dtensor"]),
    "eight-gpus": (8, "cuda", ["attention", "ragged", "experts", "experts_e4m3", "dtensor"]),
}
LARGE = "eight"  # takes two minutes on two busy processors, most of it to start
HAS_PROCESSORS = (os.cpu_count() or 1) >= GROUPS[LARGE][0]
PEER = "ring_flash_attention"  # its package is in no lock file
HAS_PEER = importlib.util.find_spec("ring_flash_attn") is not None


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def _run(group: str, folder: Path) -> None:
    size, device, jobs = GROUPS[group]
    jobs = [job for job in jobs if job != PEER or HAS_PEER]
    command = [sys.executable, *SAFE_PATH, str(PROGRAM), str(size), str(folder), device, *jobs]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as group_of_ranks:
        try:
            codes, said = group_of_ranks.communicate(timeout=LIMIT)
        except BaseException:
            os.killpg(group_of_ranks.pid, signal.SIGKILL)  # including the ranks
            raise
    expected = [-signal.SIGKILL if "killed" in jobs and rank == 1 else 0 for rank in range(size)]
    assert json.loads(codes.splitlines()[-1] if codes else "[]") == expected, said


def _cases() -> list[object]:
    return [
        pytest.param(group, job, marks=_marks(group, job)) for group, (_, _, jobs) in GROUPS.items() for job in jobs
    ]


def _marks(group: str, job: str) -> list[pytest.MarkDecorator]:
    marks = (
        (pytest.mark.gpu, GROUPS[group][1] == "cuda"),
        (pytest.mark.slow, group == LARGE),
        (pytest.mark.skipif(not HAS_PROCESSORS, reason="needs eight processors"), group == LARGE),
        (pytest.mark.skipif(not HAS_PEER, reason="the package ring-flash-attn is not installed"), job == PEER),
    )
    return [mark for mark, is_wanted in marks if is_wanted]


@pytest.mark.parametrize(("group", "job"), _cases())
def test_every_rank_finds_what_one_process_finds(
    group: str, job: str, finished: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    size, device, _ = GROUPS[group]
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA GPUs")
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
    """Other values that count as true are rejected, because the ranks might agree on them."""
    for padded in (1, None, "no"):
        with pytest.raises(ArgumentTypeError, match="padded must be True or False"):
            ExpertParallel(padded=padded)  # type: ignore[arg-type]
