"""The one place where something that cannot be read becomes a finding instead of a traceback."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from flashmoe.errors import FlashmoeError
from flashmoe_tools.audit.context import failed
from flashmoe_tools.audit.errors import AuditError, DamagedWheelError
from flashmoe_tools.report import Check


def guarded(what: str, work: Callable[[], Iterable[Check]]) -> list[Check]:
    """The checks that ``work`` makes, or one failure that says why ``what`` could not be judged."""
    try:
        return list(work())
    except AuditError as error:
        return [_unreadable(what, str(error), error.next_step)]
    except (FlashmoeError, ImportError):  # a rule of ours, or a package that is not installed: not the file's doing
        raise
    except Exception as error:  # csv.Error, RecursionError, MemoryError, struct.error, ...: no list of them is complete
        return [
            _unreadable(
                what, f"{type(error).__name__}: {error}", "look at the file; if it is sound, report it with the file"
            )
        ]


def _unreadable(what: str, found: str, next_step: str) -> Check:
    return failed(
        f"unreadable: {what}",
        found=found,
        expected="content that can be read",
        why="What could not be read was not checked.",
        cause="damaged, edited, or of a form that no builder writes",
        next_step=next_step,
    )


def parse_json(content: bytes, what: str) -> Any:
    """The value in a JSON text. Raises DamagedWheelError for everything else, too deep a nesting and a key that stands twice (of which
    readers take one or the other) included."""
    try:
        return json.loads(content, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        msg = f"{what} is not JSON that can be read ({type(error).__name__}: {error})"
        raise DamagedWheelError(msg, "build it again; do not edit what was built") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) != len(pairs):
        msg = f"one of {sorted(held)[:8]} stands twice"
        raise ValueError(msg)
    return held
