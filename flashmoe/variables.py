"""The environment variables that flashmoe reads: the table shown by ``doctor`` and the documentation, and the check at import."""

from __future__ import annotations

import difflib
import platform
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from flashmoe.errors import ArgumentError

PREFIX = "FLASHMOE_"
CPU_ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx") if platform.machine() == "x86_64" else ("neon",)


class Variable(NamedTuple):
    """``values``: all supported values, empty for free text. ``when``: "run", "build" (in a checkout) or "test"."""

    name: str
    when: str
    meaning: str
    values: tuple[str, ...] = ()


_TABLE = (
    Variable("FLASHMOE_FALLBACK", "run", "what a call that goes to torch does", ("allow", "warn", "error")),
    Variable("FLASHMOE_KERNEL", "run", "use only kernels of this family", ("sm75", "sm80", "sm90")),
    Variable("FLASHMOE_CONSISTENT", "run", "1: attention is batch-invariant", ("0", "1")),
    Variable(
        "FLASHMOE_SPLIT_BACKWARD",
        "run",
        "1: gradients without float32 sums of `dq`, and of shared masks without up to 1 GiB of the scores', on compute capability 9.0: less memory",
        ("0", "1"),
    ),
    Variable("FLASHMOE_CPU_ISA", "run", "instruction set of the CPU kernels, read at the first call", CPU_ISAS),
    Variable(
        "FLASHMOE_CHECK_VALUES",
        "run",
        "1: check lengths, page numbers (on the CPU always) and expert ids; on a GPU each call then waits for it",
        ("0", "1"),
    ),
    Variable("FLASHMOE_CHECK_LENGTHS", "run", "former name of FLASHMOE_CHECK_VALUES", ("0", "1")),
    Variable(
        "FLASHMOE_VLLM_EXPERTS",
        "run",
        "1: vLLM's experts of 16 bits, fp8 and mxfp4 run on flashmoe (experimental)",
        ("0", "1"),
    ),
    Variable("FLASHMOE_LIBRARY", "run", "load this extension instead of the wheel's own"),
    Variable("FLASHMOE_ARCHS", "build", "targets: all, native, none, or a list such as 90a,80 (FA_ARCHS: the same)"),
    Variable("FLASHMOE_PLATFORM", "build", "machine that the host code is for", ("x86_64", "aarch64")),
    Variable("FLASHMOE_CACHE_DIR", "build", "folder of compiled units; default: build/cache"),
    Variable("FLASHMOE_PYTHON", "build", "interpreter for ./nox, a version or a path"),
    Variable("FLASHMOE_WHEEL", "build", "wheel that ./nox -s test installs instead of building one"),
    Variable("FLASHMOE_INSTALL_TIMEOUT_S", "build", "seconds that installing an environment may take; default: 1800"),
    Variable("FLASHMOE_DEBIAN_MIRROR", "build", "Debian archive of ./nox -s base_image"),
    Variable("FLASHMOE_DOCKER_NETWORK", "build", "network of image builds"),
    Variable("FLASHMOE_SANITIZE", "build", "sanitizers of the host code, as address,undefined"),
    Variable("FLASHMOE_REQUIRE_GPU", "test", "1: a test run without a GPU test fails", ("0", "1")),
    Variable("FLASHMOE_TEST_INSTALLED", "test", "1: test the installed package, set by ./nox -s test", ("0", "1")),
    Variable(
        "FLASHMOE_DRAW",
        "test",
        "a text: a quarter of the cases of large tests and of the tools' test files run, drawn by it; of two images one is built",
    ),
    Variable("FLASHMOE_ENGINE_SOURCES", "test", "folder of vLLM's sources that its tests use, build/engines"),
    Variable("FLASHMOE_TEST_REPORT", "test", "file for the report of a test run"),
    Variable("FLASHMOE_TEST_HEARTBEAT_S", "test", "seconds between lines of a silent test run"),
    Variable("FLASHMOE_EMULATION_ASAN", "test", "set by ./nox -s emulate for the process with AddressSanitizer"),
)
VARIABLES: Mapping[str, Variable] = {variable.name: variable for variable in _TABLE}


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise ArgumentError for an unsupported value of a variable; warn about a name that looks like a misspelt variable of ours.

    Whether the CPU has the instruction set in FLASHMOE_CPU_ISA is only known at the first call.
    """
    for name in environ:
        if not name.startswith(PREFIX):
            continue
        known = VARIABLES.get(name)
        if known is None:
            if meant := similar(name):
                warnings.warn(
                    f"flashmoe has no variable {name}, so it has no effect; did you mean {meant}?", stacklevel=3
                )
        elif known.when == "run" and name != "FLASHMOE_CPU_ISA" and not is_possible(known, environ[name]):
            msg = f"{name} is {environ[name]!r}; supported: {', '.join(known.values)}; correct it, or unset it"
            raise ArgumentError(msg)


def is_possible(variable: Variable, value: str) -> bool:
    """Whether the variable may have this value; an empty value counts as unset."""
    return not value or not variable.values or value in variable.values


def similar(name: str) -> str | None:
    """The variable that ``name`` was probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(name, VARIABLES, 1, 0.8)), None)
