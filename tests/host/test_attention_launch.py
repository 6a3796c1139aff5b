"""What attention's operators launch, and their results, backward and ragged too.

On a driver without a GPU, whose kernels are plain loops over their parameters."""

from pathlib import Path

import pytest

from tests.arguments import attention
from tests.host.faked import CSRC, compile_extension, run_tests

ON_THE_CPU = ("cpu", "e4m3_cpu")


@pytest.mark.slow
def test_on_a_fake_gpu(tmp_path: Path) -> None:
    names = sorted(path.stem for path in (CSRC / "attention" / "host").glob("*.cpp"))
    run_tests(
        compile_extension(tmp_path, "attention", (name for name in names if name not in ON_THE_CPU)),
        "attention",
        attention,
    )
