"""Devices, kernel families and the count of GPU tests that did not run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashmoe

HAS_GPU = torch.cuda.is_available()
CPU_THREADS = 2
_not_run = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; deselected and counted where there is none")
    package = Path(flashmoe.__file__).resolve().parent
    if package.parent == config.rootpath and not os.environ.get("FLASHMOE_LIBRARY"):
        pytest.exit(
            "the tests would import flashmoe from the source tree; install the wheel and run `pytest`, not "
            "`python -m pytest` (or set FLASHMOE_LIBRARY to a built library for development)",
            returncode=2,
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``device`` runs on the CPU and, marked gpu, on a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, and count, what needs a GPU on a machine without one."""
    if HAS_GPU:
        return
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=gpu_tests)
    config.stash[_not_run] = len(gpu_tests)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    not_run = config.stash.get(_not_run, 0)
    if HAS_GPU:
        terminalreporter.write_line(f"GPU tests ran on {torch.cuda.get_device_name()}")
    elif not_run:
        terminalreporter.write_sep(
            "-", f"{not_run} GPU tests did not run: no CUDA GPU here; nothing is proved about them"
        )


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    """Two CPU threads, float32 products without TF32, a known random state."""
    assert torch.get_float32_matmul_precision() == "highest", "the float32 reference would be computed in TF32"
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)
