"""Every test that asks for ``device`` runs on the CPU and on a GPU; tests/conftest.py counts what could not run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import flashmoe

CPU_THREADS = 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``device`` runs on the CPU and, marked gpu, on a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    """Two CPU threads, float32 products without TF32, a known random state; the operators are there."""
    assert torch.get_float32_matmul_precision() == "highest", "the float32 reference would be computed in TF32"
    assert flashmoe.fused_moe is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)
