"""Versioned symbols, missing libraries, names that are not Python's: the audit looks up what the loader looks up."""

import os
import sys
from pathlib import Path

import pytest
from audit_builders import BESIDE, HOST, Row, Workshop, audit, failures, named, only_failure, run

from flashmoe_tools.audit import resolve
from flashmoe_tools.audit.lookup import is_known_version
from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import Tables

FOO = 'extern "C" int foo() { return 1; }\nextern "C" int bar() { return 2; }\n'
CALL = 'extern "C" int bar(); extern "C" int PyInit__C() { return bar(); }'


def versioned(workshop: Workshop, source: str, script: str, name: str = "libfoo.so.1") -> Path:
    """A library whose symbols have the versions of a version script."""
    folder, objects = workshop.objects({"foo.cpp": source})
    (folder / "map").write_text(script)
    run(["g++", "-shared", *map(str, objects), f"-Wl,-soname,{name},--version-script=map", "-o", name], cwd=folder)
    return folder / name


def beside(extension: Path, library: Path) -> Path:
    (extension.parent / library.name).write_bytes(library.read_bytes())
    return extension


def test_a_versioned_symbol_is_looked_up(workshop: Workshop) -> None:
    full = versioned(workshop, FOO, "FOO_1 { global: foo; bar; local: *; };")
    path = beside(workshop.extension({"bind.cpp": CALL}, link=[str(full), BESIDE]), full)
    assert audit(path).verdict is Verdict.PASS
    for source, script, cause in (
        (FOO, "FOO_1 { global: foo; local: *; };", "has FOO_1 but no `bar` in it"),
        (FOO, "FOO_2 { global: foo; bar; local: *; };", "does not define FOO_1"),
    ):
        beside(path, versioned(workshop, source, script))
        check = only_failure(audit(path), "undefined symbol: bar")
        assert "bar, version FOO_1 is undefined" in check.found
        assert cause in check.why


def test_a_library_without_versions_satisfies_any(workshop: Workshop) -> None:
    """Like the loader, which warns and binds."""
    full = versioned(workshop, FOO, "FOO_1 { global: foo; bar; local: *; };")
    path = workshop.extension({"bind.cpp": CALL}, link=[str(full), BESIDE])
    beside(path, workshop.extension({"foo.cpp": FOO}, link=["-Wl,-soname,libfoo.so.1"], name="libfoo.so.1"))
    assert not failures(audit(path))


def test_a_version_of_the_platform_that_never_existed(
    workshop: Workshop, rows: tuple[Row, ...], tables: Tables
) -> None:
    stub = versioned(workshop, FOO, "GLIBC_2.2.77 { global: foo; bar; local: *; };", "libc.so.6")
    host = HOST + 'extern "C" int bar();\nint keep = bar();\n'
    check = only_failure(
        audit(workshop.library(rows, host=host, link=[str(stub)]), tables=tables), "undefined symbol: bar"
    )
    assert "does not define GLIBC_2.2.77" in check.why


def test_a_version_newer_than_this_machine_is_only_held_to_the_floor(workshop: Workshop) -> None:
    stub = versioned(workshop, FOO, "GLIBC_2.999 { global: foo; bar; local: *; };", "libc.so.6")
    report = audit(workshop.extension({"bind.cpp": CALL}, link=[str(stub), BESIDE]))
    assert [check.name for check in failures(report)] == ["version floor: GLIBC_2.999"]
    found = {check.name: check.found for check in report.checks}
    assert (
        "1 newer than this machine's libraries, so only compared with the floor: GLIBC_2.999"
        in found["undefined symbols"]
    )


def test_versions_are_auditwheels() -> None:
    assert is_known_version("GLIBC", "2.17")
    assert is_known_version("GLIBC", "9.99"), "newer than every policy: the floor judges it"
    assert not is_known_version("GLIBC", "2.2.77")


def test_the_report_says_how_each_symbol_was_judged(sound: Path, tables: Tables) -> None:
    found = next(c.found for c in audit(sound, tables=tables).checks if c.name == "undefined symbols")
    assert found == "5 undefined: 1 of torch, judged by its own checks; 4 weak, and may stay undefined"


def test_a_needed_library_that_is_nowhere(workshop: Workshop) -> None:
    """Needed directly, and by a library that exists: the loader stops in both cases."""
    leaf = workshop.extension(
        {"l.cpp": 'extern "C" int leaf() { return 1; }'}, link=["-Wl,-soname,libleaf.so"], name="libleaf.so"
    )
    middle = workshop.extension(
        {"m.cpp": 'extern "C" int leaf(); extern "C" int bar() { return leaf(); }'},
        link=["-Wl,-soname,libmiddle.so", str(leaf), BESIDE],
        name="libmiddle.so",
    )
    path = workshop.extension({"bind.cpp": CALL}, link=[str(middle), BESIDE, "-Wl,--allow-shlib-undefined"])
    report = audit(path)
    assert "libmiddle.so, needed by _C.so, was not found" in named(report, "needed libraries: libmiddle.so").found
    assert "not on this machine: libmiddle.so" in named(report, "undefined symbols").why
    beside(path, middle)
    report = audit(path)
    assert "needed by libmiddle.so, was not found" in only_failure(report, "needed libraries: libleaf.so").found


