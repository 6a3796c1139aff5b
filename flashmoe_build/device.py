"""Device code: each translation unit through NVRTC, cached by content, checked against the kernel table's limits."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError
from flashmoe.progress import Progress
from flashmoe.tables import Tables, Unit
from flashmoe_build.cache import Cache, content_key, include_closure
from flashmoe_build.codegen import unit_source
from flashmoe_build.jobs import run_all
from flashmoe_build.resources import findings, parse_log, summary
from flashmoe_build.toolchain import Toolchain

UNIT_TIME_LIMIT = 600  # seconds


@dataclass(frozen=True)
class CompiledUnit:
    """One finished device binary and what its compilation cost and said."""

    unit: Unit
    output: bytes
    sha256: str
    log: str
    seconds: float
    peak_bytes: int
    cached: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.unit.name,
            "target": self.unit.target.name,
            "seconds": round(self.seconds, 3),
            "peak_bytes": self.peak_bytes,
            "cached": self.cached,
            "size": len(self.output),
            "sha256": self.sha256,
            "kernels": summary(parse_log(self.log)),
        }


def options_for(unit: Unit) -> list[str]:
    """NVRTC options; no line information (it embeds paths), no fast-math (wrappers name the approximations)."""
    arch = unit.target.name
    resources = (
        []
        if unit.target.is_ptx
        else ["--ptxas-options=-v", "--ptxas-options=-warn-spills", "--ptxas-options=-warn-lmem-usage"]
    )
    return ["--std=c++17", f"--gpu-architecture={arch}", "-default-device", *resources]


def compile_units(
    units: Sequence[Unit], *, root: Path, toolchain: Toolchain, cache: Cache, jobs: int, tables: Tables
) -> list[CompiledUnit]:
    """Compile all units; raises BuildError with every finding of the first unit that fails."""
    with Progress("device code", len(units)) as progress:

        def work(unit: Unit) -> CompiledUnit:
            done = compile_unit(unit, root=root, toolchain=toolchain, cache=cache)
            problems = findings(unit, done.log, tables)
            if problems:
                lines = "\n".join(f"  {problem.kind}: {problem.text}" for problem in problems)
                msg = (
                    f"{unit.binary_name} must not be built like this:\n{lines}\n"
                    "change the kernel or its tile, or allow it in csrc/kernels.toml with a reason"
                )
                raise BuildError(msg)
            progress.advance(f"{unit.binary_name} {'cached' if done.cached else f'{done.seconds:.1f}s'}")
            return done

        return run_all(units, work, jobs)


def compile_unit(unit: Unit, *, root: Path, toolchain: Toolchain, cache: Cache) -> CompiledUnit:
    source = unit_source(unit)
    options = options_for(unit)
    csrc = root / "csrc"
    key = content_key(
        source,
        include_closure(source, [csrc]),
        csrc,
        {
            "options": options,
            "nvrtc": toolchain.nvrtc_sha256,
            "headers": toolchain.cuda_headers_version,
            "name": unit.name,
        },
    )
    suffix = Path(unit.binary_name).suffix
    known = cache.load(key, suffix)
    if known is not None:
        output, facts = known
        return CompiledUnit(
            unit, output, facts["sha256"], facts["log"], facts["seconds"], facts["peak_bytes"], cached=True
        )
    answer = _run_worker(unit, source, options, csrc, toolchain)
    output = base64.b64decode(answer["output"])
    facts = {name: answer[name] for name in ("log", "seconds", "peak_bytes")}
    cache.store(key, suffix, output, facts)
    stored = cache.load(key, suffix)
    if stored is None:
        msg = f"{unit.binary_name} could not be kept in the cache; is the disk full?"
        raise BuildError(msg)
    return CompiledUnit(
        unit, output, stored[1]["sha256"], facts["log"], facts["seconds"], facts["peak_bytes"], cached=False
    )


def _run_worker(unit: Unit, source: str, options: list[str], csrc: Path, toolchain: Toolchain) -> dict[str, Any]:
    job = {
        "library": str(toolchain.nvrtc_library),
        "source": source,
        "name": f"{unit.name}.cu",
        "options": [*options, f"--include-path={csrc}", f"--include-path={toolchain.cuda_include}"],
    }
    command = [sys.executable, "-S", "-E", str(Path(__file__).with_name("nvrtc_worker.py"))]
    try:
        run = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=UNIT_TIME_LIMIT, check=False
        )
    except subprocess.TimeoutExpired as error:
        msg = f"{unit.binary_name}: NVRTC did not finish within {UNIT_TIME_LIMIT} s"
        raise BuildError(msg) from error
    if run.returncode != 0:
        msg = f"{unit.binary_name}: the NVRTC process ended with {run.returncode}: {run.stderr.strip()[-2000:]}"
        raise BuildError(msg)
    answer: dict[str, Any] = json.loads(run.stdout)
    if answer["status"] != "ok":
        msg = f"{unit.binary_name}: {answer['status']}\n{answer['log'].strip()}"
        raise BuildError(msg)
    return answer
