"""Ranks that fail over NCCL, with one GPU each: run by test_faults.py, one process per rank.

    python faults.py CASE RANK SIZE PORT

Prints as JSON the error of the rank's main thread and the seconds since the fault.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashmoe.distributed import ExpertParallel, context_parallel_attention
from flashmoe.errors import DistributedError

TIMEOUT = 12  # seconds, of the process group
SLEEP = 14


_begun = time.monotonic()


def _now() -> None:
    """Starts the clock: before this are the start of NCCL and successful calls."""
    global _begun
    torch.cuda.synchronize()
    _begun = time.monotonic()


def _attention(rows: int = 64) -> None:
    q = torch.randn(1, 2, rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out: Any = context_parallel_attention(q, q, q)
    out.sum().backward()
    torch.cuda.synchronize()


def _experts(*, padded: bool = False) -> Callable[[], Any]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    x, w13, w2 = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((32, 64), (2, 64, 64), (2, 64, 32)))
    ids = torch.arange(64, dtype=torch.int32, device=device).view(32, 2) % (2 * dist.get_world_size())
    weights, layer = torch.ones(32, 2, device=device), ExpertParallel(padded=padded)
    return lambda: layer(x, w13, w2, weights, ids)


def _end(rank: int, who: int = 1) -> None:
    _now()
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)


def _killed(rank: int) -> None:
    """In the middle: two calls succeed, the third never comes."""
    _attention()
    _attention()
    _end(rank)
    _attention()


def _killed_first(rank: int) -> None:
    """The rank whose process holds the store."""
    _attention()
    _end(rank, 0)
    _attention()


def _killed_experts(rank: int) -> None:
    """The other rank waits for message sizes."""
    call = _experts()
    call()
    torch.cuda.synchronize()
    _end(rank)
    call()
    torch.cuda.synchronize()


def _killed_graph(rank: int) -> None:
    """The other rank replays a graph, which begins no new exchange."""
    call = _experts(padded=True)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    _end(rank)
    graph.replay()
    torch.cuda.synchronize()


def _stalled(rank: int) -> None:
    _attention()
    _now()
    if rank == 1:
        time.sleep(SLEEP)
    _attention()


def _shape(rank: int) -> None:
    """One rank calls with a new shape, the others do not."""
    _attention()
    _now()
    _attention(64 + 32 * (rank == 1))


def _shapes(rank: int) -> None:
    """All ranks call for the first time, with different shapes."""
    _now()
    _attention(64 + 32 * (rank == 1))


CASES = {
    "killed": _killed,
    "killed_first": _killed_first,
    "killed_experts": _killed_experts,
    "killed_graph": _killed_graph,
    "stalled": _stalled,
    "shape": _shape,
    "shapes": _shapes,
}


def main(case: str, rank: int, size: int, port: int) -> None:
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
        device_id=torch.device("cuda", rank),
    )
    error = ""
    try:
        CASES[case](rank)
    except DistributedError as raised:
        error = str(raised)
    print(json.dumps({"error": error, "seconds": time.monotonic() - _begun}), flush=True)
    time.sleep(3)  # rank 0 holds the store: the other rank must be able to read the reason


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
