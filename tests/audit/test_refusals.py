"""Damaged files and other machines that no builder makes: what the audit's readers report about them."""

import builtins
import io
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from flashmoe.errors import ArgumentError, ExitCode, TableError
from flashmoe_tools.audit import cli, cubin, elf, engine, guard, inputs, layout, policy, torch_libraries
from flashmoe_tools.audit.errors import (
    DamagedElfError,
    EmbeddedError,
    ForeignMachineError,
    ShimDataError,
    ToolMissingError,
    UnreadableError,
)
from flashmoe_tools.report import Verdict, read_report


@pytest.fixture(scope="module")
def library(sound: Path) -> bytes:
    """A valid library, until a test changes it."""
    return sound.read_bytes()


def changed(content: bytes, place: int, form: str, value: int) -> bytes:
    data = bytearray(content)
    struct.pack_into(form, data, place, value)
    return bytes(data)


def section_place(content: bytes, name: str, field: int) -> int:
    """The file offset of a field of a section's header: field 24 is the offset, 32 the size."""
    file = ELFFile(io.BytesIO(content))
    index = next(number for number, section in enumerate(file.iter_sections()) if section.name == name)
    return int(file["e_shoff"] + index * file["e_shentsize"] + field)


def test_sections_that_are_longer_than_the_file(library: bytes) -> None:
    place = section_place(library, ".dynstr", 32)
    damaged = ELFFile(io.BytesIO(changed(library, place, "<Q", len(library) * 2)))
    with pytest.raises(
        DamagedElfError, match=rf"section \.dynstr claims {2 * len(library)} bytes, the file holds \d+ of"
    ):
        elf.section_data(damaged, ".dynstr")
    assert elf.section_data(damaged, ".no-such-section") is None
    sound = ELFFile(io.BytesIO(library))
    assert elf.section_data(sound, ".dynstr") == sound.get_section_by_name(".dynstr").data()


class Section(dict[str, int]):
    """A table without entries, with these bytes."""

    name = ".symtab"

    def __init__(self, content: bytes) -> None:
        super().__init__(sh_size=len(content), sh_link=0)
        self._content = content

    def data(self) -> bytes:
        return self._content


