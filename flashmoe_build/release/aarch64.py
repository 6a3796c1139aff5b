"""``nox -s test_aarch64``: the CPU tests of the AArch64 wheel, on an AArch64 machine or under qemu-user on another.

Under emulation the interpreter and its libraries are Debian packages for arm64, which debootstrap checks and unpacks into
build/aarch64/root. A script starts the interpreter there, and programs that tests start use the same script. Compilers
that tests call run natively and target AArch64. It needs root (debootstrap) and takes 15 to 40 times as long as native tests, so
SLOW is skipped: training of a small model, and square problems of 512 rows and more.
"""

import argparse
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from flashmoe.errors import BuildError
from flashmoe_build.containers.base import bootstrap
from flashmoe_build.environments.environment import Interpreter, find_python, install_wheel, prepare
from flashmoe_build.program import ROOT, OutOfReachError, ending

MACHINE = "aarch64"
FOLDER = ROOT / "build" / MACHINE
PYTHON = (3, 11)  # the version in the base distribution
PACKAGES = ("python3", "libstdc++6")
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
# Complete files: every kernel of the CPU backend against its reference, the operators' arguments and
# errors, and the emulator, whose thread switching is assembly for each machine.
QUICK = (
    "tests/cpu/test_forward.py", "tests/cpu/test_backward.py", "tests/cpu/test_isa.py", "tests/moe/test_cpu.py",
    "tests/attention/test_checks.py", "tests/emulation/test_machine.py",
)  # fmt: skip
# Kernels first: their library is compiled while the process has a single thread, which qemu can fork.
FULL = (
    "tests/cpu", "tests/moe", "tests/attention/test_checks.py", "tests/attention/test_varlen.py",
    "tests/emulation/test_machine.py", "tests/emulation/test_numerics.py", "tests/attention/test_correctness.py",
)  # fmt: skip

# Under emulation these take minutes per case; shorter cases cover the same loops and tails of the kernels.
SLOW = " and ".join(f"not {name}" for name in (
    "learns", "S512", "k512", "1023", "1024", "2048", "every_length", "beyond_two",
))  # fmt: skip


def emulated_python() -> Interpreter:
    """An AArch64 interpreter that runs here. Raises OutOfReachError if this machine lacks what it needs."""
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    compiler = shutil.which(f"{MACHINE}-linux-gnu-g++")
    if emulator is None or compiler is None:
        msg = "qemu-user or the cross compiler is missing; apt-get install qemu-user-static g++-aarch64-linux-gnu"
        raise OutOfReachError(msg)
    system = FOLDER / "root"
    inner = system / "usr" / "bin" / f"python{PYTHON[0]}.{PYTHON[1]}"
    if not inner.is_file():
        shutil.rmtree(system, ignore_errors=True)
        bootstrap(system, packages=PACKAGES, arch="arm64")
    script = FOLDER / "python"
    script.write_text(f'#!/bin/sh\nexec {emulator} -L "{system}" -0 "$0" "{inner}" "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return Interpreter(str(script), PYTHON, MACHINE)


def newest_wheel(folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        msg = f"{folder.relative_to(ROOT)} contains no wheel; ./nox -s build -- --platform {MACHINE}"
        raise BuildError(msg)
    return wheels[-1]


def test(arguments: Sequence[str]) -> int:
    """Runs pytest with the given arguments, or on the files of FULL or QUICK; returns its exit status."""
    emulated = platform.machine() != MACHINE
    given = os.environ.get("FLASHMOE_WHEEL")
    wheel = Path(given).resolve() if given else newest_wheel(ROOT / "dist" / (MACHINE if emulated else ""))
    python = prepare("test", python=emulated_python() if emulated else find_python())
    install_wheel(python, wheel)
    files = arguments or [str(ROOT / name) for name in FULL]
    # Write bytecode once, because compiling it is slow under emulation. Time limits are for tests that hang.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"FLASHMOE_TEST_INSTALLED": "1", "OMP_WAIT_POLICY": "passive"}
    environ |= {"FLASHMOE_TEST_REPORT": str(ROOT / "build" / "reports" / "test_aarch64.json")}
    command = [str(python), "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    if emulated:
        environ["CXX"] = f"{MACHINE}-linux-gnu-g++"
        command += ["-o", "timeout=1800", *(() if arguments else ("-k", SLOW))]
    outside = ROOT / "build" / "run" / "test_aarch64"
    outside.mkdir(parents=True, exist_ok=True)
    return subprocess.run([*command, "-m", "not slow", *files], cwd=outside, env=environ, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="nox -s test_aarch64 --", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="a third of the tests: eleven minutes on an idle core under emulation"
    )
    options, rest = parser.parse_known_args(arguments)
    files = [*rest, *(str(ROOT / name) for name in QUICK if options.quick)]
    return ending(lambda: test(files), "no test ran")


if __name__ == "__main__":
    raise SystemExit(main())
