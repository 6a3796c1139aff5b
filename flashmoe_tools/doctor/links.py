"""How the GPUs of this machine reach each other: peer access from the driver, topology from nvidia-smi. Without torch."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import permutations
from typing import Any

from flashmoe_tools.doctor.driver import LIBRARY, CudaError, check_status, read_number
from flashmoe_tools.doctor.facts import Links

TIME_LIMIT = 10.0  # seconds
Run = Callable[[list[str]], str]


def read_links(load: Callable[[str], Any] = ctypes.CDLL, run: Run | None = None) -> Links:
    """Never raises: failed queries are described in ``..._problem``. Empty if there are not two GPUs."""
    try:
        cuda = load(LIBRARY)
        check_status(cuda, cuda.cuInit(0))
        count = read_number(cuda, cuda.cuDeviceGetCount)
    except (OSError, CudaError, AttributeError):
        return Links()
    if count < 2:
        return Links()
    unreachable, peers_problem = _unreachable(cuda, count)
    topology, topology_problem = _topology(run or run_command, count)
    return Links(unreachable, peers_problem, topology, topology_problem)


def _unreachable(cuda: Any, count: int) -> tuple[tuple[tuple[int, int], ...], str]:
    try:
        devices = [read_number(cuda, cuda.cuDeviceGet, index) for index in range(count)]
        return tuple(
            (a, b)
            for a, b in permutations(range(count), 2)
            if not read_number(cuda, cuda.cuDeviceCanAccessPeer, devices[a], devices[b])
        ), ""
    except (CudaError, AttributeError) as error:
        return (), str(error)


def _topology(run: Run, count: int) -> tuple[tuple[tuple[str, ...], ...], str]:
    try:
        rows = parse_topology(run(["nvidia-smi", "topo", "-m"]))
    except (OSError, subprocess.SubprocessError) as error:
        return (), str(error)
    return (rows, "") if len(rows) == count else ((), f"nvidia-smi topo -m names {len(rows)} GPUs, the driver {count}")


def run_command(command: list[str]) -> str:
    found = shutil.which(command[0])
    if found is None:
        msg = f"no {command[0]}"
        raise FileNotFoundError(msg)
    done = subprocess.run([found, *command[1:]], capture_output=True, text=True, timeout=TIME_LIMIT, check=True)
    return done.stdout


def parse_topology(text: str) -> tuple[tuple[str, ...], ...]:
    """The matrix of ``nvidia-smi topo -m``: [i][j] is how GPU i reaches GPU j ("NV18", "PIX", "SYS"); "X" if i is j."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [
        line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s+(X|NV\d+|PIX|PXB|PHB|NODE|SYS)\b", line)
    ]
    return tuple(tuple(row[1 : 1 + len(rows)]) for row in rows)
