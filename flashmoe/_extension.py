"""The compiled extension: where it is, loading it once, and its small C interface.

``libflashmoe.so`` is loaded with ``torch.ops.load_library``: it is no Python module and is tied to no Python version.
It uses torch's stable C ABI, so one file serves every torch from ``MINIMUM_TORCH`` on.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from flashmoe.errors import ArgumentError, ExtensionError, TorchVersionError
from flashmoe.variables import CPU_ISAS as CPU_ISAS
from flashmoe.variables import check_variables

LIBRARY_NAME = "libflashmoe.so"
LIBRARY_VARIABLE = "FLASHMOE_LIBRARY"
CPU_ISA_VARIABLE = "FLASHMOE_CPU_ISA"
MINIMUM_TORCH = (2, 10)

_lock = threading.RLock()
_loaded: Path | None = None


def library_path() -> Path:
    """The extension that :func:`load` loads: ``$FLASHMOE_LIBRARY`` if set, else the file beside this module, else, in a checkout
    (an editable install), the result of its last build.

    Raises ExtensionError when there is no such file.
    """
    override = os.environ.get(LIBRARY_VARIABLE)
    if override:
        path = Path(override)
        if not path.is_file():
            msg = f"{LIBRARY_VARIABLE} is {override!r}, which is not a file; correct it, or unset it to use the wheel's own"
            raise ExtensionError(msg)
        return path.resolve()
    package = Path(__file__).resolve().parent
    path = package / LIBRARY_NAME
    if not path.is_file() and (package.parent / "flashmoe_build").is_dir():
        path = package.parent / "build" / "lib" / LIBRARY_NAME
    if not path.is_file():
        msg = (
            f"{LIBRARY_NAME} is not beside the package ({package}): this is a source tree that was not built, or a damaged "
            f"install. Build it with `./nox -s build`, or name a built library in {LIBRARY_VARIABLE}"
        )
        raise ExtensionError(msg)
    return path


def torch_version() -> str:
    """torch's version, from the imported module or from the installed metadata; does not import torch.

    Raises ExtensionError when torch is not installed.
    """
    module = sys.modules.get("torch")
    version = getattr(module, "__version__", None)
    if version is not None:
        return str(version)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        msg = f"flashmoe needs torch >= {_dotted(MINIMUM_TORCH)}; none is installed; `pip install torch` first"
        raise ExtensionError(msg) from None


def check_torch_version(version: str) -> None:
    """Raises TorchVersionError when ``version`` lacks the stable ABI that the extension was built for."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        msg = f"flashmoe needs torch >= {_dotted(MINIMUM_TORCH)}; cannot read the version {version!r}; reinstall torch"
        raise TorchVersionError(msg)
    if (int(match[1]), int(match[2])) < MINIMUM_TORCH:
        msg = (
            f"flashmoe needs torch >= {_dotted(MINIMUM_TORCH)}; found {version}; the stable C ABI that the extension uses "
            f"begins there. Upgrade with `pip install 'torch>={_dotted(MINIMUM_TORCH)}'`"
        )
        raise TorchVersionError(msg)


def require_torch() -> None:
    """Raises TorchVersionError or ExtensionError when the torch at hand cannot be used; imports nothing."""
    check_torch_version(torch_version())


def load() -> Path:
    """Load the extension and register its fake, autograd, autocast, vmap and flop-count rules. Idempotent and thread-safe.

    Returns the path that was loaded. Raises TorchVersionError (torch too old, decided before anything is loaded), ExtensionError
    (file missing, unreadable, built against something else, or not this extension) or ArgumentError (a FLASHMOE_* variable has
    an unsupported value).
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    with _lock:
        if _loaded is None:
            check_variables(os.environ)
            path = library_path()
            require_torch()
            _load_library(path)
            _register_operators(path)
            _loaded = path
    return _loaded


def _register_operators(path: Path) -> None:
    """Registers the rules in each operation's operators.py, after checking that the library at ``path`` defines the operators."""
    import torch

    from flashmoe.operator import find_operators, register  # these import torch

    operators = find_operators()
    for operator in operators:
        if not operator.schema and not hasattr(torch.ops.flashmoe, operator.name):
            msg = (
                f"{path.name} was loaded but registers no operator flashmoe::{operator.name}; it is not flashmoe's extension, or "
                f"is of another version. `python -m flashmoe audit {path.name}` says what it is"
            )
            raise ExtensionError(msg)
    register(operators)


def _load_library(path: Path) -> None:
    try:
        import torch
    except ImportError as error:
        msg = f"torch is installed but cannot be imported ({error}); reinstall it, then run `python -m flashmoe doctor`"
        raise ExtensionError(msg) from error
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        # Torch 2.10 wraps the loader's message in an error that only names the file
        reason = str(error.__cause__ or error)
        raise ExtensionError(explain_load_failure(path.name, reason, str(torch.__version__))) from error


