"""Errors that stop an audit before its checks. Each kind of unusable input has its own type; none counts as a pass."""

from flashmoe.errors import FlashmoeError


class AuditError(FlashmoeError):
    """Base class of everything that the audit raises. ``kind`` names it in a few words, ``next_step`` says what to do."""

    kind = "audit"

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step


class UnreadableError(AuditError):
    """The file is missing, is not a regular file, or may not be read."""

    kind = "unreadable"


class NotElfError(AuditError):
    """The file does not begin with the ELF magic number."""

    kind = "not an ELF file"


class DamagedElfError(AuditError):
    """The file begins like an ELF file, but does not contain what its headers describe."""

    kind = "damaged ELF file"


class ForeignMachineError(AuditError):
    """A valid ELF file of another kind: 32 bits, big-endian, another processor, or not a shared object."""

    kind = "another kind of ELF file"


class NoDynamicSymbolsError(AuditError):
    """The ELF file has no readable dynamic symbol table, so what it needs is unknown."""

    kind = "no dynamic symbols"


class EmptyInputError(AuditError):
    """A folder or wheel that contains no extension at all."""

    kind = "empty"


class DamagedWheelError(AuditError):
    """The wheel is not a valid zip archive, or unpacks to something that no wheel should hold."""

    kind = "damaged wheel"


class EmbeddedError(AuditError):
    """The embedded device binaries or their index cannot be read."""

    kind = "embedded"


class NoBinariesError(EmbeddedError):
    """The index of embedded device binaries is empty: a CPU-only build, or a lost link step."""


class ToolMissingError(AuditError):
    """A program or library that the audit relies on is not installed."""

    kind = "missing tool"


class ShimDataError(AuditError):
    """There is no shim data for the requested torch version."""

    kind = "no shim data"
