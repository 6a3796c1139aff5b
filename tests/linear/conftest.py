"""Devices and random state as in tests/moe."""

from __future__ import annotations

from tests.moe.conftest import plain_torch, pytest_generate_tests  # noqa: F401
