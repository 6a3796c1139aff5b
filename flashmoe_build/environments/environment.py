"""Locked environments: one folder per lock file and Python, reused while neither changes.

    python -m flashmoe_build.environments.environment build      # prints the path of the interpreter inside

Everything is installed by ``uv pip install --require-hashes --only-binary :all:``: only files that the lock names, and no
source distribution, whose code would run. uv hard-links from its cache, so another environment takes a second and almost
no disk space.
"""

import argparse
import json
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from flashmoe._version import DISTRIBUTION
from flashmoe.errors import FlashmoeError, LockError, explain_os_error
from flashmoe_build.environments.exclusive import exclusive
from flashmoe_build.environments.lock import read_lock, verify_environment
from flashmoe_tools.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = ((3, 12), (3, 11), (3, 10))  # numpy<2 has no wheel for later ones
MACHINES = ("x86_64", "aarch64")
PYTHON_VARIABLE = "FLASHMOE_PYTHON"
TIMEOUT_VARIABLE = "FLASHMOE_INSTALL_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 1800.0
STAMP = "flashmoe-environment.json"
# Variables for uv that would change what is installed or disable the hash check.
EXCLUDED_VARIABLES = (
    "UV_NO_VERIFY_HASHES",
    "UV_CONSTRAINT",
    "UV_OVERRIDE",
    "UV_EXCLUDE",
    "UV_NO_BINARY",
    "UV_TARGET",
    "UV_PREFIX",
)
# Tests and benchmarks start processes that import torch, which takes about twice as long without bytecode. Only what they import is compiled,
# a quarter of the 13,000 files.
BENCH = ("torch", "scipy.stats", "matplotlib.figure", "jinja2", "rich.console")
IMPORTED = {
    "bench": BENCH,
    "test": (*BENCH, "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "transformers.trainer", "pytest", "hypothesis"),
}  # fmt: skip
IMPORT_EACH = """
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
"""
PROBE = (
    "import platform, sys, sysconfig; "
    "print(platform.python_implementation(), platform.python_version(), sysconfig.get_platform())"
)
# What uv's message means for a lock: (pattern, what to do); the first match applies.
ADVICE = (
    (
        re.compile(r"Hash mismatch"),
        "Either the lock was edited (`git diff lockfiles/`) or the file is not the one that was locked: do not install it.",
    ),
    (re.compile(r"must have a hash|pinned with `==`|no trusted hash"), "Run `nox -s lock` to rewrite the lock."),
    (
        re.compile(r"No space left on device|os error 28|Disk quota exceeded"),
        "The disk is full: a locked environment takes up to 7 GB, which UV_CACHE_DIR moves if it is on the same file system.",
    ),
    (re.compile(""), "If this is a network error, check the package index that pip and uv are configured for."),
)


@dataclass(frozen=True)
class Interpreter:
    """A Python for a locked environment."""

    path: str
    version: tuple[int, int]
    machine: str = field(default_factory=platform.machine)  # if not this machine's, it runs under emulation

    @property
    def label(self) -> str:
        foreign = "" if self.machine == platform.machine() else f"-{self.machine}"
        return f"{self.version[0]}.{self.version[1]}{foreign}"


def judge_python(answer: str) -> tuple[tuple[int, int] | None, str]:
    """The (major, minor) of an interpreter from the output of :data:`PROBE`, or None with the reason."""
    words = answer.split()
    if len(words) != 3:
        return None, "did not run"
    implementation, version, system = words
    found = f"{implementation} {version} for {system}"
    major, minor = (int(part) for part in version.split(".")[:2])
    is_ours = implementation == "CPython" and system.removeprefix("linux-") in MACHINES
    usable = is_ours and (major, minor) in SUPPORTED
    return ((major, minor) if usable else None), found


def probe_python(path: str) -> str:
    try:
        done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def python_candidates(choice: str, environ: Mapping[str, str], own: str) -> Iterator[str]:
    """Interpreters to try, best first. ``choice`` is a version, a command or a path; empty for any."""
    if choice and not re.fullmatch(r"3\.\d+", choice):
        yield choice
        return
    versions = [choice] if choice else [f"{major}.{minor}" for major, minor in SUPPORTED]
    if not choice:
        yield own
    for version in versions:
        found = shutil.which(f"python{version}", path=environ.get("PATH"))
        if found:
            yield found
    found = shutil.which("python3", path=environ.get("PATH"))
    if found:
        yield found
    home = Path(environ.get("HOME", "/nonexistent"))
    pyenv = Path(environ.get("PYENV_ROOT", home / ".pyenv")) / "versions"
    managed = Path(environ.get("XDG_DATA_HOME", home / ".local/share")) / "uv/python"
    for version in versions:
        yield from sorted(str(path) for path in pyenv.glob(f"{version}.*/bin/python3"))
        yield from sorted(str(path) for path in managed.glob(f"cpython-{version}.*/bin/python3"))


def choose_python(choice: str, candidates: Iterator[str], probe: Callable[[str], str] = probe_python) -> Interpreter:
    """The first usable candidate. Raises LockError listing everything that was tried."""
    rejected = []
    for path in candidates:
        answer = probe(path)
        version, found = judge_python(answer)
        if version is not None and (not re.fullmatch(r"3\.\d+", choice) or f"{version[0]}.{version[1]}" == choice):
            return Interpreter(path, version, answer.rpartition("linux-")[2])
        rejected.append(f"  - {path}: {found}")
    required = f"{PYTHON_VARIABLE}={choice}" if choice else "CPython 3.10, 3.11 or 3.12 for Linux x86-64 or AArch64"
    listed = "\n".join(rejected) or "  - nothing named python3, python3.12, python3.11 or python3.10 on PATH"
    msg = (
        f"no Python for the locked environment: wanted {required} (numpy<2 has no wheels for later ones). Looked at:\n{listed}\n"
        f"Install one (`uv python install 3.12` needs no root; Debian: apt-get install python3), or name one: {PYTHON_VARIABLE}=/path/to/python3.12"
    )
    raise LockError(msg)


def find_python(environ: Mapping[str, str] | None = None) -> Interpreter:
    environ = os.environ if environ is None else environ
    choice = environ.get(PYTHON_VARIABLE, "").strip()
    own = str(getattr(sys, "_base_executable", None) or sys.executable)
    return choose_python(choice, python_candidates(choice, environ, own))


def find_uv() -> str:
    """uv next to the running interpreter (the launcher's), else on PATH."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        msg = "uv is not installed; `./nox` brings its own, or install it: python3 -m pip install uv"
        raise LockError(msg)
    return found


def explain_failure(stderr: str, lock: str) -> str:
    """The end of uv's message, and advice."""
    tail = "\n".join(stderr.strip().splitlines()[-15:])
    advice = next(words for pattern, words in ADVICE if pattern.search(stderr))
    return f"installing {lock} failed:\n{tail}\n{advice}"


def uv_environment(environ: Mapping[str, str], fallback: Path = ROOT / ".nox" / "uv-cache") -> dict[str, str]:
    """The caller's variables for uv, with a cache in the checkout if the home folder is not writable.

    That happens in a container whose user has no home.
    """
    kept = {key: value for key, value in environ.items() if key not in EXCLUDED_VARIABLES}
    if kept.get("UV_CACHE_DIR") or kept.get("UV_NO_CACHE"):
        return kept
    folder = Path(kept.get("XDG_CACHE_HOME") or Path(kept.get("HOME") or _home_of_this_user()) / ".cache")
    there = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        kept["UV_CACHE_DIR"] = str(fallback)
    return kept


def _home_of_this_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a user id without a name
        return "/nonexistent"


def run_logged(command: Sequence[str], what: str, timeout_s: float) -> tuple[int, str]:
    """Run ``command`` with a progress line; returns its exit status and its stderr. 124 on a timeout."""
    environ = uv_environment(os.environ)
    lines: list[str] = []
    with (
        Progress(what) as progress,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ
        ) as process,
    ):
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(timeout_s, stop)
        timer.daemon = True
        timer.start()
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            progress.note(line.strip())
        status = process.wait()
        timer.cancel()
    if expired.is_set():
        lines.append(f"stopped after {timeout_s:.0f} s; {TIMEOUT_VARIABLE} sets another limit\n")
        status = 124
    return status, "".join(lines)