def test_a_library_where_only_the_loader_looks(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder in /etc/ld.so.conf, like a CUDA toolkit, or in LD_LIBRARY_PATH."""
    library = workshop.extension({"foo.cpp": FOO}, link=["-Wl,-soname,libfar.so.1"], name="libfar.so.1")
    path = workshop.extension({"bind.cpp": CALL}, link=[str(library), BESIDE])
    assert named(audit(path), "needed libraries: libfar.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    assert audit(path).verdict is Verdict.PASS
    monkeypatch.delenv("LD_LIBRARY_PATH")
    program = tmp_path / "ldconfig"
    program.write_text(f"#!/bin/sh\nprintf '1 libs found\\n\\tlibfar.so.1 (libc6,x86-64) => {library}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    resolve.loader_cache.cache_clear()
    try:
        assert not failures(audit(path))
    finally:
        resolve.loader_cache.cache_clear()


def test_the_library_of_python_itself_is_loaded_already(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some extensions need it, although it is in no folder that the loader searches."""
    name = "libpython3.99.so.1.0"
    python = workshop.extension({"p.cpp": FOO}, link=[f"-Wl,-soname,{name}"], name=name)
    path = workshop.extension({"bind.cpp": CALL}, link=[str(python), BESIDE])
    assert named(audit(path), f"needed libraries: {name}")
    monkeypatch.setattr(resolve, "python_folder", lambda: python.parent)
    assert audit(path).verdict is Verdict.PASS


def test_a_32_bit_library_beside_the_file_is_passed_over(workshop: Workshop) -> None:
    """Like the loader; a file that is not ELF at all stops it."""
    full = versioned(workshop, FOO, "FOO_1 { global: foo; bar; local: *; };")
    path = beside(workshop.extension({"bind.cpp": CALL}, link=[str(full), BESIDE]), full)
    content = bytearray(full.read_bytes())
    content[4], content[18] = 1, 3  # ELFCLASS32, EM_386
    (path.parent / "libfoo.so.1").write_bytes(bytes(content))
    assert named(audit(path), "needed libraries: libfoo.so.1")
    (path.parent / "libfoo.so.1").write_text("text")
    assert "libfoo.so.1" in named(audit(path), "input: damaged ELF file").found


def test_a_name_that_no_python_has(workshop: Workshop) -> None:
    source = 'extern "C" int Py%s(); extern "C" int PyInit__C() { return Py%s(); }'
    assert (
        audit(workshop.extension({"bind.cpp": source % ("_IsInitialized", "_IsInitialized")})).verdict is Verdict.PASS
    )
    path = workshop.extension({"bind.cpp": source % ("Object_MakeFaster", "Object_MakeFaster")})
    assert "does not export it" in only_failure(audit(path), "undefined symbol: PyObject_MakeFaster").why
    other = "_C.cpython-39-x86_64-linux-gnu.so"
    assert sys.version_info[:2] != (3, 9)
    (path.parent / other).write_bytes(path.read_bytes())
    report = audit(path.parent / other)
    assert [c.found for c in report.checks if c.name == "Python names" and c.verdict is Verdict.WARN], (
        "cannot be known here"
    )
    assert not failures(report)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-pie"], "is a position-independent executable (PIE)"),
        (["-shared", "-z", "nodlopen"], "not to be opened at run time"),
    ],
    ids=["PIE", "nodlopen"],
)
def test_what_dlopen_refuses_by_its_kind(workshop: Workshop, flags: list[str], message: str) -> None:
    folder, objects = workshop.objects({"main.cpp": "int main() { return 0; }"})
    run(["g++", *flags, *map(str, objects), "-o", "_C.so"], cwd=folder)
    assert message in named(audit(folder / "_C.so"), "input: another kind of ELF file").found


def test_a_name_that_another_library_of_torch_exports(workshop: Workshop) -> None:
    """Not "another signature": the library exists, but nothing loads it."""
    source = 'extern "C" void* THPVariableClass; extern "C" void* PyInit__C() { return THPVariableClass; }'
    check = named(audit(workshop.extension({"bind.cpp": source})), "undefined symbol: THPVariableClass")
    assert "libtorch_python.so exports it, but no needed library loads that one" in check.why


def test_no_other_cause_is_given_while_a_library_is_absent(workshop: Workshop) -> None:
    stub = workshop.extension({"s.cpp": "int other;"}, link=["-Wl,-soname,libabsent.so"], name="libabsent.so")
    source = (
        "namespace c10 { struct Device; void use(Device*, char); }\nint mine(float) { return 1; }\nint mine(int);\n"
    )
    source += 'extern "C" int PyInit__C() { c10::use(nullptr, 1); return mine(1); }'
    link = ["-Wl,--no-as-needed", str(stub), "-Wl,--allow-shlib-undefined"]
    checks = failures(audit(workshop.extension({"bind.cpp": source}, link=link)))
    assert checks
    assert not [c for c in checks if "another signature" in c.why]


@pytest.mark.parametrize("name", ["manylinux2014_x86_64", "manylinux_2_17_x86_64"])
def test_an_old_tag_name_is_its_number(workshop: Workshop, name: str) -> None:
    """Content that needs less than the tag promises is valid under both spellings."""
    library = workshop.extension({"bind.cpp": 'extern "C" int PyInit__C() { return 1; }'}, link=["-nostdlib"])
    files = {"a/__init__.py": "from . import _C\n", "a/_C.so": library.read_bytes()}
    assert not failures(audit(workshop.wheel(files, name=f"a-1.0-cp311-cp311-{name}.whl")))
