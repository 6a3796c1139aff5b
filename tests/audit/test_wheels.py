"""Wheels: tags, RECORD, the name that the package loads."""

from pathlib import Path

import pytest
from audit_builders import (
    HOST,
    KERNELS_TOML,
    PACKAGE,
    Row,
    Workshop,
    audit,
    edited_record,
    failures,
    named,
    package_files,
)
from elftools.elf.elffile import ELFFile

from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import Tables

MODULE = 'extern "C" __attribute__((visibility("default"))) void* PyInit_%s() { return nullptr; }'
LOCAL = "flash_science-1.0-cp311-cp311-linux_x86_64.whl"


def foreign_wheel(workshop: Workshop, file: str, init: str, source: str, name: str = LOCAL) -> Path:
    library = workshop.extension({"bind.cpp": MODULE % init})
    return workshop.wheel({"flash_science/__init__.py": source, file: library.read_bytes()}, name=name)


def test_f11_built_under_one_name_imported_under_another(workshop: Workshop) -> None:
    path = foreign_wheel(
        workshop, "flash_science/flash_attention_science.so", "flash_attention_science", "from . import _C\n"
    )
    check = named(audit(path), "the package loads this file: _C")
    assert "built as `flash_attention_science.so`, loaded as `_C`" in check.why
    assert "flash_science/__init__.py:1 loads module `_C`" in check.found


def test_f11_absolute_import(workshop: Workshop) -> None:
    path = foreign_wheel(workshop, "flash_attention_science.so", "flash_attention_science", "import torch\nimport _C\n")
    assert named(audit(path), "the package loads this file: _C")


def test_f11_module_function_of_another_name(workshop: Workshop) -> None:
    path = foreign_wheel(workshop, "flash_science/_C.so", "flash_attention_science", "from . import _C\n")
    check = named(audit(path), "module name: _C.so")
    assert (check.found, check.expected) == ("it exports PyInit_flash_attention_science", "PyInit__C")


def test_right_module_name_passes(workshop: Workshop) -> None:
    path = foreign_wheel(
        workshop,
        "flash_science/_C.cpython-311-x86_64-linux-gnu.so",
        "_C",
        "from flash_science._C import forward\ntry:\n    from ._version import __version__\nexcept ImportError:\n    __version__ = '0'\n",
    )
    report = audit(path)
    assert not [c for c in failures(report) if "loads" in c.name or "module name" in c.name]
    assert any(
        "flash_science/_C.cpython-311-x86_64-linux-gnu.so: named in the sources" in c.found for c in report.checks
    )


def test_a_public_module_outside_of_a_package_is_imported_by_its_name(workshop: Workshop) -> None:
    source = 'extern "C" __attribute__((visibility("default"))) void* PyInit_fast() { return nullptr; }'
    extension = workshop.extension({"bind.cpp": source}, name="fast.so").read_bytes()
    name = "fast-1.0-cp311-cp311-linux_x86_64.whl"
    report = audit(workshop.wheel({"fast.cpython-311-x86_64-linux-gnu.so": extension}, name=name))
    (check,) = (each for each in report.checks if "the package loads this file" in each.name)
    assert check.verdict is Verdict.PASS, check.found
    assert "imported by their own names" in check.found


def test_name_put_together_at_run_time_is_a_warning(workshop: Workshop) -> None:
    path = foreign_wheel(
        workshop,
        "flash_science/_C.so",
        "_C",
        "import importlib\nname = '_' + 'C'\nimportlib.import_module('.' + name, __name__)\n",
    )
    assert [c.verdict for c in audit(path).checks if "the package loads" in c.name] == [Verdict.WARN]


def test_f11_in_our_own_wheel(workshop: Workshop, sound: Path, tables: Tables) -> None:
    path = workshop.wheel(package_files(sound, name="flash_attention_science.so"))
    report = audit(path, tables=tables)
    assert (
        "built as `flash_attention_science.so`, loaded as `libflashmoe.so`"
        in named(report, "the package loads this file: libflashmoe.so").why
    )