def install_limit(environ: Mapping[str, str]) -> float:
    """Time limit of an install in seconds. Raises LockError for an invalid setting."""
    text = environ.get(TIMEOUT_VARIABLE) or str(DEFAULT_TIMEOUT_S)
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0.0 < limit <= threading.TIMEOUT_MAX:
        msg = f"{TIMEOUT_VARIABLE}={text!r} is not a time; write a number of seconds above 0"
        raise LockError(msg)
    return limit


def uv_install(python: Path, requirements: Path, *, what: str, shown: str, extra: Sequence[str] = ()) -> None:
    """``uv pip install --require-hashes`` of a requirement file. Raises LockError naming the package at fault."""
    command = [find_uv(), "pip", "install", "--python", str(python), "--require-hashes", "--only-binary", ":all:"]
    command += ["--link-mode", "hardlink", *extra, "-r", str(requirements)]
    status, stderr = run_logged(command, what, install_limit(os.environ))
    if status:
        raise LockError(explain_failure(stderr, shown))


def environment_folder(root: Path, lock: str, python: Interpreter) -> Path:
    return root / ".nox" / "env" / f"{lock}-{python.label}"


def verify(lock: Path, folder: Path, python: str, machine: str) -> None:
    """Raise LockError unless the environment in ``folder`` holds the locked packages, each once, and nothing else."""
    site = folder / "lib" / f"python{'.'.join(python.split('.')[:2])}" / "site-packages"
    try:
        verify_environment(lock, path=[str(site)], python=python, machine=machine)
    except LockError as error:
        msg = f"{error}\nThe environment is {folder}"
        raise LockError(msg) from error


