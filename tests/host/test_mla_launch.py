"""What latent attention launches on each GPU, on which tensors, and its results.

On a driver without a GPU, whose kernels are plain loops over their parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.host.faked import CSRC, compile_extension, run_tests


@pytest.mark.slow
def test_on_a_fake_gpu(tmp_path: Path) -> None:
    names = sorted(path.stem for path in (CSRC / "mla" / "host").glob("*.cpp"))
    run_tests(compile_extension(tmp_path, "mla", names), "mla")
