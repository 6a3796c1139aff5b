"""Reads one PTX module as far as the audit needs it: target, version, entries, and what each entry declares."""

import re
from dataclasses import dataclass

from flashmoe_tools.audit.errors import EmbeddedError

_TYPE_BYTES = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "b128": 16,
}
_VARIABLE = re.compile(r"^\s*\.(shared|local)\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+[\w$]+((?:\[\d+\])*)", re.MULTILINE)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+[^,\[\)]*(?:\[(\d+)\])?")
# Matches an instruction on bf16 values: cvt.rn.bf16.f32, fma.rn.bf16x2, mma.sync...bf16.bf16; not a bare .b16 register.
_BF16 = re.compile(r"^\s*(?:@!?%?\w+\s+)?[a-z][\w.]*\.bf16(?:x2)?\b", re.MULTILINE)


@dataclass(frozen=True)
class PtxEntry:
    """One entry point. Sizes in bytes; ``max_threads`` is 0 if not bounded."""

    name: str
    smem_static: int
    local: int
    max_threads: int
    param_bytes: int
    uses_bf16: bool


@dataclass(frozen=True)
class PtxFacts:
    """``target`` as in ``.target sm_80``, ``version`` as in ``.version 8.7``."""

    target: str
    version: str
    entries: tuple[PtxEntry, ...]

    @property
    def arch(self) -> str:
        """The target's name in the architecture table."""
        return self.target.replace("sm_", "compute_", 1)


def read_ptx(content: bytes, name: str) -> PtxFacts:
    """Parses NUL-terminated PTX; raises EmbeddedError if it is not PTX."""
    try:
        text = content.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        msg = f"{name} is not PTX: byte {error.start} is not ASCII"
        raise EmbeddedError(msg, "embed NVRTC's output for a compute_XX target") from error
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    target = re.search(r"^\s*\.target\s+(sm_\d+[af]?)", text, re.MULTILINE)
    version = re.search(r"^\s*\.version\s+(\d+\.\d+)", text, re.MULTILINE)
    if target is None or version is None:
        msg = f"{name} is not PTX: it has no .target or no .version line"
        raise EmbeddedError(msg, "embed NVRTC's output for a compute_XX target")
    entries = tuple(_entry(match, text) for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(?", text))
    return PtxFacts(target.group(1), version.group(1), tuple(sorted(entries, key=lambda e: e.name)))


def _entry(match: re.Match[str], text: str) -> PtxEntry:
    opening = text.find("{", match.end())
    head, body = text[match.end() : opening], _block(text, opening)
    bound = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head)
    threads = 1
    for group in bound.groups() if bound is not None else ("0",):
        threads *= int(group) if group is not None else 1
    sizes = {"shared": 0, "local": 0}
    for space, kind, extents in _VARIABLE.findall(body):
        amount = _TYPE_BYTES.get(kind, 0)
        for extent in re.findall(r"\d+", extents):
            amount *= int(extent)
        sizes[space] += amount
    return PtxEntry(
        match.group(1), sizes["shared"], sizes["local"], threads, _parameters(head), bool(_BF16.search(body))
    )


def _block(text: str, opening: int) -> str:
    depth = 0
    for index in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[opening:index]
    return text[opening:]


def _parameters(head: str) -> int:
    """Bytes from the first parameter to the end of the last, including alignment."""
    end = 0
    for align, kind, extent in _PARAMETER.findall(head):
        size = _TYPE_BYTES.get(kind, 0)
        boundary = int(align) if align else max(size, 1)
        end = -(-end // boundary) * boundary + size * int(extent or 1)
    return end