def prepare(lock: str, *, root: Path = ROOT, python: Interpreter | None = None, extra: Sequence[str] = ()) -> Path:
    """The interpreter of the environment of ``lockfiles/<lock>.txt``, created if it does not exist."""
    try:
        return _prepare(lock, root, python, extra)
    except OSError as error:
        reason = explain_os_error(error)
        if reason is None:
            raise
        msg = f"cannot make the environment of lockfiles/{lock}.txt: {reason}"
        raise LockError(msg) from error


def _prepare(lock: str, root: Path, python: Interpreter | None, extra: Sequence[str]) -> Path:
    python = python if python is not None else find_python()
    lock_file = root / "lockfiles" / f"{lock}.txt"
    if not lock_file.is_file():
        known = ", ".join(sorted(path.stem for path in lock_file.parent.glob("*.txt")))
        msg = f"no lock {lock!r}; lockfiles/ has {known or 'none'}"
        raise LockError(msg)
    folder = environment_folder(root, lock, python)
    stamp = {
        "lock": sha256(lock_file.read_bytes()).hexdigest(),
        "python": probe_python(python.path),
        "folder": str(folder),
    }
    inner = folder / "bin" / "python"
    with exclusive(folder.with_name(f"{folder.name}.lock")):
        if _read_stamp(folder / STAMP) != stamp:
            _create(folder, python)
            uv_install(
                inner, lock_file, what=f"installing lockfiles/{lock}.txt", shown=f"lockfiles/{lock}.txt", extra=extra
            )
            if python.machine == platform.machine():  # under emulation it would take half an hour
                write_bytecode(inner, lock, os.environ)
            (folder / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        verify(lock_file, folder, stamp["python"].split()[1], python.machine)
    return inner


def foreign_torch(machine: str, root: Path = ROOT) -> Path:
    """A folder with the locked torch for another machine: a cross build uses its headers and links with it, and never runs it."""
    (pin,) = {pin for pin in read_lock(root / "lockfiles" / "build.txt") if pin.name == "torch"}
    folder = root / ".nox" / "env" / f"torch-{machine}"
    stamp, requirement = folder / STAMP, folder.with_suffix(".txt")
    stated = f"torch=={pin.version} {' '.join(f'--hash={digest}' for digest in pin.hashes)}\n"
    with exclusive(folder.with_name(f"{folder.name}.lock")):
        if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == stated):
            shutil.rmtree(folder, ignore_errors=True)
            requirement.write_text(stated, encoding="utf-8")
            extra = ["--no-deps", "--target", str(folder), "--python-platform", f"{machine}-manylinux_2_28"]
            uv_install(Path(sys.executable), requirement, what=f"torch for {machine}", shown="build.txt", extra=extra)
            stamp.write_text(stated, encoding="utf-8")
            requirement.unlink()
    return folder


