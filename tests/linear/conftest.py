"""Threads and random state as in tests/attention."""

from tests.attention.conftest import plain_torch  # noqa: F401
