"""Collects the facts without importing torch. Each lookup is cheap, except the probe, which has a time limit."""

import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path

import flashmoe
from flashmoe._version import __version__
from flashmoe.variables import PREFIX
from flashmoe_tools.doctor.driver import read_driver
from flashmoe_tools.doctor.facts import Compiler, Extension, Facts, Lock, Package, Probe, Python
from flashmoe_tools.doctor.links import read_links
from flashmoe_tools.doctor.shadow import find_shadows

PACKAGE = Path(flashmoe.__file__).resolve().parent
LIBRARY = "libflashmoe.so"
LIBRARY_VARIABLE = "FLASHMOE_LIBRARY"
DEFAULT_PROBE_TIMEOUT_S = 60.0
# Variables that other builds need; ours are in flashmoe/variables.py.
FOREIGN_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "TORCH_CUDA_ARCH_LIST")
# The path to import from is passed explicitly, because with -c Python puts the current folder first, and PYTHONPATH may
# add more.
PROBE = "import sys; sys.path[:] = sys.argv[2:]; from flashmoe_tools.doctor import probe; sys.exit(probe.main(sys.argv[1] == '1'))"


def collect(environ: Mapping[str, str], probe_timeout_s: float = DEFAULT_PROBE_TIMEOUT_S) -> Facts:
    """All facts; the probe and the slower lookups run concurrently."""
    checkout = find_checkout()
    library = find_library(environ, checkout)
    torch = package("torch")
    with ThreadPoolExecutor(5) as pool:
        probing = pool.submit(run_probe, environ, library, bool(torch.versions) or has_module("torch"), probe_timeout_s)
        locking = pool.submit(lock_state, checkout)
        compiler = pool.submit(read_compiler, environ)
        driver = pool.submit(read_driver)
        links = pool.submit(read_links)
        return Facts(
            flashmoe=__version__,
            python=read_python(),
            torch=torch,
            torch_cuda=torch_cuda(),
            numpy=package("numpy"),
            driver=driver.result(),
            compiler=compiler.result(),
            lock=locking.result(),
            extension=read_extension(library, checkout),
            probe=probing.result(),
            variables={
                name: value
                for name, value in environ.items()
                if value and (name in FOREIGN_VARIABLES or name.startswith(PREFIX))
            },
            links=links.result(),
            shadows=find_shadows(),
            nvcc=shutil.which("nvcc", path=environ.get("PATH")) is not None,
        )


def read_python() -> Python:
    libc, version = platform.libc_ver()
    return Python(
        version=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        implementation=sys.implementation.name,
        machine=platform.machine(),
        system=platform.system(),
        glibc=version if libc == "glibc" else "",
    )


def package(name: str) -> Package:
    """Every installed version of a distribution, in path order."""
    found = dict.fromkeys((str(item.locate_file("")), item.version) for item in metadata.distributions(name=name))
    return Package(tuple(version for _, version in found))


