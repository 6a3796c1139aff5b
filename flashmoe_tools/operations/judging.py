"""Shared by the references of all operations: the verdict on one result and on several gradients."""

import math
from collections.abc import Callable, Sequence

import torch

from flashmoe_tools.operations import Verification

Form = tuple[Sequence[int], torch.dtype]  # the shape and dtype that a result must have


def max_abs(values: torch.Tensor) -> float:
    """Largest magnitude; NaN if any value is NaN, which then fails every comparison."""
    return float(values.abs().max()) if values.numel() else 0.0


def high_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype in which references are computed."""
    return torch.float64 if torch.device(device).type == "cpu" else torch.float32


def wrong_form(name: str, result: torch.Tensor, form: Form) -> str:
    """Empty if the result has the right shape and dtype."""
    shape, dtype = form
    if tuple(result.shape) == tuple(shape) and result.dtype == dtype:
        return ""
    return f"{name} is {tuple(result.shape)} {result.dtype}, expected {tuple(shape)} {dtype}"


def judge_gradients(
    names: Sequence[str],
    found: Sequence[torch.Tensor],
    forms: Sequence[Form],
    error_of: Callable[[int], float],
    tolerances: Sequence[float],
    coverage: float,
) -> Verification:
    """The verdict on several gradients; it reports the error and tolerance of the one closest to its bound.

    A gradient without a tolerance must only be finite.
    """
    if len(found) != len(forms):
        return Verification(
            False, math.inf, max(tolerances), None, coverage, f"{len(found)} gradients, expected {len(forms)}"
        )
    worst, worst_error, worst_tolerance, reason = -1.0, 0.0, max(tolerances), ""
    for index, (name, one, form) in enumerate(zip(names, found, forms, strict=False)):
        if text := wrong_form(name, one, form):
            return Verification(False, math.inf, max(tolerances), None, coverage, text)
        if not bool(torch.isfinite(one).all()):
            reason = reason or f"{name} holds NaN or Inf"
        if index >= len(tolerances):
            continue
        error, tolerance = error_of(index), tolerances[index]
        if not error <= tolerance:
            reason = reason or f"{name}: max error {error:.3g} exceeds {tolerance:.3g}"
        if not error / tolerance <= worst:  # a NaN ratio counts as the worst
            worst, worst_error, worst_tolerance = error / tolerance, error, tolerance
    return Verification(not reason, worst_error, worst_tolerance, None, coverage, reason)


def judge_result(
    result: torch.Tensor,
    error: float,
    tolerance: float,
    coverage: float,
    lse_error: float | None = None,
    lse_tolerance: float = 0.0,
) -> Verification:
    """The verdict on a result that has the right shape and dtype."""
    reason = ""
    if not bool(torch.isfinite(result).all()):
        reason = "the result holds NaN or Inf"
    elif not error <= tolerance:
        reason = f"max error {error:.3g} exceeds {tolerance:.3g}"
    elif lse_error is not None and not lse_error <= lse_tolerance:
        reason = f"LSE error {lse_error:.3g} exceeds {lse_tolerance:g}"
    return Verification(not reason, error, tolerance, lse_error, coverage, reason)