def test_library_in_the_wrong_folder(workshop: Workshop, sound: Path, tables: Tables) -> None:
    files = package_files(sound)
    files["libflashmoe.so"] = files.pop("flashmoe/libflashmoe.so")
    assert (
        named(audit(workshop.wheel(files), tables=tables), "the package loads this file").expected
        == "flashmoe/libflashmoe.so and no other"
    )


def test_tag_below_the_content(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    host = (
        HOST + 'extern "C" int copy_new();\n__asm__(".symver copy_new, memcpy@GLIBC_2.14");\nint keep = copy_new();\n'
    )
    path = workshop.wheel(
        package_files(workshop.library(rows, host=host)),
        name="flashmoe_kernels-0.1.0-py3-none-manylinux_2_5_x86_64.whl",
    )
    report = audit(path, tables=tables)
    assert named(report, "auditwheel").expected == "manylinux_2_5_x86_64, as the file name says"


def test_glibc_bump_makes_the_tag_false(workshop: Workshop, rows: tuple[Row, ...], tables: Tables) -> None:
    host = HOST + 'extern "C" int stat_new();\n__asm__(".symver stat_new, stat@GLIBC_2.33");\nint keep = stat_new();\n'
    report = audit(workshop.wheel(package_files(workshop.library(rows, host=host))), tables=tables)
    assert "manylinux_2_3" in named(report, "auditwheel").found
    assert named(report, "version floor: GLIBC_2.33")


def test_tag_for_any_platform(workshop: Workshop, sound: Path, tables: Tables) -> None:
    path = workshop.wheel(package_files(sound), name="flashmoe_kernels-0.1.0-py3-none-any.whl", pure=True)
    assert "took it for a pure Python wheel" in named(audit(path, tables=tables), "wheel tag").why


def test_a_platform_wheel_in_the_folder_for_pure_python_is_a_warning(
    workshop: Workshop, sound: Path, tables: Tables
) -> None:
    """As in NVIDIA's own wheels: pip follows the tag, so no import fails."""
    report = audit(workshop.wheel(package_files(sound), pure=True), tables=tables)
    (check,) = (check for check in report.checks if "Root-Is-Purelib" in check.name)
    assert check.verdict is Verdict.WARN
    assert "any platform" not in check.why


def test_renamed_wheel(workshop: Workshop, sound: Path, tables: Tables) -> None:
    path = workshop.wheel(package_files(sound), tag="py3-none-linux_x86_64")
    assert "renamed after the build" in named(audit(path, tables=tables), "wheel tag").why


def test_python_api_under_a_tag_for_all_pythons(workshop: Workshop) -> None:
    library = workshop.extension(
        {
            "bind.cpp": 'extern "C" void* PyModule_Create2(void*, int); extern "C" void* PyInit__C() { return PyModule_Create2(nullptr, 1); }'
        }
    )
    files = {"flash_science/__init__.py": "from . import _C\n", "flash_science/_C.so": library.read_bytes()}
    path = workshop.wheel(files, name="flash_science-1.0-py3-none-manylinux_2_28_x86_64.whl")
    assert "PyModule_Create2" in named(audit(path), "wheel tag").found


def test_edited_member(workshop: Workshop, sound: Path, tables: Tables) -> None:
    path = workshop.wheel(package_files(sound), record=edited_record)
    assert "flashmoe/__init__.py" in named(audit(path, tables=tables), "wheel record").found


def test_member_outside_the_record(workshop: Workshop, sound: Path, tables: Tables) -> None:
    path = workshop.wheel(
        package_files(sound),
        record=lambda text: "\n".join(line for line in text.splitlines() if "_extension" not in line) + "\n",
    )
    assert "flashmoe/_extension.py (not in RECORD)" in named(audit(path, tables=tables), "wheel record").found


def test_a_line_without_a_member_and_a_wrong_size(workshop: Workshop, sound: Path, tables: Tables) -> None:
    def edit(text: str) -> str:
        first, rest = text.split("\n", 1)
        return f"{first.rsplit(',', 1)[0]},7\nflashmoe/lost.py,sha256=x,1\n{rest}"

    found = named(audit(workshop.wheel(package_files(sound), record=edit), tables=tables), "wheel record").found
    size = len(PACKAGE["flashmoe/__init__.py"])
    assert found == f"differs: flashmoe/__init__.py (7 bytes stated, {size} held), flashmoe/lost.py (missing)"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('"flashmoe/__init__.py', "flashmoe/__init__.py (not path, hash and size)"),
        ("flashmoe/other.py,sha256=x", "flashmoe/other.py,sha256=x (not path, hash and size)"),
        ("flashmoe/__init__.py,,", "flashmoe/__init__.py (2 lines)"),
    ],
)
def test_a_line_of_record_that_can_be_read_in_two_ways(
    workshop: Workshop, sound: Path, tables: Tables, line: str, told: str
) -> None:
    path = workshop.wheel(
        package_files(sound), record=lambda text: f"{line}\n{text}" if line[0] != '"' else f"{text}{line}\n"
    )
    assert told in named(audit(path, tables=tables), "wheel record").found


