"""Profiles one launch with Nsight Compute, after warm-up. The GPU's clocks are not changed."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from flashmoe.errors import DriverError
from flashmoe_tools.profile.metrics import Launch, metric_names, parse_csv
from flashmoe_tools.profile.target import WARM_UP_CALLS

KERNEL_FILTER = "regex:^flashmoe_"
TIME_LIMIT_SECONDS = 240.0
UNKNOWN_METRIC = re.compile(r'==ERROR== .*[Mm]etrics? "?([A-Za-z0-9_.:*]+)')
FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")


def find_ncu(named: str | None = None) -> str | None:
    """Path of Nsight Compute's command line, on PATH or where its installers put it."""
    return shutil.which(named or "ncu", path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))


def ncu_command(ncu: str, key: str, metrics: Sequence[str]) -> list[str]:
    """Profiles every flashmoe kernel that :mod:`flashmoe_tools.profile.target` launches, warm-up calls included."""
    return [
        ncu,
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--clock-control", "none"),
        *("--kernel-name", KERNEL_FILTER),
        *("--metrics", ",".join(metrics)),
        *(sys.executable, "-m", "flashmoe_tools.profile.target", key),
    ]


def collect(ncu: str, key: str) -> tuple[Launch, ...]:
    """The launches of the last call. Raises DriverError with the profiler's message if it could not read the counters.

    A metric that this profiler does not know is left out and the run repeated.
    """
    metrics = metric_names()
    while True:
        output = _run(ncu_command(ncu, key, metrics))
        unknown = [name for name in UNKNOWN_METRIC.findall(output) if name in metrics]
        if not unknown:
            return last_call(parse_csv(output))
        metrics = [name for name in metrics if name not in unknown]


def last_call(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """The launches of the call after warm-up.

    All calls launch the same kernels, so these are the last of WARM_UP_CALLS + 1 equal groups.
    """
    return tuple(launches[-max(1, len(launches) // (WARM_UP_CALLS + 1)) :])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        msg = f"Nsight Compute did not end within {TIME_LIMIT_SECONDS:.0f} s"
        raise DriverError(msg) from error
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        msg = (
            "the driver lets only administrators read GPU counters; load it with NVreg_RestrictProfilingToAdminUsers=0"
        )
        raise DriverError(msg)
    if done.returncode != 0 and not UNKNOWN_METRIC.search(output):
        words = [line for line in output.splitlines() if "==ERROR==" in line or "Error" in line]
        msg = f"Nsight Compute ended with {done.returncode}: {words[-1] if words else output[-300:].strip()}"
        raise DriverError(msg)
    return output if done.returncode != 0 else done.stdout
