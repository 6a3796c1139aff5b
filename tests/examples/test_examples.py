"""Every example runs, and holds what it asserts. A process each: they replace functions and register operators."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(example: Path, tmp_path: Path) -> None:
    if example.stem == "audit_extension" and shutil.which("g++") is None:
        pytest.skip("it compiles an extension: no g++ here")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error", str(example)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_each_is_in_the_list_and_short() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    for example in EXAMPLES:
        assert f"[{example.name}]({example.name})" in listed
        assert len(example.read_text(encoding="utf-8").splitlines()) <= 90, example.name
