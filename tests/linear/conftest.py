"""Threads and random state as in tests/attention."""

from __future__ import annotations

from tests.attention.conftest import plain_torch  # noqa: F401