def write_bytecode(python: Path, lock: str, environ: Mapping[str, str]) -> None:
    """Compile bytecode even if Python is configured not to write it (-I overrides that setting)."""
    if not (lock in IMPORTED and environ.get("PYTHONDONTWRITEBYTECODE")):
        return
    command = [str(python), "-I", "-c", IMPORT_EACH, *IMPORTED[lock]]
    with Progress(f"bytecode of lockfiles/{lock}.txt"):
        subprocess.run(command, capture_output=True, check=False, timeout=DEFAULT_TIMEOUT_S)


def _read_stamp(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _create(folder: Path, python: Interpreter) -> None:
    command = [find_uv(), "venv", "--quiet", "--clear", "--no-project", "--python", python.path, str(folder)]
    status, stderr = run_logged(command, f"making {folder.name}", 120.0)
    if status:
        msg = f"cannot make the environment {folder}:\n{stderr.strip()}"
        raise LockError(msg)


def remove_bytecode(folder: Path) -> None:
    """Delete the bytecode of the flashmoe that is about to be replaced.

    Files in a wheel carry the commit's time, so old bytecode would look current for an edited file of the same length.
    """
    for packages in folder.glob("lib/python*/site-packages"):
        for compiled in [*packages.glob("__pycache__/flashmoe*.pyc"), *packages.glob("flashmoe*/**/__pycache__/*.pyc")]:
            compiled.unlink(missing_ok=True)


def install_wheel(python: Path, wheel: Path) -> None:
    """Replace flashmoe in an environment by this wheel file, pinned by hash, without touching anything else."""
    digest = sha256(wheel.read_bytes()).hexdigest()
    folder = python.parent.parent
    requirement = folder / "flashmoe-wheel.txt"
    text = f"{DISTRIBUTION} @ {wheel.resolve().as_uri()} --hash=sha256:{digest}\n"
    with exclusive(folder.with_name(f"{folder.name}.lock")):
        if requirement.is_file() and requirement.read_text(encoding="utf-8") == text:
            return
        requirement.unlink(missing_ok=True)
        remove_bytecode(folder)
        pending = folder / "flashmoe-wheel.pending.txt"
        pending.write_text(text, encoding="utf-8")
        extra = ["--no-deps", "--no-index", "--reinstall-package", DISTRIBUTION]
        uv_install(python, pending, what=f"installing {wheel.name}", shown=wheel.name, extra=extra)
        pending.replace(requirement)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m flashmoe_build.environments.environment",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument("lock", help="build, test, lint, ...: the name of a lock file")
    parser.add_argument("--wheel", type=Path, help="also install this flashmoe wheel into it")
    options = parser.parse_args(arguments)
    try:
        python = prepare(options.lock)
        if options.wheel:
            install_wheel(python, options.wheel)
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(python)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
