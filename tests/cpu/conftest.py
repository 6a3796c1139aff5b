"""The backend, built once per session, and one run of each test per instruction set."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashmoe_build.environments.exclusive import exclusive

from .backend import ISAS, Backend, build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The folder with the objects and libcpu.so, shared by the processes of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "cpu"
    with exclusive(folder.with_name("cpu.lock")):
        if not (folder / "libcpu.so").is_file():
            folder.mkdir(exist_ok=True)
            build(folder)
    return folder


@pytest.fixture(scope="session")
def library(built: Path) -> Backend:
    return Backend(built / "libcpu.so")


# avx512_bf16 uses the attention kernel of avx512.
@pytest.fixture(params=[isa for isa in ISAS if isa != "avx512_bf16"])
def backend(library: Backend, request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The library with one instruction set forced; a test of one that this machine lacks is reported as not run."""
    if request.param not in library.supported:
        pytest.skip(f"not run: this machine has no {request.param} (it has {', '.join(library.supported)})")
    torch.manual_seed(0)
    library.set_isa(request.param)
    assert library.selected_isa() == request.param
    yield library
    library.set_isa(None)
