"""``python -m flashmoe_build.sanitize``: CPU tests on a library whose host code and CPU backend are built with AddressSanitizer and UBSan.

The first bad access or undefined operation ends the tests and is reported. ``--sample`` runs a few files of each folder.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flashmoe_build.compile.toolchain import find_toolchain

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "sanitized"
SAMPLE = (
    *(
        "tests/attention/test_values.py",
        "tests/attention/test_varlen_arguments.py",
        "tests/attention/test_varlen_numbers.py",
        "tests/attention/test_layout.py",
    ),
    *("tests/moe/test_routing.py", "tests/moe/test_errors.py", "tests/moe/test_mxfp4.py", "tests/linear"),
)
SECONDS = "1200"  # per test: sanitized code and its compiler are several times slower
WHOLE = ("tests/cpu", "tests/attention", "tests/moe", "tests/linear", "tests/mla")


def runtimes(compiler: str) -> str:
    """The sanitizers' libraries, which must be loaded before everything else."""
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return ":".join(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="./nox -s sanitize --", description=__doc__)
    parser.add_argument("--sample", action="store_true", help="a few files of each folder: minutes instead of an hour")
    parser.add_argument("tests", nargs="*", help="pytest arguments, instead of the CPU tests")
    arguments = parser.parse_args(argv)
    cache = os.environ.get("FLASHMOE_CACHE_DIR") or str(OUT / "cache")  # tests/cpu compiles the backend
    sanitized = {**os.environ, "FLASHMOE_SANITIZE": "address,undefined", "FLASHMOE_CACHE_DIR": cache}
    build = [sys.executable, "-m", "flashmoe_build", "--archs", "none", "--library-only", "--out", str(OUT)]
    done = subprocess.run(build, cwd=ROOT, env=sanitized, check=False)
    if done.returncode:
        return done.returncode
    environment = {
        **sanitized,
        "FLASHMOE_LIBRARY": str(OUT / "lib" / "libflashmoe.so"),
        "LD_PRELOAD": runtimes(str(find_toolchain().cxx)),
        # Python frees little at exit; torch defines some of its symbols more than once.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(ROOT),
    }
    tests = arguments.tests or (SAMPLE if arguments.sample else WHOLE)
    # Otherwise the sanitizer's message before it ends the process would be lost in pytest's buffer.
    options = ["-n", "0", "-q", "-x", "--capture=sys", "--timeout", SECONDS, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
