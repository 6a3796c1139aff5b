"""Every test that asks for ``device`` runs on the CPU and on a GPU; tests/conftest.py counts what could not run."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")
