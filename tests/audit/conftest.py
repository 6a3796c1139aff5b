"""Fixtures for the audit's tests: a place to compile, a small kernel table, and a valid library to modify."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from audit_builders import Row, Workshop, row_of, small_tables

from flashmoe_tools.tables import Tables


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return small_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="session")
def rows(tables: Tables) -> tuple[Row, ...]:
    """What a correct build embeds: every unit of the small table."""
    return tuple(row_of(unit) for unit in tables.units())


@pytest.fixture(scope="session")
def sound(workshop: Workshop, rows: tuple[Row, ...]) -> Path:
    return workshop.library(rows)
