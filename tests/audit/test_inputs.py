"""Fails closed: anything that could not be read is never a pass, and each kind is named."""

import os
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from audit_builders import PACKAGE, Workshop, audit, complete, failures, package_files, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashmoe_tools.audit.cubin import read_cubin
from flashmoe_tools.audit.elf import read_elf
from flashmoe_tools.audit.engine import exit_is_empty
from flashmoe_tools.audit.errors import AuditError
from flashmoe_tools.report import Check, Verdict


def refused(path: Path, kind: str) -> Check:
    report = audit(path)
    assert report.verdict is Verdict.FAIL
    found = [check for check in failures(report) if check.name.endswith(f"input: {kind}")]
    assert found, [f"{c.name}: {c.found}" for c in failures(report)]
    return complete(found[0])


UNREADABLE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "text": (lambda path: path.write_text("this is no library\n" * 20), "not an ELF file", "it is text"),
    "a short first line": (lambda path: path.write_text("hello\nworld\n"), "not an ELF file", "it is text"),
    "empty": (lambda path: path.touch(), "not an ELF file", "it is empty (0 bytes"),
    "a link to nothing": (lambda path: path.symlink_to("gone.so"), "unreadable", "is a broken symbolic link"),
    "a FIFO": (os.mkfifo, "unreadable", "is not a regular file"),
    "missing": (lambda path: None, "unreadable", "does not exist"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_no_library_says_what_it_is(tmp_path: Path, case: str) -> None:
    make, kind, words = UNREADABLE[case]
    make(tmp_path / "_C.so")
    assert words in refused(tmp_path / "_C.so", kind).found
    assert exit_is_empty(audit(tmp_path / "_C.so")) == (kind == "unreadable")


def test_a_huge_file_is_refused_unread(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GB of holes: first not an ELF file by its first bytes, then one too large to read into memory."""

    def refuse(self: Path) -> bytes:
        raise AssertionError(f"{self.name} was read whole")

    path = tmp_path / "_C.so"
    for head, kind in ((b"", "not an ELF file"), (sound.read_bytes()[:4096], "unreadable")):
        path.write_bytes(head)
        os.truncate(path, 64 << 30)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", refuse)
            assert str(64 << 30) in refused(path, kind).found


def test_a_folder_by_its_dot_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert audit(Path()).data["path"] == tmp_path.name


def test_unreadable_file(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the operating system's error itself, because the tests may run as root, who can read everything."""

    def deny(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)
    assert refused(sound, "unreadable").found == "cannot read libflashmoe.so: Permission denied"


@pytest.mark.parametrize("content", [{}, {"README.txt": "nothing here"}], ids=["empty", "text only"])
def test_folder_without_an_extension(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    assert "contains no extension (*.so) and no wheel" in refused(tmp_path, "empty").found
    assert exit_is_empty(audit(tmp_path))


def test_folder_with_one_bad_file_fails(workshop: Workshop, sound: Path) -> None:
    folder = workshop.fresh("mixed")
    (folder / "libflashmoe.so").write_bytes(sound.read_bytes())
    (folder / "_C.so").write_text("text")
    assert refused(folder, "not an ELF file").name == "_C.so: input: not an ELF file"


@pytest.mark.parametrize("keep", [4, 40, 63, 64, 1000, 0.3, 0.6, 0.9, 0.99])
def test_truncated(sound: Path, tmp_path: Path, keep: float) -> None:
    content = sound.read_bytes()
    path = tmp_path / "libflashmoe.so"
    path.write_bytes(content[: int(keep) if keep >= 1 else int(len(content) * keep)])
    assert "is cut short" in refused(path, "damaged ELF file").found


def test_section_headers_removed(sound: Path, tmp_path: Path) -> None:
    content = bytearray(sound.read_bytes())
    struct.pack_into("<Q", content, 40, 0)  # e_shoff
    struct.pack_into("<HH", content, 60, 0, 0)  # e_shnum, e_shstrndx
    path = tmp_path / "libflashmoe.so"
    path.write_bytes(bytes(content))
    assert "no dynamic symbol table" in refused(path, "no dynamic symbols").found


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(4, b"\x01", "not a 64-bit"), (18, b"\x15\x00", "EM_PPC64"), (16, b"\x02\x00", "ET_EXEC")],
)
def test_other_machine(sound: Path, tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    content = bytearray(sound.read_bytes())
    content[offset : offset + len(value)] = value
    path = tmp_path / "libflashmoe.so"
    path.write_bytes(bytes(content))
    assert message in refused(path, "another kind of ELF file").found


def test_object_file_is_no_extension(workshop: Workshop) -> None:
    _, objects = workshop.objects({"a.cpp": "int f() { return 1; }"})
    assert "is an object file" in refused(objects[0], "empty").found


def test_archive_is_no_extension(workshop: Workshop) -> None:
    folder, objects = workshop.objects({"a.cpp": "int f() { return 1; }"})
    run(["ar", "rcs", "lib.so", objects[0].name], cwd=folder)
    refused(folder / "lib.so", "not an ELF file")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_anywhere_is_typed(sound: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever a few flipped bytes do to headers and tables, the result is facts or a typed error."""
    content = bytearray(sound.read_bytes())
    places = st.one_of(
        st.integers(0, 63), st.integers(len(content) - 3000, len(content) - 1), st.integers(0, len(content) - 1)
    )
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(places)] = data.draw(st.integers(0, 255))
    path = tmp_path / "libflashmoe.so"
    path.write_bytes(bytes(content))
    with suppress(AuditError):  # anything else fails the test
        read_elf(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_cubin_is_typed(rows: tuple, data: st.DataObject) -> None:  # type: ignore[type-arg]
    content = bytearray(rows[0].content)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(AuditError):  # anything else fails the test
        read_cubin(bytes(content), "cubin")


def bad_wheel(tmp_path: Path, *, change: str) -> Path:
    path = tmp_path / "flashmoe_kernels-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("flashmoe/libflashmoe.so", b"\x7fELF")
        if change == "outside":
            archive.writestr("../../evil.so", b"\x7fELF")
        elif change == "absolute":
            archive.writestr("/tmp/evil.so", b"\x7fELF")
        elif change == "twice":
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr("flashmoe/libflashmoe.so", b"other")
        elif change == "bomb":
            archive.writestr("flashmoe/data.bin", b"\0" * (17 << 20))
        elif change == "link":
            link = zipfile.ZipInfo("flashmoe/link.so")
            link.external_attr = 0o120777 << 16
            archive.writestr(link, "/etc/passwd")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("outside", "points outside the wheel"),
        ("absolute", "points outside the wheel"),
        ("twice", "is in it twice"),
        ("bomb", "to 17825792 bytes"),
        ("link", "is a link or a device"),
        ("plain", ".dist-info/WHEEL is missing"),
    ],
)
def test_wheel_that_no_builder_made(tmp_path: Path, change: str, message: str) -> None:
    assert message in refused(bad_wheel(tmp_path, change=change), "damaged wheel").found


def test_encrypted_wheel(tmp_path: Path) -> None:
    path = bad_wheel(tmp_path, change="plain")
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(bytes(content))
    assert "is encrypted" in refused(path, "damaged wheel").found


def test_text_file_named_whl(tmp_path: Path) -> None:
    path = tmp_path / "flashmoe_kernels-0.1.0-py3-none-any.whl"
    path.write_text("no zip")
    assert "BadZipFile" in refused(path, "damaged wheel").found


def test_truncated_wheel(workshop: Workshop, sound: Path) -> None:
    path = workshop.wheel(package_files(sound))
    path.write_bytes(path.read_bytes()[:-200])
    refused(path, "damaged wheel")


def test_wheel_with_damaged_member(workshop: Workshop, sound: Path) -> None:
    path = workshop.wheel(package_files(sound))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = b"\xff" * 64
    path.write_bytes(bytes(content))
    refused(path, "damaged wheel")


def test_wheel_without_an_extension(workshop: Workshop) -> None:
    path = workshop.wheel(PACKAGE)
    assert "contains no extension" in refused(path, "empty").found
    assert exit_is_empty(audit(path))


def test_wheel_with_a_text_file_as_extension(workshop: Workshop) -> None:
    path = workshop.wheel({**PACKAGE, "flashmoe/libflashmoe.so": "text"})
    assert refused(path, "not an ELF file").name == "flashmoe/libflashmoe.so: input: not an ELF file"
