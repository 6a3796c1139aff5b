"""What must pass does pass: our small library, a wheel with it, and real foreign libraries."""

from pathlib import Path

import pytest
from audit_builders import BESIDE, SITE, Row, Workshop, audit, failures, package_files, torch_library_folder

from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import Tables


def test_library_passes(sound: Path, tables: Tables) -> None:
    report = audit(sound, tables=tables)
    assert report.verdict is Verdict.PASS, [
        (c.name, c.verdict, c.found) for c in report.checks if c.verdict is not Verdict.PASS
    ]
    names = {check.name for check in report.checks}
    assert {
        "undefined symbols",
        "torch shims",
        "exports",
        "version floor",
        "kernel set",
        "launchability",
        "provenance",
    } <= names


def test_every_kernel_has_a_row_for_every_gpu(sound: Path, tables: Tables) -> None:
    launches = audit(sound, tables=tables).data["subjects"][0]["launchability"]
    expected = {
        (symbol, unit.target.name, gpu)
        for unit in tables.units()
        for _, symbol in unit.entries
        for gpu in unit.target.gpus
    }
    assert {(row["kernel"], row["target"], row["gpu"]) for row in launches} == expected
    assert all(row["blocks_per_sm"] >= 1 for row in launches)


def test_wheel_passes(workshop: Workshop, sound: Path, tables: Tables) -> None:
    report = audit(workshop.wheel(package_files(sound)), tables=tables)
    assert report.verdict is Verdict.PASS, [
        (c.name, c.verdict, c.found) for c in report.checks if c.verdict is not Verdict.PASS
    ]
    assert any(check.name.endswith(": auditwheel") for check in report.checks)


def test_folder_is_audited_whole(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    library = workshop.library(rows)
    workshop_folder = library.parent
    (workshop_folder / "notes.txt").write_text("not an extension")
    report = audit(workshop_folder, tables=tables)
    assert report.verdict is Verdict.PASS
    assert [s["label"] for s in report.data["subjects"]] == ["libflashmoe.so"]


@pytest.mark.parametrize(
    "part", ["numpy/core/_multiarray_umath.cpython-*-x86_64-linux-gnu.so", "torch/_C.cpython-*-x86_64-linux-gnu.so"]
)
def test_real_extension_without_torch_symbols_passes(part: str) -> None:
    path = next(iter(SITE.glob(part)))
    report = audit(path)
    assert not failures(report), failures(report)
    assert any(c.name == "torch shims" and c.verdict is Verdict.SKIP for c in report.checks)


def test_real_library_on_the_cxx_abi_is_refused_but_resolves() -> None:
    report = audit(torch_library_folder() / "libshm.so")
    assert [check.name for check in failures(report)] == ["torch C++ symbols"]
    assert "at::MapAllocator" in failures(report)[0].found
    assert any(c.name == "resolves against the installed torch" and c.verdict is Verdict.PASS for c in report.checks)


def test_symbol_of_an_indirectly_needed_library_is_found(workshop: Workshop) -> None:
    """The loader also searches what the needed libraries need, and nothing else; so does the audit."""
    leaf = workshop.extension(
        {"leaf.cpp": 'extern "C" int leaf() { return 1; }'}, link=["-Wl,-soname,libleaf.so"], name="libleaf.so"
    )
    middle_source = {"middle.cpp": 'extern "C" int leaf(); extern "C" int middle() { return leaf(); }'}
    middle = workshop.extension(
        middle_source, link=["-Wl,-soname,libmiddle.so", str(leaf), BESIDE], name="libmiddle.so"
    )
    source = 'extern "C" int leaf(); extern "C" int middle(); extern "C" int PyInit__C() { return leaf() + middle(); }'
    path = workshop.extension({"bind.cpp": source}, link=[str(middle), BESIDE, "-Wl,--allow-shlib-undefined"])
    for library in (leaf, middle):
        (path.parent / library.name).write_bytes(library.read_bytes())
    assert audit(path).verdict is Verdict.PASS
    (path.parent / "libleaf.so").write_bytes(middle.read_bytes())
    assert [check.name for check in failures(audit(path))] == ["undefined symbol: leaf"]
