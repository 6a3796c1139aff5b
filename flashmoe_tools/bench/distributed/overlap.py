"""How much communication time is hidden behind computation, from the spans of a profile; needs no torch."""

from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Milliseconds of one call on one GPU."""

    span: float  # from the first kernel's start to the last one's end
    computing: float
    messages: float
    hidden: float  # communication time during which something is computed

    @property
    def share(self) -> float:
        return self.hidden / self.messages if self.messages else 1.0

    def to_json(self) -> dict[str, float]:
        return {**vars(self), "share": self.share}


def merged(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, with touching and overlapping ones merged."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def measure_overlap(kernels: Iterable[tuple[str, float, float]]) -> Overlap:
    """The overlap of kernels (name, begin, end) in microseconds: NCCL's are messages, all others computation."""
    listed = [(name, begin, end) for name, begin, end in kernels if end > begin]
    messages = merged((begin, end) for name, begin, end in listed if "nccl" in name.lower())
    computing = merged((begin, end) for name, begin, end in listed if "nccl" not in name.lower())
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in messages for c, d in computing)
    begun = min((begin for _, begin, _ in listed), default=0.0)
    ended = max((end for _, _, end in listed), default=0.0)
    lengths = (sum(end - begin for begin, end in spans) for spans in (computing, messages))
    computed, sent = lengths
    return Overlap((ended - begun) / 1e3, computed / 1e3, sent / 1e3, both / 1e3)
