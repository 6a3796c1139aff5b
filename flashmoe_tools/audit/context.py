"""The data that every check has access to, and helpers to report results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe_tools.audit.elf import ElfFacts, Symbol
from flashmoe_tools.audit.inputs import Wheel
from flashmoe_tools.audit.policy import Policy
from flashmoe_tools.audit.resolve import Closure, Resolver
from flashmoe_tools.audit.torch_libraries import InstalledTorch
from flashmoe_tools.report import Check, Verdict

MAX_LISTED = 20  # failures of one kind that are listed individually


@dataclass(frozen=True)
class Context:
    """One extension under audit. ``label`` is its name in the output, without paths of this machine."""

    label: str
    facts: ElfFacts
    ours: bool
    policy: Policy
    resolver: Resolver
    closure: Closure
    torch: InstalledTorch | None
    torch_version: str
    source: Path | None = None
    objects: tuple[ElfFacts, ...] = ()
    wheel: Wheel | None = None  # the wheel that contains the extension

    @property
    def wheel_name(self) -> str:
        """File name of the wheel, whose tags promise a Python and a platform; empty if there is no wheel."""
        return self.wheel.path.name if self.wheel is not None else ""


def passed(name: str, found: str, expected: str = "") -> Check:
    return Check(name, Verdict.PASS, found, expected)


def skipped(name: str, found: str, next_step: str = "") -> Check:
    return Check(name, Verdict.SKIP, found, next_step=next_step)


def warned(name: str, found: str, expected: str, why: str, next_step: str) -> Check:
    return Check(name, Verdict.WARN, found, expected, why, next_step)


def failed(name: str, *, found: str, expected: str, why: str, cause: str = "", next_step: str) -> Check:
    """A failed check: what was found, what was expected, why it matters, the cause, and the next step."""
    return Check(name, Verdict.FAIL, found, expected, f"{why} Cause: {cause}" if cause else why, next_step)


def limited(checks: Sequence[Check]) -> list[Check]:
    """The first MAX_LISTED checks, plus one that counts the rest and has their worst verdict."""
    if len(checks) <= MAX_LISTED:
        return list(checks)
    rest = checks[MAX_LISTED:]
    worst = Verdict.FAIL if any(c.verdict is Verdict.FAIL for c in rest) else rest[0].verdict
    last = Check(
        f"{checks[0].name.split(':', 1)[0]}: {len(rest)} more",
        worst,
        f"{len(rest)} more of this kind",
        checks[0].expected,
        checks[0].why,
        "the JSON report (--json) lists every name",
    )
    return [*checks[:MAX_LISTED], last]


def listing(names: Iterable[str], limit: int = 8) -> str:
    """Names on one line: the first few, and how many more there are."""
    every = list(names)
    shown = ", ".join(every[:limit])
    return f"{shown} and {len(every) - limit} more" if len(every) > limit else shown


def may_stay_open(context: Context, symbol: Symbol) -> bool:
    """Whether a symbol may stay unresolved, as weak references may.

    The loader leaves address 0 where nothing defines one, and the code tests for that before use.

    In our own library only C names, thread-local initialisers and transactional clones may be weak; other projects may
    declare any name weak.
    """
    return symbol.is_weak and (
        not context.ours
        or symbol.name in context.policy.weak
        or symbol.name.startswith(("_ZTH", "_ZGTt"))
        or not symbol.name.startswith("_Z")
    )
