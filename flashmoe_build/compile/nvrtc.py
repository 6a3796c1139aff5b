"""The front end: compiles a translation unit to PTX for a virtual architecture with NVRTC, in a separate process."""

import marshal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError
from flashmoe_build.compile.cache import Cache, content_key, include_closure
from flashmoe_build.compile.jobs import device_compiler_environment
from flashmoe_build.compile.toolchain import TIME_LIMIT, Toolchain


@dataclass(frozen=True)
class Ptx:
    """PTX, NVRTC's log, and what the compilation cost."""

    text: bytes
    sha256: str
    log: str
    seconds: float
    peak_bytes: int
    cached: bool


def options_for(virtual: str) -> list[str]:
    """NVRTC's options; no line information (it embeds paths), no fast-math (wrappers name the approximations)."""
    return ["--std=c++17", f"--gpu-architecture={virtual}", "-default-device"]


def compile_ptx(source: str, name: str, virtual: str, *, csrc: Path, toolchain: Toolchain, cache: Cache) -> Ptx:
    """The PTX of ``source``, from the cache if none of its inputs has changed. Raises BuildError."""
    options = options_for(virtual)
    key = content_key(
        source,
        include_closure(source, [csrc]),
        csrc,
        {"options": options, "nvrtc": toolchain.nvrtc_sha256, "headers": toolchain.cuda_headers_version, "name": name},
    )
    includes = [f"--include-path={csrc}", f"--include-path={toolchain.cuda_include}"]
    text, facts, cached = cache.get(key, ".ptx", lambda: _run_worker(source, name, [*options, *includes], toolchain))
    return Ptx(text, facts["sha256"], facts["log"], facts["seconds"], facts["peak_bytes"], cached)


def _run_worker(source: str, name: str, options: Sequence[str], toolchain: Toolchain) -> tuple[bytes, dict[str, Any]]:
    job = {"library": str(toolchain.nvrtc_library), "source": source, "name": f"{name}.cu", "options": list(options)}
    command = [sys.executable, "-S", "-E", str(Path(__file__).with_name("nvrtc_worker.py"))]
    try:
        run = subprocess.run(
            command,
            input=marshal.dumps(job),
            env=device_compiler_environment(),
            capture_output=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        msg = f"{name}: NVRTC did not finish within {TIME_LIMIT} s"
        raise BuildError(msg) from error
    if run.returncode != 0:
        msg = f"{name}: the NVRTC process ended with {run.returncode}: {run.stderr.decode(errors='replace').strip()[-2000:]}"
        raise BuildError(msg)
    answer = marshal.loads(run.stdout)
    if answer["status"] != "ok":
        msg = f"{name}: {answer['status']}\n{answer['log'].strip()}"
        raise BuildError(msg)
    return answer["output"].encode("ascii"), {key: answer[key] for key in ("log", "seconds", "peak_bytes")}
