"""What happens when a call goes to torch: ``$FLASHMOE_FALLBACK``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TypeVar

from flashmoe.errors import ArgumentError

Result = TypeVar("Result")
FALLBACK_VARIABLE = "FLASHMOE_FALLBACK"
FALLBACK_POLICIES = ("allow", "warn", "error")


def at_trace_time(function: Callable[..., Result]) -> Callable[..., Result]:
    """Run as plain Python while torch.compile traces; the same as torch.compiler.assume_constant_result, without importing the
    whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@at_trace_time
def note_fallback(reason: str, what: str = "attention", *, stacklevel: int = 3) -> None:
    """Act as ``$FLASHMOE_FALLBACK`` says: ``allow`` (default), ``warn``, or ``error`` (ArgumentError).

    Compiled code decides once, when it is traced.
    """
    policy = fallback_policy()
    if policy == "warn":
        warnings.warn(f"flashmoe falls back to torch for {what}: {reason}", stacklevel=stacklevel)
    elif policy == "error":
        msg = f"{what} would run on torch: {reason}; {FALLBACK_VARIABLE}=error forbids that; unset it to allow it"
        raise ArgumentError(msg)


def fallback_policy() -> str:
    """``$FLASHMOE_FALLBACK``; raises ArgumentError for an invalid value."""
    policy = os.environ.get(FALLBACK_VARIABLE) or "allow"
    if policy not in FALLBACK_POLICIES:
        msg = f"{FALLBACK_VARIABLE} is {policy!r}; supported: {', '.join(FALLBACK_POLICIES)}"
        raise ArgumentError(msg)
    return policy
