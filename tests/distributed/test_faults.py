"""Over NCCL, too, a rank that ends, stalls or disagrees causes an error that names it on every other rank, in time and never a hang."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from distributed.faults import CASES, SLEEP, TIMEOUT
from tests.forked_python import SAFE_PATH

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).parent / "faults.py"
LIMIT = 60  # seconds, for all cases together, with two ranks
ENDED = r"rank 1 has ended or is stopped: its heartbeat does not change"
SIZES = (2, 4, 8)
FAULTY = {"killed_first": 0}  # the failing rank; 1 in the other cases
KILLED = {case for case in CASES if case.startswith("killed")}
# The message on each other rank, and on the failing one if it is alive.
SAID = {
    **dict.fromkeys(KILLED, ENDED),
    "killed_first": r"rank 0(, which holds it,)? has ended or is stopped",
    "stalled": r"rank 1 is stuck elsewhere: it runs, but has begun \d+ exchanges",
    "shape": r"rank 1 calls .* with q \[1, 2, 96, 64\]",
    "shapes": r"disagree: q is .* on rank 1",
}
OWN = {"stalled": "rank 1 is stuck elsewhere", "shape": SAID["shape"], "shapes": r"disagree: q is .* on rank 0"}


@dataclass
class Ended:
    code: int | None  # None: it had to be killed
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.err[-3000:]}"


def _port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module", params=SIZES)
def ended(request: pytest.FixtureRequest) -> dict[str, list[Ended]]:
    """Runs all cases at once: most of the time is waiting."""
    size = request.param
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA GPUs")
    begun = time.monotonic()
    started = {}
    for case in CASES:
        command = [sys.executable, *SAFE_PATH, str(PROGRAM), case]
        port = _port()
        started[case] = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(size)
        ]
    found: dict[str, list[Ended]] = {}
    for case, processes in started.items():
        found[case] = []
        for process in processes:
            try:
                said = process.communicate(timeout=max(0.1, LIMIT * size / 2 - (time.monotonic() - begun)))
                found[case].append(Ended(process.returncode, *said))
            except subprocess.TimeoutExpired:
                process.kill()
                found[case].append(Ended(None, *process.communicate()))
    return found


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_rank_that_is_left_names_the_one_that_failed(case: str, ended: dict[str, list[Ended]]) -> None:
    every, faulty = "\n".join(map(str, ended[case])), FAULTY.get(case, 1)
    for rank, one in enumerate(ended[case]):
        if case in KILLED and rank == faulty:
            assert one.code == -signal.SIGKILL, every
            continue
        assert one.code == 0, every
        said = json.loads(one.out)
        assert re.search(OWN[case] if rank == faulty else SAID[case], said["error"]), every
        assert said["seconds"] < (SLEEP + 2 if case == "stalled" and rank == faulty else TIMEOUT + 1), every
