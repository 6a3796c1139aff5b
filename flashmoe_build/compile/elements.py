"""One PTX for both 16-bit types: NVRTC compiles a kernel for ptx::XF16 (csrc/ptx/elements.cuh), whose instructions and symbols contain
``xf16``, which is then replaced by ``f16`` or ``bf16``.

The optimiser, most of NVRTC's work, treats instructions that name the type as opaque text, so it does the same for either. Code that
depends on the type asserts that it is not XF16 (ptx::kIsEither), and its row says so in the table (``by_dtype``); each type then
gets separate PTX.
"""

import re
from dataclasses import replace

from flashmoe_tools.tables import Target, Unit

EITHER = "xf16"
SHARED = ("f16", "bf16")
_WIDENS_BF16 = (9, 0)  # the first compute capability that has cvt.f32.bf16
# There is no instruction for e4m3 to bf16. Convert to f16, widen to floats and take their upper halves: all of these hold every e4m3 value, and NaN.
_UNPACK = re.compile(rb"\bcvt\.rn\.bf16x2\.e4m3x2\s+(%?\w+),\s*(%?\w+)\s*;")
_BY_F16 = (
    rb"{ .reg .b32 half2, x, y; .reg .b16 half_x, half_y; cvt.rn.f16x2.e4m3x2 half2, \2; mov.b32 {half_x, half_y}, half2; "
    rb"cvt.f32.f16 x, half_x; cvt.f32.f16 y, half_y; prmt.b32 \1, x, y, 0x7632; }"
)
# Four codes at once below 8.9: bytes 0 and 2, and bytes 1 and 3, are moved to the upper bits of halves, which a power of two then scales to their value,
# subnormal or not. NaN would become 480: a factor that keeps 448 finite makes it infinite, and adding infinity times zero gives NaN.
_UNPACK_BITS = re.compile(rb"\bunpack\.(\w+)x2\.e4m3x4\s+(%?\w+),\s*(%?\w+),\s*(%?\w+)\s*;")
_BY_BITS = {  # right shift of the odd bytes, left shift of the even ones, mask of a code without its sign, power of two, factor that makes 480 infinite
    b"f16": (1, 7, 0x3F80, 0x5C00, 0x5890),
    b"bf16": (4, 4, 0x07F0, 0x7B80, 0x7B10),
}
_WIDEN = re.compile(rb"\bcvt\.f32\.bf16\s+(%?\w+),\s*(%?\w+)\s*;")


def front_end(unit: Unit) -> Unit:
    """What NVRTC compiles for ``unit``: the same for f16 and bf16, unless the row rules it out."""
    return replace(unit, dtype=EITHER) if unit.dtype in SHARED and not unit.row.by_dtype else unit


def _unpack_by_bits(found: re.Match[bytes]) -> bytes:
    dtype, even, odd, codes = found.groups()
    right, left, *halves = _BY_BITS[dtype]
    mask, power, limit, nothing = (f"{half * 0x10001:#010x}" for half in (*halves, 0x8000))
    pick = f"{mask}, 0xe4"  # lop3: bits of the mask from the first operand, the others from the second
    lines = [
        ".reg .b32 sign, even, odd, large, power, limit, nothing, zero",
        f"mov.b32 power, {power}",
        f"mov.b32 limit, {limit}",
        f"mov.b32 nothing, {nothing}",
        "mov.b32 zero, 0",
        "and.b32 sign, CODES, 0x80808080",
        f"shr.b32 odd, CODES, {right}",
        f"lop3.b32 odd, odd, sign, {pick}",
        f"shl.b32 even, CODES, {left}",
        "shl.b32 sign, sign, 8",
        f"lop3.b32 even, even, sign, {pick}",
    ]
    for name, out in (("even", "EVEN"), ("odd", "ODD")):
        lines += [
            f"fma.rn.TYPEx2 {name}, {name}, power, nothing",
            f"fma.rn.TYPEx2 large, {name}, limit, nothing",
            f"fma.rn.TYPEx2 {out}, large, zero, {name}",
        ]
    text = "{ " + " ".join(f"{line};" for line in lines) + " }"
    for word, register in (("TYPE", dtype), ("CODES", codes), ("EVEN", even), ("ODD", odd)):
        text = text.replace(word, register.decode())
    return text.encode()


def with_dtype(ptx: bytes, dtype: str, virtual: str) -> bytes:
    """The PTX of one type, from NVRTC's output for ``front_end`` and the architecture ``virtual``."""
    written = ptx.replace(EITHER.encode(), dtype.encode())
    written = _UNPACK_BITS.sub(_unpack_by_bits, _UNPACK.sub(_BY_F16, written))
    if dtype == "bf16" and Target(virtual, ()).capability < _WIDENS_BF16:
        # A bf16 is the upper half of a float.
        return _WIDEN.sub(rb"mov.b32 \1, {0, \2};", written)
    return written