def test_wheel_without_provenance(workshop: Workshop, sound: Path, tables: Tables) -> None:
    files = package_files(sound)
    del files["flashmoe/provenance.json"]
    assert named(audit(workshop.wheel(files), tables=tables), "provenance")


def test_package_that_loads_nothing_is_not_proved(workshop: Workshop, sound: Path, tables: Tables) -> None:
    files = {**package_files(sound), "flashmoe/_extension.py": "library = None\n"}
    report = audit(workshop.wheel(files), tables=tables)
    assert any("the package loads" in c.name and c.verdict is not Verdict.PASS for c in report.checks)
    assert PACKAGE["flashmoe/_extension.py"] not in files.values()


def test_name_that_a_loader_gives_is_no_mistake(workshop: Workshop) -> None:
    source = "from importlib.util import spec_from_file_location\nspec = spec_from_file_location('core_ops', path)\n"
    path = foreign_wheel(workshop, "flash_science/libcore.so", "core_ops", source)
    assert not [c for c in failures(audit(path)) if "module name" in c.name]


def test_private_names_of_a_package_are_no_extensions(workshop: Workshop) -> None:
    library = workshop.extension({"bind.cpp": MODULE % "_C"})
    files = {
        "flash_science/__init__.py": "from . import _C\n",
        "flash_science/io/__init__.py": "from ._video import (\n    read,\n    _probe,\n)\n_cache: dict = {}\n",
        "flash_science/io/_video.py": "def read(): ...\ndef _probe(): ...\n",
        "flash_science/use.py": "import _thread\nfrom sys import _getframe\nfrom .io import _probe, _cache\nfrom flash_science.io import _probe as p\n",
        "flash_science/_C.so": library.read_bytes(),
    }
    assert not [c for c in failures(audit(workshop.wheel(files, name=LOCAL))) if "loads" in c.name]


@pytest.mark.parametrize(("requirement", "is_wrong"), [("cffi>=1.0", False), ("numpy", True)])
def test_a_private_module_of_a_required_distribution(workshop: Workshop, requirement: str, is_wrong: bool) -> None:
    """Like soundfile, which imports cffi's _cffi_backend and opens its own library by a name built at run time."""
    files: dict[str, bytes | str] = {
        "flash_science/__init__.py": "import _cffi_backend\n",
        "flash_science/libdata_x.so": workshop.extension({"d.cpp": "int x;"}).read_bytes(),
        "flash_science-1.0.dist-info/METADATA": f"Name: flash_science\nVersion: 1.0\nRequires-Dist: {requirement}\n",
        "flash_science-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n",
    }
    found = [check.name for check in failures(audit(workshop.wheel_of(files, LOCAL))) if "_cffi_backend" in check.name]
    assert bool(found) is is_wrong