# (pattern in the loader's message, cause, next step); the first that matches is used.
_LOAD_FAILURES = (
    (
        r"undefined symbol: (?P<what>\S+)",
        "it needs the symbol {what}, which no loaded library has (torch is {torch}): another torch, or an incomplete build",
        "`python -m flashmoe audit {name}` demangles it and names the cause",
    ),
    (
        r"version [`'](?P<what>(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found",
        "it needs {what}, which this system's C or C++ library is too old for",
        "install the manylinux_2_28 wheel, or build on this machine with `./nox -s build`",
    ),
    (
        r"(?P<what>lib\S+): cannot open shared object file",
        "it needs {what}, which is not there",
        "reinstall torch if the library is torch's; `python -m flashmoe doctor` lists what is found",
    ),
    (
        r"(?P<what>invalid ELF header|file too short|wrong ELF class\S*|cannot read file data)",
        "it is not a shared library for this machine ({what})",
        "reinstall the wheel; an interrupted download or a wrong architecture causes this",
    ),
    (
        r"(?P<what>Only a single TORCH_LIBRARY|multiple definitions|already registered)",
        "another copy of the extension is loaded in this process already",
        "start a new process; check that only one flashmoe is installed",
    ),
)


def explain_load_failure(name: str, text: str, torch_version: str) -> str:
    """What happened, why, and the next step, one sentence each, from the dynamic loader's message."""
    for pattern, cause, step in _LOAD_FAILURES:
        match = re.search(pattern, text)
        if match:
            facts = {"what": match["what"], "torch": torch_version, "name": name}
            return f"{name} cannot be loaded: {cause.format(**facts)}. Next: {step.format(**facts)}. ({text})"
    return f"{name} cannot be loaded: {text}. Next: `python -m flashmoe doctor`"


@lru_cache(maxsize=1)
def _c_interface() -> ctypes.CDLL:
    """The extension's ``extern "C"`` functions; the dynamic loader returns the library that load() has already loaded."""
    library = ctypes.CDLL(str(load()))
    signatures: dict[str, tuple[list[Any], Any]] = {
        "flashmoe_check": ([ctypes.c_char_p, ctypes.c_char_p], ctypes.c_char_p),
        "flashmoe_last_kernel": ([], ctypes.c_char_p),
        "flashmoe_index_json": ([], ctypes.c_char_p),
        "flashmoe_cpu_isa": ([], ctypes.c_char_p),
        "flashmoe_set_cpu_isa": ([ctypes.c_char_p], ctypes.c_int),
    }
    for name, (arguments, result) in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            msg = (
                f"{library_path().name} has no function {name}: it is of another flashmoe version; reinstall the wheel"
            )
            raise ExtensionError(msg) from error
        function.argtypes = arguments
        function.restype = result
    return library


def last_kernel() -> str:
    """The entry name of the last kernel that this thread ran, ``cpu:<isa>`` for the CPU backend, or "" before any call.

    A backward pass runs on autograd's own threads for CUDA tensors, so its kernels are not seen from here.
    """
    return _text(_c_interface().flashmoe_last_kernel())


def check(operator: str, description: str) -> str:
    """Why ``operator`` would reject the arguments so described (csrc/host/arguments.h), in the extension's words; "" if it accepts them."""
    return _text(_c_interface().flashmoe_check(operator.encode(), description.encode()))


def index() -> dict[str, Any]:
    """The device binaries embedded in the extension (schema ``flashmoe.index/1``)."""
    parsed: dict[str, Any] = json.loads(_text(_c_interface().flashmoe_index_json()))
    return parsed


def cpu_isa() -> str:
    """The instruction set that the CPU backend uses now.

    Raises ArgumentError when $FLASHMOE_CPU_ISA names an instruction set that this machine or this build lacks.
    """
    name = _text(_c_interface().flashmoe_cpu_isa())
    if not name:
        msg = (
            f"{CPU_ISA_VARIABLE} is {os.environ.get(CPU_ISA_VARIABLE)!r}: unknown to this build, or not supported by this CPU; "
            "unset it to let flashmoe choose"
        )
        raise ArgumentError(msg)
    return name


def set_cpu_isa(name: str) -> None:
    """Make the CPU backend use another instruction set; raises ArgumentError when this build or this CPU lacks it."""
    if _c_interface().flashmoe_set_cpu_isa(name.encode()) != 0:
        msg = f"no CPU kernels for {name!r} here: unknown to this build, or not supported by this CPU; now in use: {cpu_isa()}"
        raise ArgumentError(msg)


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode()


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
