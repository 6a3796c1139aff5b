"""Parameter structs are read from the C header that declares them, and a header that is misread does not compile."""

import ctypes
from pathlib import Path

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.emulation.build import Options, library
from flashmoe_build.emulation.parameters import layout_checks, structure
from flashmoe_tools.descriptors import Header

GOOD = """
struct Inner { int64_t row; };  // elements
struct Params {
  const void* q;  // [rows]; a comment; with semicolons
  float* out;
  Inner stride; /* another
                   comment; */
  int32_t rows;
  float scale;
};
"""


def header(folder: Path, text: str) -> Header:
    name = f"params_{folder.name}.h"
    (folder / name).write_text(f"#pragma once\n#include <cstdint>\nnamespace toy {{\n{text}\n}}\n")
    return Header("toy::Params", name)


def test_members_offsets_and_types(tmp_path: Path) -> None:
    found = structure(header(tmp_path, GOOD), (tmp_path,))
    assert [name for name, _ in found._fields_] == ["q", "out", "stride", "rows", "scale"]
    assert (found.stride.offset, found.rows.offset, found.scale.offset, ctypes.sizeof(found)) == (16, 24, 28, 32)
    with pytest.raises(AttributeError, match="row"):
        found(row=3)


def test_structs_of_an_included_header(tmp_path: Path) -> None:
    (tmp_path / "inner.h").write_text("struct Inner { float scale; };")
    found = structure(header(tmp_path, '#include "inner.h"\nstruct Params { Inner inner; };'), (tmp_path,))
    assert ctypes.sizeof(found) == 4


def test_an_enum_is_a_number_of_its_kind(tmp_path: Path) -> None:
    declared = header(
        tmp_path, "enum class Kind : int32_t { kOne, kOther };\nstruct Params { Kind kind; int64_t rows; };"
    )
    assert structure(declared, (tmp_path,)).kind.size == 4
    lines = layout_checks(declared, (tmp_path,))
    assert any("Params>().kind), toy::Kind>" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("struct Params { int32_t rows[4]; };", r"struct Params: 'int32_t rows\[4\]' is not a readable member"),
        ("struct Params { int32_t a, b; };", "'int32_t a, b' is not a readable member"),
        ("struct Params { double scale; };", "'double scale' is not a readable member; known: pointers, int32_t"),
        ("struct Params { float scale = 1.0f; };", "'float scale = 1.0f' is not a readable member"),
        ("struct Other { float scale; };", "declares no struct Params; it declares: Other"),
        ('#include "nowhere.h"', r"no header nowhere\.h under"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        structure(header(tmp_path, text), (tmp_path,))


def test_a_header_that_is_read_wrongly_does_not_compile(tmp_path: Path) -> None:
    checks = layout_checks(header(tmp_path, GOOD), (tmp_path,))
    library("toy_params", "\n".join(checks), "sm80", Options(overlay=tmp_path))
    (tmp_path / checks[3].split('"')[1]).write_text(
        "#pragma pack(1)\nnamespace toy {" + GOOD.replace("int32_t rows;", "char rows;") + "}"
    )
    with pytest.raises(BuildError, match=rf"parameters\.py reads params_{tmp_path.name}\.h differently"):
        library("toy_params", "\n".join(checks), "sm80", Options(overlay=tmp_path))
