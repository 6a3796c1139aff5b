"""linear and patch_linear."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from flashmoe import _extension
from flashmoe.errors import ArgumentTypeError, ShapeError
from flashmoe.layers.autograd import CHOOSE, call_linear
from flashmoe.moe import errors
from flashmoe.moe.autograd import check_no_tangents

_extension.load()


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w^T + bias, like ``torch.nn.functional.linear``; the bits of a row of the result do not depend on the other rows.

    A row has the same bits in a call with 1, 64 or 8192 rows, whichever tile the number of rows selects: its sum over k is one chain of
    products of 16 k in ascending order, in float32, rounded once. Differentiable; the gradients are deterministic, and the gradient of x
    does not depend on the other rows either. On a CPU this holds between calls on one machine.

    Args:
        x: [..., K], float16 or bfloat16 (on the CPU also float32).
        w: [N, K] in x's dtype, with any strides. On a GPU K and N must be multiples of 8.
        bias: [N] in x's dtype, added in float32 before the result is rounded; None for none.

    Returns:
        [..., N], contiguous.

    Raises:
        ShapeError, DtypeError, DeviceError: an argument breaks a rule above; the message says which.
        UnsupportedGpuError, DriverError: this build has no kernel for the GPU; the driver is absent or failed.
    """
    rows: Any = x
    if isinstance(x, Tensor) and x.dim() != 2:  # type: ignore[redundant-expr]
        if x.dim() == 0:
            msg = "x has shape []; [..., K] is needed; reshape it"
            raise ShapeError(msg)
        rows = x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)
    if is_compiling():
        out = call_linear(rows, w, bias)
    else:
        try:
            check_no_tangents("linear", rows, w, bias)
            out = call_linear(rows, w, bias)
        except Exception as error:
            errors.raise_cause(error, "_linear", (rows, w, bias, CHOOSE))
            raise
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


class _Linear(nn.Linear):
    """nn.Linear computed by flashmoe.linear; patched modules get this class, so that their parameters and names are unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def patch_linear(model: nn.Module) -> int:
    """Make every ``nn.Linear`` in ``model`` compute with :func:`linear`, in place; returns the number of layers that now do.

    Parameters, their names, hooks and the state dict are unchanged. Subclasses of nn.Linear, which may compute something else, and layers
    whose sizes the GPU kernels do not support (not multiples of 8) are left alone. Patching twice changes nothing.

    Raises:
        ArgumentTypeError: ``model`` is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        msg = f"model must be a torch.nn.Module, whose nn.Linear layers are changed in place; found {type(model).__name__}"
        raise ArgumentTypeError(msg)
    count = 0
    for module in model.modules():
        is_plain = type(module) in (nn.Linear, _Linear)
        if is_plain and isinstance(module, nn.Linear) and module.in_features % 8 == module.out_features % 8 == 0:
            module.__class__ = _Linear
            count += 1
    return count
