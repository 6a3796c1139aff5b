"""compute-sanitizer's memcheck and synccheck on every operation, on a GPU; on any machine, that the programs run to the end."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashmoe

from .programs import PROGRAMS, Inputs

PROGRAM = Path(__file__).with_name("programs.py")
TOOLKIT = "/usr/local/cuda/bin"


@pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_reaches_its_end(name: str) -> None:
    PROGRAMS[name](Inputs("cpu"))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sanitizer_finds_nothing(name: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT)
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    environ = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # makes each tensor an allocation whose bounds memcheck knows
        "PYTHONPATH": os.pathsep.join((str(Path(flashmoe.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))),
    }
    words = (sanitizer, "--tool", tool, "--launch-timeout", "0", sys.executable, str(PROGRAM), name)
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environ)
    assert f"{name} ran" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-4000:]
