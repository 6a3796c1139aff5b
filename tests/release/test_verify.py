"""`python -m flashmoe verify`: each kind of tampering is found, and called by its name."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from audit_builders import Workshop

from flashmoe.__main__ import main
from flashmoe.tools.report import Check, Report, Verdict
from flashmoe.tools.verify import VerifyError, compare, find_clone, read_wheel, rebuild, verify

WheelMaker = Callable[..., Path]
KERNEL = b"\x7fELF bf16 "


def problems(report: Report) -> list[Check]:
    return [check for check in report.checks if check.verdict in (Verdict.FAIL, Verdict.WARN)]


def test_a_sound_wheel_passes(make_wheel: WheelMaker, clone: Path) -> None:
    report = verify(make_wheel(), root=clone, again=False)
    assert {check.name for check in report.checks} == {"wheel record", "provenance", "commit", "lock files"}
    assert problems(report) == []
    assert report.verdict is Verdict.PASS
    assert set(report.data["binaries"]) == {"attention_f16.sm_80", "attention_bf16.sm_80"}


def test_an_edited_device_binary(make_wheel: WheelMaker, library: bytes, clone: Path) -> None:
    edited = library.replace(KERNEL, b"\x7fELF bf17 ", 1)
    assert edited != library
    found = problems(verify(make_wheel(edited), root=clone, again=False))
    assert {check.name for check in found} == {"provenance", "provenance: attention_bf16.sm_80"}
    assert all(check.verdict is Verdict.FAIL for check in found)


def test_an_edited_host_part(make_wheel: WheelMaker, library: bytes, clone: Path) -> None:
    (only,) = problems(verify(make_wheel(library + b"\0"), root=clone, again=False))
    assert only.verdict is Verdict.FAIL
    assert only.why.startswith("The library is not the one that was built.")


def test_an_edited_member_whose_record_was_not_edited(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    good, bad = make_wheel(), tmp_path / "flashmoe_kernels-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name) + (b"import os\n" if name == "flashmoe/__init__.py" else b""))
    (only,) = problems(verify(bad, root=clone, again=False))
    assert (only.name, only.found) == ("wheel record", "differs: flashmoe/__init__.py")


def test_an_edited_provenance(make_wheel: WheelMaker, clone: Path) -> None:
    other = "0" * 40
    (only,) = problems(verify(make_wheel(commit=other), root=clone, again=False))
    assert (only.name, only.verdict) == ("commit", Verdict.FAIL)
    assert "is not in this clone" in only.found
    (only,) = problems(verify(make_wheel(source_date_epoch=1), root=clone, again=False))
    assert (only.name, only.verdict) == ("commit", Verdict.FAIL)
    (only,) = problems(verify(make_wheel(extension_sha256="0" * 64), root=clone, again=False))
    assert only.name == "provenance"


def test_a_dirty_build_is_a_warning_and_cannot_be_rebuilt(make_wheel: WheelMaker, clone: Path) -> None:
    wheel = make_wheel(dirty=True)
    (only,) = problems(verify(wheel, root=clone, again=False))
    assert (only.name, only.verdict) == ("commit", Verdict.WARN)
    with pytest.raises(VerifyError, match="a wheel of a clean commit"):
        verify(wheel, root=clone, again=True)


def test_another_lock(make_wheel: WheelMaker, clone: Path) -> None:
    (only,) = problems(verify(make_wheel(locks={"build.txt": "0" * 64}), root=clone, again=False))
    assert (only.name, only.verdict) == ("lock files", Verdict.WARN)


def test_no_provenance(make_wheel: WheelMaker, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = make_wheel(record=None)
    assert main(["verify", str(wheel), "--root", str(clone)]) == 1
    assert "has no readable flashmoe/provenance.json" in capsys.readouterr().err


def test_another_projects_wheel(workshop: Workshop, library: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, bytes | str] = {"other/__init__.py": "", "other/_C.so": library}
    wheel = workshop.wheel(files, name="other-1.0-py3-none-manylinux_2_28_x86_64.whl")
    assert main(["verify", str(wheel)]) == 1
    assert "it is not a wheel of flashmoe" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"no zip at all"])
def test_no_wheel_at_all(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flashmoe_kernels-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    path.write_bytes(content)
    assert main(["verify", str(path)]) == 1
    assert "is not a valid wheel" in capsys.readouterr().err


def test_outside_a_clone_nothing_is_said_of_the_commit(make_wheel: WheelMaker, tmp_path: Path) -> None:
    assert find_clone(tmp_path) is None
    skipped = {c.name for c in verify(make_wheel(), root=None, again=False).checks if c.verdict is Verdict.SKIP}
    assert skipped == {"commit", "lock files"}


def test_the_report_is_written(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    assert main(["verify", str(make_wheel()), "--root", str(clone), "--json", str(path)]) == 0
    assert json.loads(path.read_text())["verdict"] == "PASS"


def compared(first: Path, second: Path, folder: Path) -> list[Check]:
    return compare(read_wheel(first, folder / "one"), read_wheel(second, folder / "two"))


def test_a_rebuilt_wheel_of_the_same_bytes(make_wheel: WheelMaker, tmp_path: Path) -> None:
    wheel = make_wheel()
    shutil.copy(wheel, tmp_path / wheel.name)
    checks = compared(wheel, tmp_path / wheel.name, tmp_path)
    assert [check.verdict for check in checks] == [Verdict.PASS, Verdict.PASS]


def test_another_host_compiler_may_change_the_host_part_only(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path
) -> None:
    compilers = {"cxx": "g++ 14.1.0"}
    binaries, wheel = compared(make_wheel(), make_wheel(library + b"\0", compilers=compilers), tmp_path)
    assert binaries.verdict is Verdict.PASS
    assert wheel.verdict is Verdict.WARN
    assert "g++ 12.2.0 there and g++ 14.1.0 here" in wheel.why


def test_the_same_host_compiler_must_give_the_same_bytes(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path
) -> None:
    _, wheel = compared(make_wheel(), make_wheel(library + b"\0"), tmp_path)
    assert wheel.verdict is Verdict.FAIL
    assert "flashmoe/libflashmoe.so" in wheel.found


def test_a_device_binary_must_match_whatever_the_host_compiler(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path
) -> None:
    edited = library.replace(KERNEL, b"\x7fELF bf17 ", 1)
    first, *_ = compared(make_wheel(), make_wheel(edited, compilers={"cxx": "g++ 14.1.0"}), tmp_path)
    assert (first.name, first.verdict) == ("rebuilt device binary attention_bf16.sm_80", Verdict.FAIL)


def test_rebuild_takes_the_wheels_commit_and_leaves_the_clone_as_it_was(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path
) -> None:
    wheel = make_wheel()
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    with pytest.raises(VerifyError, match=r"no \./nox"):
        rebuild(read_wheel(wheel, tmp_path / "given"), root, tmp_path)
    assert not (tmp_path / "tree").exists()
    assert (root / "lockfiles" / "build.txt").is_file()
