"""Two profiles side by side: which numbers changed, and which rules fire in only one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOVED = 0.05  # relative change below which a number is not listed


@dataclass(frozen=True)
class Move:
    name: str
    before: float | None
    after: float | None

    @property
    def relative(self) -> float | None:
        if self.before is None or self.after is None or self.before == 0.0:
            return None
        return self.after / self.before - 1.0

    @property
    def notable(self) -> bool:
        if self.before is None or self.after is None:
            return self.before != self.after
        return self.before != self.after if self.relative is None else abs(self.relative) >= MOVED


def moves(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[Move, ...]:
    return tuple(Move(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b]))


def render(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The numbers that changed by at least 5%, then the rules that fire in only one of the two."""
    lines = [f"{'number':<28} {'A':>12} {'B':>12}  change"]
    notable = [move for move in moves(a["values"], b["values"]) if move.notable]
    for move in notable:
        change = f"{move.relative:+.1%}" if move.relative is not None else ""
        lines.append(f"{move.name:<28} {_text(move.before):>12} {_text(move.after):>12}  {change}".rstrip())
    if not notable:
        lines.append(f"no number changed by {MOVED:.0%} or more")
    before, after = ({row["rule"]: row["says"] for row in side["findings"]} for side in (a, b))
    lines += [f"gone: {rule}: {says}" for rule, says in before.items() if rule not in after]
    lines += [f"new: {rule}: {says}" for rule, says in after.items() if rule not in before]
    return "\n".join(lines)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
