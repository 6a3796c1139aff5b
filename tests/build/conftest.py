"""Shared by the build's tests: the checkout, and flashmoe_build importable in addition to the installed flashmoe."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last, so that `flashmoe` is still the installed one


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
