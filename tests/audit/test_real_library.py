"""The library of this test session: FLASHMOE_LIBRARY, the installed package's, or the checkout's build/lib."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from audit_builders import audit, failures

from flashmoe.tools.report import Verdict


def session_library() -> Path | None:
    """The library that this session says it has; one that is named and missing is an error, not a reason to skip."""
    stated = os.environ.get("FLASHMOE_LIBRARY")
    if stated:
        assert Path(stated).is_file(), f"FLASHMOE_LIBRARY={stated} is no file"
        return Path(stated)
    spec = importlib.util.find_spec("flashmoe")
    assert spec is not None
    places = [Path(folder) / "libflashmoe.so" for folder in spec.submodule_search_locations or []]
    found = next((path for path in places if path.is_file()), None)
    if os.environ.get("FLASHMOE_TEST_INSTALLED") == "1":
        assert found is not None, "an installed flashmoe is under test, but it has no libflashmoe.so"
    return found


def test_library_of_this_session_is_proved() -> None:
    library = session_library()
    if library is None:
        pytest.skip(
            "no library in this session: neither FLASHMOE_LIBRARY nor an installed flashmoe (`nox -s build` gives one)"
        )
    report = audit(library)
    assert not failures(report), "\n".join(f"{c.name}: {c.found}; {c.why}" for c in failures(report))
    assert report.verdict in (Verdict.PASS, Verdict.WARN)
    subject = report.data["subjects"][0]
    assert subject["ours"] is True
