"""One PTX for both 16-bit types: NVRTC compiles a kernel of ptx::XF16 (csrc/ptx/elements.cuh), whose instructions and symbols say
``xf16``, and ``f16`` and ``bf16`` are written there afterwards.

The optimiser, most of NVRTC's work, sees instructions that name the type as opaque text, and does the same for either. Code that
depends on the type asserts that it is not XF16 (ptx::kIsEither), and its row says so in the table (``by_dtype``): each type has PTX
of its own then.
"""

import re
from dataclasses import replace

from flashmoe_tools.tables import Target, Unit

EITHER = "xf16"
SHARED = ("f16", "bf16")
_WIDENS_BF16 = (9, 0)  # the first compute capability that has cvt.f32.bf16
# e4m3 to bf16, for which there is no instruction: by way of f16 and the upper halves of floats, all of which hold every value of e4m3, and NaN.
_UNPACK = re.compile(rb"\bcvt\.rn\.bf16x2\.e4m3x2\s+(%?\w+),\s*(%?\w+)\s*;")
_BY_F16 = (
    rb"{ .reg .b32 half2, x, y; .reg .b16 half_x, half_y; cvt.rn.f16x2.e4m3x2 half2, \2; mov.b32 {half_x, half_y}, half2; "
    rb"cvt.f32.f16 x, half_x; cvt.f32.f16 y, half_y; prmt.b32 \1, x, y, 0x7632; }"
)
_WIDEN = re.compile(rb"\bcvt\.f32\.bf16\s+(%?\w+),\s*(%?\w+)\s*;")


def front_end(unit: Unit) -> Unit:
    """What NVRTC compiles for ``unit``: the same for f16 and bf16, unless the row says why not."""
    return replace(unit, dtype=EITHER) if unit.dtype in SHARED and not unit.row.by_dtype else unit


def with_dtype(ptx: bytes, dtype: str, virtual: str) -> bytes:
    """The PTX of one type, from what NVRTC made of ``front_end`` for the architecture ``virtual``."""
    written = ptx.replace(EITHER.encode(), dtype.encode())
    written = _UNPACK.sub(_BY_F16, written)
    if dtype == "bf16" and Target(virtual, ()).capability < _WIDENS_BF16:
        # A bf16 is the upper half of a float.
        return _WIDEN.sub(rb"mov.b32 \1, {0, \2};", written)
    return written
