"""The whole build: tables -> device binaries -> library -> provenance and report."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError
from flashmoe_build.compile.archs import requested, resolve
from flashmoe_build.compile.cache import Cache
from flashmoe_build.compile.device import DeviceCode, compile_units
from flashmoe_build.compile.host import build_library
from flashmoe_build.compile.jobs import MEMORY_PER_JOB, job_count
from flashmoe_build.compile.toolchain import PINNED_DISTRIBUTIONS, Toolchain, chosen_platform, find_toolchain
from flashmoe_build.environments.exclusive import hold_until_exit
from flashmoe_build.environments.lock import verify_environment
from flashmoe_build.release.provenance import provenance
from flashmoe_tools import sbom
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now, write_json, write_report
from flashmoe_tools.tables import Target, load_tables

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Built:
    """Paths of a build's outputs."""

    library: Path
    provenance: Path
    bill: Path  # of materials
    report: Path


def build(out: Path, *, archs: str | None = None, root: Path = ROOT) -> Built:
    """Build libflashmoe.so under ``out``; raises BuildError, TableError or LockError with the reason."""
    started, clock = utc_now(), time.monotonic()
    tables = load_tables(root / "csrc")
    targets = resolve(requested(os.environ, archs), tables)
    units = tuple(tables.units(tuple(target.name for target in targets)))
    for target in targets:
        if not any(unit.target is target for unit in units):
            msg = f"no kernels.toml has a kernel for {target.name}; add a row, or drop the target from FLASHMOE_ARCHS"
            raise BuildError(msg)
    jobs = job_count(os.environ)
    # Sessions compare the whole environment; `pip wheel .` and direct calls run in an environment that the user made.
    verify_environment(root / "lockfiles" / "build.txt", names=PINNED_DISTRIBUTIONS)
    toolchain = find_toolchain(chosen_platform(os.environ))
    _announce(targets, len(units), jobs, toolchain)
    out = out.resolve()
    hold_until_exit(out / "build.lock")
    cache = Cache(Path(os.environ.get("FLASHMOE_CACHE_DIR") or out / "cache"))
    # Report a folder that cannot be written before the first compilation.
    cache.path("00", "").parent.mkdir(parents=True, exist_ok=True)
    device = compile_units(units, root=root, toolchain=toolchain, cache=cache, jobs=jobs, tables=tables)
    device_seconds = time.monotonic() - clock
    library = build_library(
        device.units, root=root, out=out, toolchain=toolchain, cache=cache, jobs=jobs, tables=tables
    )
    names = [target.name for target in targets]
    stated = out / "provenance.json"
    record = provenance(device.units, root=root, library=library, toolchain=toolchain, targets=names)
    write_json(stated, record)
    write_json(out / sbom.NAME, sbom.bill(record))
    report = Report(
        kind="build",
        checks=_checks(device, library),
        data=_data(device, library, names, jobs, device_seconds, toolchain),
        environment=host_environment(),
        command=tuple(Path(word).name if os.sep in word else word for word in sys.argv),
        started=started,
        seconds=round(time.monotonic() - clock, 3),
    )
    path = out / "reports" / "build.json"
    write_report(path, report)
    print(_summary(report), flush=True)
    return Built(library, stated, out / sbom.NAME, path)


def _announce(targets: Sequence[Target], units: int, jobs: int, toolchain: Toolchain) -> None:
    names = " ".join(target.name for target in targets) or "none (CPU backend only)"
    print(f"targets  {names}")
    print(f"units    {units}")
    print(f"jobs     {jobs} at once, at most {MEMORY_PER_JOB / 1e9:.1f} GB each (MAX_JOBS changes it)")
    print(
        f"tools    NVRTC {toolchain.nvrtc_version}, ptxas {toolchain.ptxas_version}, g++ {toolchain.cxx_version} "
        f"for {toolchain.platform}, torch {toolchain.torch_version}",
        flush=True,
    )


def _checks(device: DeviceCode, library: Path) -> tuple[Check, ...]:
    peak = device.peak_bytes
    return (
        Check(
            "device code",
            Verdict.PASS if device.units else Verdict.SKIP,
            found=f"{len(device.units)} binaries",
            expected="no spill, no local memory, no warning",
        ),
        Check(
            "memory per job",
            Verdict.PASS if peak <= MEMORY_PER_JOB else Verdict.WARN,
            found=f"{peak / 1e9:.2f} GB",
            expected=f"at most {MEMORY_PER_JOB / 1e9:.1f} GB",
            next_step="lower MAX_JOBS",
        ),
        Check("library", Verdict.PASS, found=f"{library.name}, {library.stat().st_size / 1e6:.1f} MB"),
    )


def _data(
    device: DeviceCode, library: Path, targets: list[str], jobs: int, device_seconds: float, toolchain: Toolchain
) -> dict[str, Any]:
    return {
        "targets": targets,
        "jobs": jobs,
        "device_seconds": round(device_seconds, 3),
        "compile_seconds": round(device.fresh_seconds, 3),
        "cached_units": sum(item.cached for item in device.units),
        "ptx": len(device.ptx),
        "cached_ptx": sum(item.cached for item in device.ptx),
        "peak_bytes_per_job": device.peak_bytes,
        "library_bytes": library.stat().st_size,
        "versions": {
            "nvrtc": toolchain.nvrtc_version,
            "ptxas": toolchain.ptxas_version,
            "cuda_headers": toolchain.cuda_headers_version,
            "torch_headers": toolchain.torch_version,
            "cxx": toolchain.cxx_version,
            "platform": toolchain.platform,
        },
        "units": [item.to_json() for item in device.units],
    }


def _summary(report: Report) -> str:
    data = report.data
    fresh = len(data["units"]) - data["cached_units"]
    front = data["ptx"] - data["cached_ptx"]
    return (
        f"built    {len(data['units'])} device binaries ({fresh} assembled from {front} new PTX of {data['ptx']}, "
        f"{data['cached_units']} from the cache), "
        f"library {data['library_bytes'] / 1e6:.1f} MB, {report.seconds:.1f} s, "
        f"largest compiler process {data['peak_bytes_per_job'] / 1e9:.2f} GB"
    )