def has_module(name: str) -> bool:
    """Whether this interpreter would find a module, which need not belong to an installed distribution."""
    try:
        return util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def torch_cuda() -> str:
    """The CUDA version that torch was built with, read from its version file because importing torch takes seconds."""
    try:
        spec = util.find_spec("torch")
    except (ImportError, ValueError):
        return ""
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def read_compiler(environ: Mapping[str, str]) -> Compiler:
    command = environ.get("CXX") or "g++"
    found = shutil.which(command, path=environ.get("PATH"))
    if found is None:
        return Compiler(command)
    try:
        done = subprocess.run([found, "-dumpfullversion"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Compiler(command)
    version = done.stdout.strip()
    return Compiler(command, version if re.fullmatch(r"\d+(\.\d+)*", version) else "")


def find_checkout() -> Path | None:
    """The clone that contains this package or the locked environment that runs it; None outside of one."""
    candidates = [PACKAGE.parent]
    prefix = Path(sys.prefix)
    if prefix.parent.name == "env" and prefix.parent.parent.name == ".nox":
        candidates.append(prefix.parents[2])
    for folder in candidates:
        if (folder / "lockfiles" / "build.txt").is_file() and (folder / "flashmoe_build").is_dir():
            return folder
    return None


def lock_state(checkout: Path | None) -> Lock:
    if checkout is None:
        return Lock(checkout=False)
    prefix = Path(sys.prefix).resolve()
    if prefix.parent != checkout / ".nox" / "env":
        return Lock(checkout=True)
    name = prefix.name.rsplit("-", 1)[0]
    command = [sys.executable, "-m", "flashmoe_build.environments.lock", f"lockfiles/{name}.txt"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Lock(checkout=True, name=name, problem=f"the check did not end: {error}")
    problem = "" if done.returncode == 0 else done.stderr.strip().removeprefix("LockError: ")
    return Lock(checkout=True, name=name, problem=problem)


def find_library(environ: Mapping[str, str], checkout: Path | None) -> Path | None:
    """The extension that would be loaded: the variable's, the package's, or the one built in the checkout."""
    if environ.get(LIBRARY_VARIABLE):
        return Path(environ[LIBRARY_VARIABLE])
    candidates = [PACKAGE / LIBRARY]
    if checkout is not None and checkout == PACKAGE.parent:
        candidates.append(checkout / "build" / "lib" / LIBRARY)
    return next((path for path in candidates if path.is_file()), None)


def read_extension(library: Path | None, checkout: Path | None) -> Extension:
    if library is None:
        return Extension(found=False)
    if not library.is_file():
        return Extension(found=False, shown=str(library), error="no such file")
    base = PACKAGE.parent if library.is_relative_to(PACKAGE.parent) else checkout
    shown = str(library.relative_to(base)) if base is not None and library.is_relative_to(base) else str(library)
    stated = (
        library.parent / "provenance.json" if library.parent == PACKAGE else library.parent.parent / "provenance.json"
    )
    try:
        with library.open("rb") as stream:
            damaged = stream.read(4) != b"\x7fELF"
    except OSError as error:
        return Extension(found=False, shown=shown, error=str(error.strerror))
    if damaged:
        return Extension(found=True, shown=shown, damaged=True)
    try:
        targets = tuple(json.loads(stated.read_text(encoding="utf-8"))["targets"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Extension(found=True, shown=shown, error=f"{stated.name}: {type(error).__name__}")
    return Extension(found=True, shown=shown, targets=targets)


def run_probe(environ: Mapping[str, str], library: Path | None, has_torch: bool, timeout_s: float) -> Probe:
    """Imports torch, loads the extension and runs small problems in a separate process, because it may crash or hang.

    The process uses this interpreter's import path in the same order, so whatever shadows torch here shadows it there.
    """
    if not has_torch:
        return Probe()
    # With spinning threads a few tiny problems would take seconds on a busy machine.
    inner = {"OMP_WAIT_POLICY": "passive", **environ, **({LIBRARY_VARIABLE: str(library)} if library else {})}
    path = list(dict.fromkeys([*filter(None, sys.path), str(PACKAGE.parent)]))
    clock = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, "1" if library else "0", *path],
            env=inner,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = bytes(error.stdout or b"").decode(errors="replace")  # bytes, even with text=True
        probe = parse_probe(1, output, f"no answer within {timeout_s:.0f} s", time.monotonic() - clock)
        return replace(probe, timed_out=True)
    except OSError as error:
        return Probe(ran=True, problem=str(error), seconds=time.monotonic() - clock)
    return parse_probe(done.returncode, done.stdout, done.stderr, time.monotonic() - clock)


def parse_probe(status: int, stdout: str, stderr: str, seconds: float) -> Probe:
    """The facts from the JSON lines that the probe printed before it ended."""
    values: dict[str, object] = {}
    for line in stdout.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            values |= entry
    if status != 0 and not values.get("torch") and not values.get("problem"):
        tail = (stderr.strip().splitlines() or [""])[-1]
        values["problem"] = f"{f'ended by signal {-status}' if status < 0 else f'exit status {status}'}: {tail}".rstrip(
            ": "
        )
    elif status != 0 and values.get("torch") and not values.get("load_error"):
        tail = (stderr.strip().splitlines() or [""])[-1]
        ending = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
        values["smoke" if values.get("loaded") else "load_error"] = f"{ending}: {tail}".rstrip(": ")
        values["smoke_ok"] = False
    targets = values.get("targets", ())
    return Probe(
        ran=True,
        problem=str(values.get("problem", "")),
        loaded=bool(values.get("loaded")),
        load_error=str(values.get("load_error", "")),
        torch_version=str(values.get("torch", "")),
        torch_cuda=str(values.get("cuda", "")),
        smoke=str(values.get("smoke", "")),
        smoke_ok=bool(values.get("smoke_ok")),
        smoke_raised=bool(values.get("smoke_raised")),
        targets=tuple(map(str, targets)) if isinstance(targets, list) else (),
        seconds=round(seconds, 2),
        nccl=str(values.get("nccl", "")),
    )
