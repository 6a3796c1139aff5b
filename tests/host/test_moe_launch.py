"""What a mixture-of-experts layer and linear launch on each GPU, on which tensors, and their results.

On a driver without a GPU, whose kernels are plain loops over their parameters."""

from pathlib import Path

import pytest

from tests.arguments import experts
from tests.host.faked import CSRC, compile_extension, run_tests

NAMES = (
    "argument_checks",
    "arguments",
    "backward",
    "forward",
    "grouped_arguments",
    "launch",
    "mxfp4",
    "prepare",
    "quantized_arguments",
    "register",
    "scaled",
    "select",
    "tensor_maps",
    "training",
    "training_arguments",
    "training_register",
)


@pytest.mark.slow
def test_on_a_fake_gpu(tmp_path: Path) -> None:
    run_tests(compile_extension(tmp_path, "moe", NAMES, CSRC / "linear" / "host" / "linear.cpp"), "moe", experts)
