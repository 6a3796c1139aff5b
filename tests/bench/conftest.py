"""Where the tests find the checkout, and how they start the program."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last, so that `flashmoe` is the installed one


@pytest.fixture
def program_environment() -> dict[str, str]:
    """The environment in which `python -m flashmoe` is the package under test, in any current folder."""
    import flashmoe

    package = str(Path(flashmoe.__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
