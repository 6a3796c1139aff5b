"""Shared by the operators' tests; a test with the argument ``device`` runs on the CPU and on a GPU (tests/conftest.py)."""

from collections.abc import Iterator

import pytest
import torch

import flashmoe

CPU_THREADS = 2


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    """Two CPU threads, float32 products without TF32, a fixed random seed; the operators are loaded."""
    assert torch.get_float32_matmul_precision() == "highest", "the float32 reference would be computed in TF32"
    assert flashmoe.fused_moe is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)
