"""Device code: translation unit -> PTX (NVRTC) -> machine code (ptxas), cached by content, checked against the table.

Targets that share a virtual architecture and a tile share their PTX, as do f16 and bf16 (elements.py), so that the optimiser, half
of a compilation's work, runs once for all of them. Cubins are keyed by the hash of their PTX: an edit that does not change the PTX reassembles nothing.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError
from flashmoe_build.compile import nvrtc, ptxas
from flashmoe_build.compile.cache import Cache, content_key
from flashmoe_build.compile.codegen import unit_source
from flashmoe_build.compile.elements import front_end, with_dtype
from flashmoe_build.compile.jobs import run_staged
from flashmoe_build.compile.nvrtc import Ptx
from flashmoe_build.compile.resources import findings, parse_log, summary
from flashmoe_build.compile.toolchain import Toolchain
from flashmoe_tools.progress import Progress
from flashmoe_tools.tables import Tables, Unit


@dataclass(frozen=True)
class CompiledUnit:
    """One finished device binary, with the cost and the log of its last step (for a PTX target, NVRTC)."""

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


@dataclass(frozen=True)
class DeviceCode:
    """Every unit's binary, in the requested order, and the PTX that they were made from."""

    units: tuple[CompiledUnit, ...]
    ptx: tuple[Ptx, ...]

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the largest compiler process, including those whose outputs came from the cache."""
        return max([*(item.peak_bytes for item in self.units), *(item.peak_bytes for item in self.ptx)], default=0)

    @property
    def fresh_seconds(self) -> float:
        """Process seconds spent on outputs that were not in the cache."""
        machine_code = (item for item in self.units if not item.unit.target.is_ptx and not item.cached)
        return sum(item.seconds for item in machine_code) + sum(item.seconds for item in self.ptx if not item.cached)


def compile_units(
    units: Sequence[Unit], *, root: Path, toolchain: Toolchain, cache: Cache, jobs: int, tables: Tables
) -> DeviceCode:
    """Compile all units; raises BuildError with every finding of the first unit that fails."""
    sources: dict[tuple[str, str], list[Unit]] = {}  # by (source, virtual architecture)
    for unit in units:
        sources.setdefault((unit_source(front_end(unit)), unit.virtual), []).append(unit)

    with Progress("device code", len(units) + len(sources)) as progress:

        def to_ptx(key: tuple[str, str]) -> Ptx:
            unit = sources[key][0]
            ptx = compile_front_end(unit, root=root, toolchain=toolchain, cache=cache)
            name = f"{front_end(unit).name}.{unit.virtual}"
            progress.advance(f"{name} {'cached' if ptx.cached else f'{ptx.seconds:.1f}s'}")
            return ptx

        def to_binary(unit: Unit, ptx: Ptx) -> CompiledUnit:
            done = finish_unit(unit, ptx, toolchain=toolchain, cache=cache)
            _check(done, tables)
            progress.advance(f"{unit.binary_name} {'cached' if done.cached else f'{done.seconds:.1f}s'}")
            return done

        ptx, compiled = run_staged(sources, to_ptx, to_binary, jobs)
    by_unit = {item.unit.binary_name: item for item in compiled}
    return DeviceCode(tuple(by_unit[unit.binary_name] for unit in units), tuple(ptx))


def _check(done: CompiledUnit, tables: Tables) -> None:
    problems = findings(done.unit, done.log, tables)
    if problems:
        lines = "\n".join(f"  {problem.kind}: {problem.text}" for problem in problems)
        msg = (
            f"{done.unit.binary_name} must not be built like this:\n{lines}\n"
            f"change the kernel or its tile, or allow it in {done.unit.row.source}, with a reason"
        )
        raise BuildError(msg)


def compile_front_end(unit: Unit, *, root: Path, toolchain: Toolchain, cache: Cache) -> Ptx:
    """The PTX that the unit is made from, shared by both 16-bit types if the unit allows it."""
    front = front_end(unit)
    try:
        return nvrtc.compile_ptx(
            unit_source(front), front.name, front.virtual, csrc=root / "csrc", toolchain=toolchain, cache=cache
        )
    except BuildError as error:
        reasons = dict.fromkeys(re.findall(r'static assertion failed with "([^"]+)"', str(error)))
        why = "".join(f"\n  {reason}" for reason in reasons)
        row = unit.row
        tile = ", ".join(f"{name} {value}" for name, value in zip(row.descriptor.tile, row.tile, strict=True))
        msg = f"{error}\n{row.source} ({tile}, warps {row.warps}) does not compile for {unit.target.name}{':' if why else ''}{why}"
        raise BuildError(msg) from error


def compile_unit(unit: Unit, *, root: Path, toolchain: Toolchain, cache: Cache) -> CompiledUnit:
    """Compiles a single unit."""
    ptx = compile_front_end(unit, root=root, toolchain=toolchain, cache=cache)
    return finish_unit(unit, ptx, toolchain=toolchain, cache=cache)


def finish_unit(unit: Unit, ptx: Ptx, *, toolchain: Toolchain, cache: Cache) -> CompiledUnit:
    """The unit's binary from ``compile_front_end``'s PTX: for a PTX target the PTX of its type, else the cubin that ptxas makes of it."""
    text = with_dtype(ptx.text, unit.dtype, unit.virtual)
    digest = hashlib.sha256(text).hexdigest()
    if unit.target.is_ptx:
        return CompiledUnit(unit, text, digest, ptx.log, ptx.seconds, ptx.peak_bytes, ptx.cached)
    target = unit.target.name
    depends_on = {"ptx": digest, "ptxas": toolchain.ptxas_sha256, "options": ptxas.OPTIONS, "target": target}
    key = content_key("", (), cache.folder, depends_on)

    def assembled() -> tuple[bytes, dict[str, Any]]:
        made = ptxas.assemble(text, unit.name, target, toolchain)
        return made.cubin, {"log": made.log, "seconds": made.seconds, "peak_bytes": made.peak_bytes}

    output, log, cached = cache.get(key, ".cubin", assembled)
    return CompiledUnit(unit, output, log["sha256"], ptx.log + log["log"], log["seconds"], log["peak_bytes"], cached)
