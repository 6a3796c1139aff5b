"""The Hub's layout: its contents, what its checks find, and the `kernels` library loading the package under test."""

import importlib.util
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.release import hub
from flashmoe_tools.report import Verdict


def test_targets_are_written_as_the_hub_writes_them() -> None:
    targets = ["sm_75", "sm_120a", "sm_90a", "compute_80", "sm_80", "sm_100a"]
    assert hub.architectures(targets) == ["7.5", "8.0", "8.0+PTX", "9.0a", "10.0a", "12.0a"]
    assert hub.architectures([]) == []


def test_a_wheel_without_the_library_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other-1-py3-none-any.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(BuildError, match=r"contains no flashmoe/libflashmoe\.so"):
        hub.write(tmp_path / "other-1-py3-none-any.whl", tmp_path / "hub")


def test_each_variant_has_its_files_and_their_hashes(make_wheel: Callable[..., Path], tmp_path: Path) -> None:
    folders = hub.write(make_wheel(), tmp_path)
    assert [folder.name for folder in folders] == list(hub.VARIANTS)
    assert (tmp_path / "LICENSE").is_file()
    for folder in folders:
        stated = json.loads((folder / "metadata.json").read_text())
        assert stated["id"] == stated["name"] == "flashmoe"
        assert set(stated["digest"]["files"]) == {
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        } - {"metadata.json"}
        assert ("archs" in stated["backend"]) is ("cpu" not in folder.name)
        assert hub.check_digest(folder).verdict is Verdict.PASS
        assert hub.check_abi(folder).verdict is Verdict.PASS
    (folders[0] / "__init__.py").write_text("changed")
    found = hub.check_digest(folders[0])
    assert found.verdict is Verdict.FAIL
    assert "__init__.py" in found.found
    assert hub.check_load(tmp_path, "cpu").verdict is Verdict.FAIL


@pytest.mark.slow
def test_the_kernels_library_loads_the_package_under_test(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("flashmoe")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    if not (package / hub.LIBRARY).is_file():
        pytest.skip("flashmoe is a source tree here, without a library")
    wheel = tmp_path / "flashmoe_kernels-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, Path("flashmoe", path.relative_to(package)))
    folders = hub.write(wheel, tmp_path / "hub")
    assert {one.verdict for one in hub.check(tmp_path / "hub", folders)} == {Verdict.PASS}
