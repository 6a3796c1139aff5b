"""Devices as in tests/moe."""

from __future__ import annotations

from tests.moe.conftest import pytest_generate_tests  # noqa: F401
