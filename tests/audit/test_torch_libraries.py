"""The shim data: correct for the installed torch, and a lower bound for later ones."""

import sys
from pathlib import Path

import pytest

from flashmoe_tools.audit.errors import ShimDataError
from flashmoe_tools.audit.policy import DATA
from flashmoe_tools.audit.resolve import cuda_folders
from flashmoe_tools.audit.torch_libraries import installed_torch, release, shim_data, shims_for, write_data


def test_committed_data_is_what_the_script_writes(tmp_path: Path) -> None:
    """The test environment has the torch of the oldest data file."""
    torch = installed_torch()
    assert torch is not None
    committed = DATA / f"torch_shims_{release(torch.version)}.json"
    assert committed.is_file(), (
        f"write it: python -m flashmoe_tools.audit.torch_libraries --write (torch {torch.version})"
    )
    assert write_data(tmp_path).read_bytes() == committed.read_bytes()


def test_cuda_packages_of_another_folder_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may be installed elsewhere than flashmoe: the system under an environment, a .pth file, PYTHONPATH."""
    folder = tmp_path / "nvidia" / "cuda_runtime" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    cuda_folders.cache_clear()
    try:
        assert folder in cuda_folders()
    finally:
        cuda_folders.cache_clear()


def test_known_shims() -> None:
    shims = shim_data("2.10.0").library
    assert shims["aoti_torch_get_dim"] == "libtorch_cpu.so"
    assert shims["torch_parallel_for"] == "libtorch_cpu.so"
    assert shims["aoti_torch_get_current_cuda_stream"] == "libtorch_cuda.so"
    assert len(shims) > 300


def test_a_later_torch_has_at_least_the_older_shims() -> None:
    assert shim_data("2.13.0+cpu").library == shim_data("2.10.0").library
    assert shims_for("2.99.0").version == "2.10.0"


def test_an_older_torch_is_refused() -> None:
    with pytest.raises(ShimDataError, match=r"no shim data for torch 2\.8\.0"):
        shim_data("2.8.0")
