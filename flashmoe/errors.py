"""Typed errors. Each message names the offending value, what is supported, and the next step.

Every class also derives from the built-in exception that a caller would expect (``ValueError`` for a bad shape, ``TypeError`` for
a bad dtype), so code written against ``torch`` keeps catching them.
"""

from __future__ import annotations

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command-line programs; one per kind of outcome."""

    OK = 0
    FAILED = 1  # a check ran and failed
    USAGE = 2  # the arguments were wrong
    NOTHING_CHECKED = 3  # there was nothing to check, which never counts as a pass
    NOT_PROVED = 4  # a claim could be neither proved nor refuted here, which is not a pass either
    INTERRUPTED = 130
    PIPE_CLOSED = 141  # the reader of the output closed the pipe; 141 is what a shell reports for SIGPIPE


class FlashmoeError(Exception):
    """Base of everything that flashmoe raises on purpose."""


class ShapeError(FlashmoeError, ValueError):
    """A tensor's rank, size or stride does not fit the operator."""


class DtypeError(FlashmoeError, TypeError):
    """A dtype is unsupported, or tensors that must share one do not."""


class DeviceError(FlashmoeError, ValueError):
    """Tensors are on different devices, or on a kind of device that has no kernel."""


class ArgumentError(FlashmoeError, ValueError):
    """A non-tensor argument has an unsupported value."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong Python type: a non-tensor where a tensor is needed, or a tensor where a number is needed."""


class DifferentiationError(FlashmoeError, NotImplementedError):
    """The requested kind of derivative is not implemented (double backward, forward mode)."""


class InternalError(FlashmoeError, RuntimeError):
    """flashmoe contradicted itself: a bug, to be reported with the message."""


class DistributedError(FlashmoeError, RuntimeError):
    """Ranks of torch.distributed disagree, or one does not respond."""


class UnsupportedGpuError(FlashmoeError, RuntimeError):
    """This build holds no kernel that this GPU can run."""


class DriverError(FlashmoeError, RuntimeError):
    """The CUDA driver is absent or refused a call."""


class ExtensionError(FlashmoeError, ImportError):
    """The compiled extension cannot be found or loaded."""


class TorchVersionError(ExtensionError):
    """The installed torch is older than the stable ABI that the extension was built for."""


class TableError(FlashmoeError, ValueError):
    """A table (arch.toml, operations.toml, kernels.toml) contradicts itself or the hardware."""


class BuildError(FlashmoeError, RuntimeError):
    """A compiler, the linker or a resource check rejected a compilation unit."""


class LockError(FlashmoeError, RuntimeError):
    """The installed environment is not the one in lockfiles/."""


class ReportError(FlashmoeError, ValueError):
    """A report file is missing, damaged or of another schema."""


_ROOM = "the disk is full; free some space, or name a folder with more (TMPDIR, FLASHMOE_CACHE_DIR, UV_CACHE_DIR)"
_ACCESS = "this user may not write there; use a folder of your own (for a checkout: clone it again)"
_OF_THE_MACHINE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: _ACCESS,
    errno.ENOENT: "this path does not exist and cannot be created; check it",
    errno.ENOTDIR: "a part of that path is a file; check the path",
    errno.EISDIR: "it is a folder, but a file is needed; check the path",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.ENOMEM: "out of memory; lower MAX_JOBS or end other programs",
}


def explain_os_error(error: OSError) -> str | None:
    """What failed on this machine and what to do, or None for an error that only a bug can cause."""
    advice = _OF_THE_MACHINE.get(error.errno or 0)
    if advice is None:
        return None
    return f"{error.filename or 'writing'}: {error.strerror}; {advice}"
