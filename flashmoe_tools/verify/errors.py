"""What stops a verification before its checks."""

from flashmoe.errors import FlashmoeError


class VerifyError(FlashmoeError, RuntimeError):
    """The wheel cannot be checked at all, or its commit cannot be read or built."""