@pytest.mark.parametrize(
    ("body", "is_wrong"),
    [
        ("return ctypes.CDLL('libcuda.so.1')", False),
        ("return ctypes.CDLL('libcuda.so')", True),
        ('"""As by gdb:\n\n    call dlopen("/home/me/libcuda.so", 2)\n    """', False),
        ('return """Not by itself:\n\n    call dlopen("/home/me/libcuda.so", 2)\n    """', True),
        ("return None  # ctypes.CDLL('libcuda.so')", False),
    ],
)
def test_a_library_of_the_system_that_a_tool_opens(workshop: Workshop, body: str, is_wrong: bool) -> None:
    """Like a tool of onnxruntime that opens the driver, next to a library that others open by a name built at run time.

    A docstring in debugpy mentions a library but opens none.
    """
    files: dict[str, bytes | str] = {
        "flash_science/__init__.py": f"import ctypes\n\n\ndef tune():\n    {body}\n",
        "flash_science/libdata.so.1": workshop.extension({"d.cpp": "int x;"}).read_bytes(),
    }
    found = [check.name for check in failures(audit(workshop.wheel(files, name=LOCAL))) if "libcuda.so" in check.name]
    assert bool(found) is is_wrong


def test_carried_libraries_are_used_but_not_judged(workshop: Workshop) -> None:
    """As grafted by auditwheel: stripped, renamed, found through a relative run path."""
    carried = workshop.extension(
        {"dep.cpp": 'extern "C" int helper() { return 1; }'},
        link=["-s", "-Wl,-soname,libdep-1234.so.1.1.1k"],
        name="libdep-1234.so.1.1.1k",
    )
    library = workshop.extension(
        {"bind.cpp": 'extern "C" int helper(); extern "C" int PyInit__C() { return helper(); }'},
        link=[str(carried), "-Wl,-rpath,$ORIGIN/../flash_science.libs"],
    )
    files = {
        "flash_science/__init__.py": "from . import _C\n",
        "flash_science/_C.so": library.read_bytes(),
        "flash_science.libs/libdep-1234.so.1.1.1k": carried.read_bytes(),
    }
    report = audit(workshop.wheel(files, name=LOCAL))
    assert not failures(report), failures(report)
    assert [c.verdict for c in report.checks if c.name.endswith("carried library")] == [Verdict.SKIP]
    damaged = {**files, "flash_science.libs/libdep-1234.so.1.1.1k": "text"}
    assert named(audit(workshop.wheel(damaged, name=LOCAL)), "libdep-1234.so.1.1.1k: input: not an ELF file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("stages = 1", "stages = 2"), "other tables: 2 kernel rows differ"),
        (("schema = 1", "schema = 7"), "kernels.toml has schema 7"),
        (("[[attention_forward.sm80]]", "[[attention_forward.sm80"), "kernels.toml is not TOML"),
    ],
)
def test_wheel_with_other_tables(
    workshop: Workshop, sound: Path, tables: Tables, change: tuple[str, str], message: str
) -> None:
    path = workshop.wheel(package_files(sound, kernels=KERNELS_TOML.replace(*change)))
    assert message in named(audit(path, tables=tables), ": tables").found


def test_wheel_without_tables(workshop: Workshop, sound: Path, tables: Tables) -> None:
    files = package_files(sound)
    del files["flashmoe/_tables/tables/arch.toml"]
    assert "arch.toml" in named(audit(workshop.wheel(files), tables=tables), ": tables").found


def test_tag_of_another_machine(workshop: Workshop, sound: Path, tables: Tables) -> None:
    """Read according to its header, AArch64, with that machine's relocation numbers."""
    content = bytearray(sound.read_bytes())
    with sound.open("rb") as stream:
        tables_of_both = [ELFFile(stream).get_section_by_name(name) for name in (".rela.dyn", ".rela.plt")]
        for table in filter(None, tables_of_both):
            for at in range(table["sh_offset"] + 8, table["sh_offset"] + table["sh_size"], 24):
                kind = {1: 257, 6: 1025, 7: 1026, 8: 1027}[int.from_bytes(content[at : at + 4], "little")]
                content[at : at + 4] = kind.to_bytes(4, "little")
    content[18:20] = (183).to_bytes(2, "little")
    path = sound.with_name("libflashmoe.aarch64.so")
    path.write_bytes(content)
    report = audit(workshop.wheel(package_files(path)), tables=tables)
    assert "flashmoe/libflashmoe.so is for aarch64" in named(report, "wheel tag").found
