"""The assembler: PTX to machine code for one GPU architecture, with ptxas."""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe.errors import BuildError
from flashmoe_build.compile.jobs import device_compiler_environment
from flashmoe_build.compile.toolchain import TIME_LIMIT, Toolchain

# Log each kernel's resources, and warn of each spill and each use of local memory.
OPTIONS = ("-v", "-warn-spills", "-warn-lmem-usage")


@dataclass(frozen=True)
class Assembled:
    """A cubin, ptxas's log, and what the assembly cost."""

    cubin: bytes
    log: str
    seconds: float
    peak_bytes: int


def assemble(ptx: bytes, name: str, target: str, toolchain: Toolchain) -> Assembled:
    """``ptx`` as a cubin for ``target`` (``sm_90a``). Raises BuildError with ptxas's message."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashmoe-ptxas-") as folder:
        given, made = Path(folder) / "unit.ptx", Path(folder) / "unit.cubin"
        given.write_bytes(ptx)
        command = [str(toolchain.ptxas), *OPTIONS, f"-arch={target}", str(given), "-o", str(made)]
        status, log, peak = _run(command, folder)
        log = log.replace(folder + os.sep, "")
        if status != 0:
            ended = f"did not finish within {TIME_LIMIT} s" if status < 0 else f"ended with {status}"
            msg = f"{name}: ptxas for {target} {ended}\n{log.strip()[-4000:]}"
            raise BuildError(msg)
        return Assembled(made.read_bytes(), log, time.monotonic() - started, peak)


def _run(command: Sequence[str], folder: str) -> tuple[int, str, int]:
    """(exit status, output, peak resident bytes); a process that takes too long is killed."""
    with tempfile.TemporaryFile(dir=folder) as log:
        process = subprocess.Popen(
            command, env=device_compiler_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        watch = threading.Timer(TIME_LIMIT, process.kill)
        watch.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)  # subprocess reports no usage per child
        finally:
            watch.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        return process.returncode, log.read().decode(errors="replace"), usage.ru_maxrss * 1024
