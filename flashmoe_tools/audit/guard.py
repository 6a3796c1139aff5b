"""Turns anything that cannot be read into a finding instead of a traceback."""

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
    except (FlashmoeError, ImportError):  # one of our rules, or a missing package: not caused by the file
        raise
    except Exception as error:  # csv.Error, RecursionError, MemoryError, struct.error, ...: no list would be complete
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
    """The value in a JSON text; raises DamagedWheelError for anything else.

    This includes nesting that is too deep and duplicate keys, of which some readers take the first and others the last.
    """
    try:
        return json.loads(content, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        msg = f"{what} is not JSON that can be read ({type(error).__name__}: {error})"
        raise DamagedWheelError(msg, "build it again; do not edit what was built") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) != len(pairs):
        msg = f"duplicate key among {sorted(held)[:8]}"
        raise ValueError(msg)
    return held