def test_symbol_tables_that_are_no_whole_number_of_symbols_or_too_many(
    library: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = ELFFile(io.BytesIO(library)).get_section_by_name(".dynsym")["sh_size"]
    place = section_place(library, ".dynsym", 32)
    size = len(library) * 24
    longer = ELFFile(io.BytesIO(changed(library, place, "<Q", size)))
    with pytest.raises(DamagedElfError, match=rf"\.dynsym claims {size} bytes, the file holds \d+ of them"):
        list(elf._symbols(longer, longer.get_section_by_name(".dynsym"), {}))
    table: Any = Section(b"\0" * 25)
    with pytest.raises(DamagedElfError, match=r"\.symtab claims 25 bytes, the file holds 25 of them"):
        list(elf._symbols(SimpleNamespace(get_section=lambda _: table), table, {}))  # type: ignore[arg-type]
    file, count = ELFFile(io.BytesIO(library)), sound // 24
    section = file.get_section_by_name(".dynsym")
    monkeypatch.setattr(elf, "MAX_SYMBOLS", count - 1)
    with pytest.raises(DamagedElfError, match=f"holds {count} symbols, more than the {count - 1} that an audit reads"):
        list(elf._symbols(file, section, {}))
    monkeypatch.setattr(elf, "MAX_SYMBOLS", count)
    assert len(list(elf._symbols(file, section, {}))) <= count


def test_a_header_that_cannot_be_read(library: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DamagedElfError, match=r"x is cut short: 63 bytes, an ELF header alone has 64"):
        elf.open_elf(library[:63], "x")
    for place, value in ((4, 1), (5, 2)):
        with pytest.raises(ForeignMachineError, match=r"not a 64-bit little-endian ELF file \(class \d, data \d\)"):
            elf.open_elf(changed(library, place, "<B", value), "x")
    with pytest.raises(DamagedElfError, match=r"x is cut short: .* its program header table ends at byte"):
        elf.open_elf(changed(library, 32, "<Q", len(library)), "x")
    with pytest.raises(DamagedElfError, match=r"x is cut short: .* its section header table ends at byte"):
        elf.open_elf(library[:-1], "x")

    def damaged(_: io.BytesIO) -> Any:
        raise AssertionError("what pyelftools raises")

    monkeypatch.setattr(elf, "require_pyelftools", lambda: damaged)
    text = r"x: the ELF header cannot be read \(AssertionError: what pyelftools raises\)"
    with pytest.raises(DamagedElfError, match=text):
        elf.open_elf(library, "x")


def test_without_the_reader_of_elf_files(library: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imported = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("elftools"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    (tmp_path / "lib.so").write_bytes(library)
    for call in (
        elf.require_pyelftools,
        lambda: elf.open_elf(library, "x"),
        lambda: elf.read_elf(tmp_path / "lib.so"),
        lambda: elf.exported_names(tmp_path / "lib.so"),
    ):
        with pytest.raises(ToolMissingError, match="pyelftools is not installed"):
            call()


def test_attributes_of_kernels() -> None:
    sized, plain = struct.pack("<BBH", cubin._SIZED, 7, 3) + b"abc", struct.pack("<BBH", cubin._SIZED ^ 1, 9, 0x0201)
    assert list(cubin._attributes(sized + plain)) == [(7, b"abc"), (9, b"\x01\x02")]
    assert list(cubin._attributes(sized + b"\0\0\0")) == [(7, b"abc")]
    with pytest.raises(EmbeddedError, match="attribute 0x7 of a kernel runs 2 bytes over its section"):
        list(cubin._attributes(sized[:-2]))


@pytest.mark.parametrize(
    ("header", "attribute", "text"),
    [
        (0, 40, ""),
        (40, 40, ""),
        (40, None, ""),
        (41, 40, "41 registers in its section header, 40 in its"),
        (0, None, "no register"),
    ],
)
def test_registers_are_stated_once_or_alike(header: int, attribute: int | None, text: str) -> None:
    section = {"sh_info": header << 24, "sh_size": 8}
    file: Any = SimpleNamespace(get_section_by_name=lambda name: section if name == ".text.k" else None)
    shared = {} if attribute is None else {cubin._REGISTERS: attribute}
    if text:
        with pytest.raises(EmbeddedError, match=text):
            cubin._kernel(file, "k", shared, has_reserved=False)
    else:
        assert cubin._kernel(file, "k", shared, has_reserved=False).registers == 40
    none: Any = SimpleNamespace(get_section_by_name=lambda _: None)
    with pytest.raises(EmbeddedError, match="kernel k has launch attributes but no code"):
        cubin._kernel(none, "k", {}, has_reserved=False)


def test_a_rule_of_ours_that_fails_is_not_the_files_doing() -> None:
    def raises(error: Exception) -> Callable[[], Any]:
        def work() -> Any:
            raise error

        return work

    for error in (TableError("a rule"), ImportError("a package")):
        with pytest.raises(type(error)):
            guard.guarded("x", raises(error))
    (check,) = guard.guarded("x", raises(DamagedElfError("damage", "a step")))
    assert (check.verdict, check.found, check.next_step) == (Verdict.FAIL, "damage", "a step")
    (check,) = guard.guarded("x", raises(KeyError("damage")))
    assert check.found == "KeyError: 'damage'"
    with pytest.raises(Exception, match=r"x is not JSON.*duplicate key among \['a'\]"):
        guard.parse_json(b'{"a": 1, "a": 1}', "x")


def test_what_cannot_be_opened_or_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreadableError, match=r"gone\.whl does not exist"):
        inputs.unpack(tmp_path / "gone.whl", tmp_path)
    (tmp_path / "folder.whl").mkdir()
    with pytest.raises(UnreadableError, match=r"cannot read folder\.whl: Is a directory"):
        inputs.unpack(tmp_path / "folder.whl", tmp_path)

    def refuse(error: OSError) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> Any:
            raise error

        return call

    monkeypatch.setattr(inputs.Path, "open", refuse(OSError("no number")))
    with pytest.raises(UnreadableError, match=r"cannot read a\.whl: no number"):
        inputs.unpack(tmp_path / "a.whl", tmp_path)
    monkeypatch.setattr(inputs.Path, "rglob", refuse(PermissionError(13, "Permission denied")))
    with pytest.raises(UnreadableError, match=r"cannot list .*: Permission denied"):
        inputs.collect(tmp_path)


def test_rules_and_shims_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy.toml").write_text("floor = 1")
    for name in ("policy.toml", "gone.toml"):
        with pytest.raises(TableError, match=rf"the audit's rules \({name}\) cannot be read"):
            policy.load_policy(tmp_path / name)
    monkeypatch.setattr(torch_libraries, "DATA", tmp_path)
    with pytest.raises(ShimDataError, match=r"no shim data for torch 2\.10\.0; there is data for no version"):
        torch_libraries.shim_data("2.10.0")
    (tmp_path / "torch_shims_2.10.0.json").write_text(json.dumps({"schema": "other"}))
    with pytest.raises(ShimDataError, match=r"torch_shims_2\.10\.0\.json has schema 'other'"):
        torch_libraries.shim_data("2.11.0")
    with pytest.raises(ShimDataError, match=r"no shim data for torch 2\.9\.1; there is data for 2\.10\.0"):
        torch_libraries.shim_data("2.9.1")
    monkeypatch.setattr(torch_libraries, "installed_torch", lambda: None)
    with pytest.raises(ShimDataError, match="torch is not installed here"):
        torch_libraries.write_data(tmp_path)


# The command, in this process


def _arguments(path: Path, **given: Any) -> Any:
    options = {
        "torch_version": None,
        "targets": None,
        "foreign": False,
        "objects": None,
        "source": None,
        "details": False,
        "json": None,
    }
    return SimpleNamespace(path=path, **{**options, **given})


def test_options_that_mean_nothing(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="an empty path"):
        cli.given_path("")
    assert cli.given_path("a") == Path("a")
    assert cli.given_targets(None) is None
    assert cli.given_targets(" sm_80 ,,sm_90a") == ("sm_80", "sm_90a")
    with pytest.raises(ArgumentError, match=r"--targets 'sm_80,sm_1': "):
        cli.given_targets("sm_80,sm_1")
    for version in ("newest", "2"):
        with pytest.raises(ArgumentError, match=f"--torch-version '{version}' is not a version; write it as"):
            cli.run(_arguments(tmp_path, torch_version=version))
    report = engine.audit(tmp_path, engine.Options(source=tmp_path / "gone"))
    assert any("is not a folder, so declarations cannot be looked up" in check.found for check in report.checks)
    assert report.verdict is Verdict.FAIL


def test_a_report_is_written_where_asked_and_an_empty_folder_proves_nothing(tmp_path: Path, library: bytes) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("x")
    assert cli.run(_arguments(tmp_path / "in")) == ExitCode.NOTHING_CHECKED
    suffix = ".cpython-" + "".join(map(str, sys.version_info[:2])) + f"-{os.uname().machine}-linux-gnu.so"
    (tmp_path / "in" / f"_json{suffix}").write_bytes(library)
    code = cli.run(_arguments(tmp_path / "in", json=tmp_path / "report.json", torch_version="2.10"))
    assert read_report(tmp_path / "report.json").exit_code == code != ExitCode.NOTHING_CHECKED


def test_sizes_of_a_local_header_stand_in_its_wide_field_alone() -> None:
    filled = layout._FILLED
    stamp = struct.pack("<HH5s", 0x5455, 5, b"\x01time")
    other = struct.pack("<HH2Q", 0x7875, 16, 1, 2)
    wide = struct.pack("<HH2Q", layout._ZIP64, 16, 70, 7)
    for extra, expected in (
        (b"", (filled, filled)),
        (stamp, (filled, filled)),
        (other, (filled, filled)),
        (struct.pack("<HHQ", layout._ZIP64, 8, 70), (filled, filled)),
        (stamp + wide, (7, 70)),
    ):
        assert layout._sizes(extra, filled, filled) == expected
        assert layout._sizes(extra, 3, 4) == (3, 4)
