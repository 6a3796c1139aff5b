"""The table of environment variables contains every variable that a program reads, and its statements about kernels are true."""

import re
from pathlib import Path

from flashmoe.variables import VARIABLES
from flashmoe_tools.doctor.cli import describe_variables
from flashmoe_tools.tables import load_tables

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("flashmoe", "flashmoe_tools", "flashmoe_build", "csrc", "noxfile.py", "tests/conftest.py", "nox")
# C++ macros with similar names.
OTHERS = {"FLASHMOE_EXPORT", "FLASHMOE_EMULATION_SANITIZE"}


def test_every_variable_that_is_read_is_in_the_table() -> None:
    found = set()
    for name in FOLDERS:
        files = [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*.*")
        for path in files:
            if path.suffix in (".py", ".cpp", ".h", ""):
                found |= set(re.findall(r'["\'](?:-D)?(FLASHMOE_[A-Z_]+)["\']', path.read_text(encoding="utf-8")))
    assert len(found) > 10
    assert found - OTHERS <= set(VARIABLES)


def test_the_families_are_those_of_the_tables() -> None:
    assert VARIABLES["FLASHMOE_KERNEL"].values == tuple(sorted({row.family for row in load_tables().kernels}))


def test_the_list_shows_what_is_set() -> None:
    lines = describe_variables({"FLASHMOE_KERNEL": "sm80"})
    assert len(lines) == len(VARIABLES)
    assert any("FLASHMOE_KERNEL=sm80" in re.sub(r" +", "", line) and "sm75, sm80, sm90" in line for line in lines)
