"""What is read and reported about made-up wheels, members and sources: both outcomes of each choice and limit."""

import io
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_every_check import _context, _elf, _symbol, told
from test_every_name import _wants

from flashmoe_tools.audit import (
    engine,
    imports,
    inputs,
    lookup,
    package,
    symbols,
    torch_libraries,
    torch_symbols,
    wheels,
)
from flashmoe_tools.audit.errors import AuditError
from flashmoe_tools.audit.torch_libraries import InstalledTorch


def _wheel(tmp_path: Path, members: dict[str, bytes]) -> inputs.Wheel:
    path = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return inputs.unpack(path, tmp_path / "root")


def test_what_is_kept_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts up to a size limit, all metadata, and both together up to another limit.

    Shared objects are kept on disk, other files not at all.
    """
    metadata = {f"a-1.dist-info/{name}": b"x" * 12 for name in ("WHEEL", "METADATA", "RECORD")}
    texts = {
        "a/b.py": b"12345678",
        "a/c.py": b"123456789",
        "a/d.json": b"12345678",
        "a/e.toml": b"123456789",
        "a-1.dist-info/f.json": b"{}       ",
    }
    other = {"a/g.so": b"1234567", "a/h.txt": b"text", "b/a-1.dist-info/WHEEL": b"other", "a/c.so/": b""}
    monkeypatch.setattr(inputs, "MAX_SOURCE", 8)
    monkeypatch.setattr(inputs, "MAX_TEXT", 8 + 8 + 9 + 36)
    monkeypatch.setattr(inputs, "PIECE", 3)
    wheel = _wheel(tmp_path, {**metadata, **texts, **other})
    assert wheel.sources == {"a/b.py": "12345678", "a/c.py": ""}
    assert wheel.other == {"a/d.json": b"12345678", "a-1.dist-info/f.json": b"{}       "}
    assert wheel.metadata == {"WHEEL": "x" * 12, "METADATA": "x" * 12, "RECORD": "x" * 12, "f.json": "{}       "}
    assert (wheel.extensions, wheel.sizes["a/c.py"]) == (("a/g.so",), 9)
    assert [str(path.relative_to(wheel.root)) for path in wheel.root.rglob("*") if path.is_file()] == ["a/g.so"]
    assert (wheel.root / "a/g.so").read_bytes() == b"1234567"
    monkeypatch.setattr(inputs, "MAX_TEXT", 8 + 8 + 9 + 36 - 1)
    with pytest.raises(AuditError, match="holds more than 60 bytes of Python, JSON and TOML"):
        _wheel(tmp_path, {**metadata, **texts, **other})
    for name in ("WHEEL", "METADATA", "RECORD"):
        with pytest.raises(AuditError, match=f"{name} is missing"):
            _wheel(tmp_path, {**{each: b"" for each in metadata if not each.endswith(name)}, "a/g.so": b""})


@pytest.mark.parametrize(("name", "words"), [
    ("a/b", ""), ("/a", "points outside"), ("a/../b", "points outside"), ("a\\b", "points outside"), ("a..b", ""),
])  # fmt: skip
def test_members_that_no_wheel_holds(name: str, words: str) -> None:
    def said(*rows: Any, **fields: int) -> str:
        members = [zipfile.ZipInfo("x") if row is None else zipfile.ZipInfo(row) for row in rows]
        members[-1].filename = rows[-1]
        for field, value in fields.items():
            setattr(members[-1], field, value)
        return inputs._problem_of_each(members)

    assert words in said(name)
    assert bool(said(name)) is bool(words)
    if not words:
        assert [said("x", name), said(name, external_attr=0o100644 << 16)] == ["", ""]
        assert "is in it twice" in said(name, name)
        assert "is a link or a device" in said(name, external_attr=0o120777 << 16)
        assert [("is encrypted" in said(name, flag_bits=bits)) for bits in (1, 2, 3)] == [True, False, True]


def test_members_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*rows: str) -> str:
        return inputs._problem_together([zipfile.ZipInfo(name) for name in rows])

    monkeypatch.setattr(inputs, "MAX_MEMBERS", 2)
    assert [said("a", "b"), said("a.dist-info/x", "a.dist-info/y"), said("a.dist-info/x", "c/b.dist-info/x")] == [
        ""
    ] * 3
    assert "has 3 members, more than 2" in said("a", "b", "c")
    assert "lies below a member that is a file" in said("a", "a/b")
    assert "several .dist-info folders" in said("a.dist-info/x", "b.dist-info/x")


def test_what_a_folder_holds(tmp_path: Path) -> None:
    for name, kind in (("a.so", "libraries"), ("a.whl", "wheels")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / name).touch()
        (folder / "b.txt").touch()
        found = inputs.collect(folder)
        assert (len(found.libraries), len(found.wheels)) == ((1, 0) if kind == "libraries" else (0, 1))
        assert inputs.collect(folder / name) == (
            inputs.Inputs((("a.so", folder / name),), ())
            if kind == "libraries"
            else inputs.Inputs((), (folder / name,))
        )
    (tmp_path / "link").symlink_to("gone")
    for name, words in (("link", "is a broken symbolic link"), ("gone", "does not exist")):
        with pytest.raises(AuditError, match=words):
            inputs.collect(tmp_path / name)


def _sourced(texts: dict[str, str], *extensions: str, wheel: str = "a-1-cp311-cp311-linux_x86_64.whl") -> Any:
    names_ = (*extensions, *texts)
    return SimpleNamespace(path=Path(wheel), names=names_, extensions=extensions, sources=texts, metadata={"METADATA": ""}, is_ours=False)  # fmt: skip


@pytest.mark.parametrize(("member", "machine", "wheel", "is_right"), [
    ("p/_C.so", "x86_64", "cp311-cp311", True), ("p/_C.cpython-311-x86_64-linux-gnu.so", "x86_64", "cp311-cp311", True),
    ("p/_C.cpython-310-x86_64-linux-gnu.so", "x86_64", "cp311-cp311", False), ("p/_C.cpython-311-x86_64-linux-gnu.so", "aarch64", "cp311-cp311", False),
    ("p/_C.cpython-310-x86_64-linux-gnu.so", "x86_64", "py3-none", True), ("p/_C.cpython-310-x86_64-linux-gnu.so", "aarch64", "py3-none", False),
    ("p/_C.cpython-310-x86_64-linux-gnu.so", "x86_64", "cp311-abi3", True), ("p/_C.cpython-310-x86_64-linux-gnu.so", "x86_64", "cp310.cp311-none", True),
])  # fmt: skip
def test_suffixes_that_python_looks_for(member: str, machine: str, wheel: str, is_right: bool) -> None:
    found = imports._suffix_checks(_sourced({}, wheel=f"a-1-{wheel}-linux_x86_64.whl"), {member: _elf(machine=machine)})
    assert [check.name for check in found] == [] if is_right else ["module name: p._C"]
    if not is_right:
        wanted = "3XX" if wheel == "py3-none" else "311"
        assert found[0].expected == f".cpython-{wanted}-{machine}-linux-gnu.so, or only .so"
        both = {member: _elf(machine=machine), "p/_C.so": _elf()}
        assert imports._suffix_checks(_sourced({}, wheel=f"a-1-{wheel}-linux_x86_64.whl"), both) == []


@pytest.mark.parametrize(("imported", "sources_", "export", "count"), [
    ("p._C", (), "f", 1), ("p._D", (), "f", 0), ("p._C", ("p/_C.py",), "f", 0), ("p._C", (), "PyInit_x", 0), ("p._C", ("p/_C/__init__.py",), "f", 0),
])  # fmt: skip
def test_modules_without_an_init_function(imported: str, sources_: tuple[str, ...], export: str, count: int) -> None:
    wheel = _sourced(dict.fromkeys(sources_, ""), "p/_C.so")
    assert len(imports._init_checks(wheel, {"p/_C.so": _elf(dynamic=(_symbol(export),))}, {imported})) == count


@pytest.mark.parametrize(("lent", "texts", "late"), [
    (("libtorch.so",), {"p/__init__.py": "from . import _C"}, ["p/__init__.py"]), ((), {"p/__init__.py": "from . import _C"}, []),
    (("libtorch.so",), {"p/__init__.py": "import torch\nfrom . import _C"}, []), (("libtorch.so",), {"p/__init__.py": "import torch.a\nimport p._C"}, []),
    (("libtorch.so",), {"p/__init__.py": "import torchx\nfrom . import _C"}, ["p/__init__.py"]),
    (("libtorch.so",), {"p/__init__.py": "from . import _C", "p/a.py": "import torch"}, []),
    (("libtorch.so",), {"p/__init__.py": "from . import _C", "p/a.py": "import torchx"}, ["p/__init__.py"]),
    (("libtorch.so",), {"p/__init__.py": "x = 1"}, []),
])  # fmt: skip
def test_torch_before_what_it_lends(lent: tuple[str, ...], texts: dict[str, str], late: list[str]) -> None:
    wheel = _sourced(texts, "p/_C.so")
    trees, broken = imports._parsed(wheel)
    found = imports._torch_checks(wheel, trees, {"p/_C.so": SimpleNamespace(from_torch=lent)})  # type: ignore[dict-item]
    assert [check.found.split(" imports ")[0] for check in found] == late
    assert broken == {}


@pytest.mark.parametrize(("texts", "broken", "read"), [
    ({"p/__init__.py": "x ="}, ["p/__init__.py"], []), ({"p/a.py": "_C ="}, [], []), ({"p/a.py": "x ="}, [], []), ({"p/a.py": "_C"}, [], ["p/a.py"]),
    ({"p/a.py": "x"}, [], []),
    ({"p/__init__.py": "x"}, [], ["p/__init__.py"]), ({"q/__init__.py": "x ="}, [], []), ({"p/q/__init__.py": "x ="}, [], []),
])  # fmt: skip
def test_sources_on_the_way_to_an_extension(texts: dict[str, str], broken: list[str], read: list[str]) -> None:
    trees, wrong = imports._parsed(_sourced(texts, "p/_C.so"))
    assert (list(wrong), list(trees)) == (broken, read)


@pytest.mark.parametrize(("text", "metadata", "lost"), [
    ("from . import _D", "", True), ("from . import _C", "", False), ("from . import _D\n_D = 1", "", False), ("from . import _D\n_D: int = 1", "", False),
    ("import _thread", "", False), ("from os import _D", "", False), ("from . import _cffi_backend", "Requires-Dist: cffi>=1\n", False),
    ("from . import _cffi_backend", "Requires-Dist: x\n", True), ("from . import _D", "Requires-Dist: \n", True),
    ("CDLL('libx.so.1')", "", False), ("CDLL('libx.so')", "", True), ("# CDLL('libx.so')", "", False), ("'''\nCDLL('libx.so')\n'''", "", False),
    ("a = '''\nCDLL('libx.so')\n'''", "", True),
    ("'''\n'''\nCDLL('libx.so')", "", True), ("x = (\nCDLL('libx.so')", "", True),
])  # fmt: skip
def test_what_a_source_asks_for_in_vain(text: str, metadata: str, lost: bool) -> None:
    wheel = _sourced({"p/a.py": text}, "p/_C.so", "p/_E.so")
    wheel.metadata = {"METADATA": metadata}
    assert bool(package._lost(wheel, ["p/_E.so"])) is lost
    if lost:
        line = 1 + text[: max(text.find("CDLL"), 0)].count("\n")
        assert package._lost(wheel, ["p/_E.so"])[0][:2] == ("p/a.py", line)


@pytest.mark.parametrize(("exports", "text", "count"), [
    (("PyInit__C",), "", 0), (("PyInit__D",), "", 1), ((), "", 0), (("PyInit__D", "PyInit__C"), "", 0), (("PyInit__D",), "load('_D')", 0),
    (("PyInit__D",), 'load("_D")', 0), (("PyInit__D",), "load(_D)", 1),
])  # fmt: skip
def test_names_of_init_functions(exports: tuple[str, ...], text: str, count: int) -> None:
    facts = {"p/_C.so": _elf(dynamic=tuple(_symbol(name) for name in exports))}
    assert len(package._init_checks(_sourced({"p/a.py": text}, "p/_C.so"), facts)) == count


@pytest.mark.parametrize(("extensions", "ours", "count"), [
    (("flashmoe/libflashmoe.so",), True, 0), (("flashmoe/libflashmoe.so",), False, 0), (("libflashmoe.so",), False, 1), (("p/_C.so",), True, 1),
    (("p/_C.so",), False, 0),
    (("flashmoe/libflashmoe.so", "p/_C.so"), False, 1),
])  # fmt: skip
def test_files_of_our_package(extensions: tuple[str, ...], ours: bool, count: int) -> None:
    wheel = _sourced({}, *extensions)
    wheel.is_ours = ours
    assert len(package._our_checks(wheel)) == count


def test_symbols_of_a_wheel_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted over all its shared objects and both tables; a stripped one only has the dynamic table."""
    rows = tuple(_symbol(name) for name in "ab")
    facts = {"a.so": _elf(dynamic=rows, static=rows), "b.so": _elf(dynamic=rows), "c.so": None}
    wheel = SimpleNamespace(extensions=tuple(facts), root=tmp_path, is_ours=False)
    monkeypatch.setattr(engine, "unpack", lambda *_: wheel)
    monkeypatch.setattr(engine, "_guarded", lambda label, *_: engine.Subject(label, False, (), facts[label]))
    for name in ("check_wheel", "check_loads", "check_imports"):
        monkeypatch.setattr(engine, name, lambda *_: [])
    for limit, is_refused in ((6, False), (5, True)):
        monkeypatch.setattr(engine, "MAX_SYMBOLS", limit)
        found = engine.audit_wheel(Path("a.whl"), engine.Options(), None)
        assert any("symbols together" in check.found for check in found[0].checks) is is_refused


def test_streams_of_hashes() -> None:
    """A member that is not stored is hashed too."""
    with zipfile.ZipFile(io.BytesIO(), "w") as archive:
        archive.writestr("a", b"abc")
        member = archive.getinfo("a")
        assert inputs._copy(archive, member, None) == "ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0"
        kept = io.BytesIO()
        inputs._copy(archive, member, kept)
        assert kept.getvalue() == b"abc"


def test_what_is_said_of_a_needed_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch_symbols,
        "shims_for",
        lambda _: SimpleNamespace(version="2.10.0", library={"aoti_torch_a": "libtorch_cpu.so"}),
    )
    assert told(torch_symbols.check_shims(_wants("aoti_torch_a"))) == [
        ("FAIL", "shim library: libtorch_cpu.so", "needed: nothing")
    ]


def _of(header: str, *members: str, platform: str = "linux_x86_64", python: str = "cp311-cp311", **more: Any) -> Any:
    path = Path(f"a-1-{python}-{platform}.whl")
    return SimpleNamespace(path=path, names=members, metadata={"WHEEL": header}, **more)


@pytest.mark.parametrize(("stated", "expected"), [
    (("1.0",), None), ((" 1.0 ",), None), (("1.1",), ("WARN", "1.1")), (("2.0",), ("FAIL", "2.0")), ((), ("FAIL", "no Wheel-Version")), (("1.0", "1.0"),
    ("FAIL", "1.0, 1.0")),
    (("1.1", "1.1"), ("FAIL", "1.1, 1.1")), (("1.x",), ("FAIL", "1.x")),
])  # fmt: skip
def test_versions_of_the_format(stated: tuple[str, ...], expected: tuple[str, str] | None) -> None:
    found = told(wheels.check_versions(_of("".join(f"Wheel-Version: {value}\n" for value in stated))))
    assert [(verdict, words) for verdict, _, words in found] == ([expected] if expected else [])


@pytest.mark.parametrize(("platform", "python", "header", "machine", "symbol", "words"), [
    ("linux_x86_64", "cp311-cp311", "", "x86_64", "PyList_New", []),
    ("linux_x86_64", "cp311-cp311", "Tag: cp310-cp311-linux_x86_64\n", "x86_64", "f", ["file name: "]),
    ("any", "py3-none", "", "x86_64", "f", ["any, Root-Is-Purelib None"]), ("any", "py3-none", "", "aarch64", "f", ["any, Root-Is-Purelib None"]),
    ("linux_x86_64", "py3-none", "Root-Is-Purelib: True\n", "x86_64", "f", ["true, with linux_x86_64"]),
    ("linux_x86_64", "py3-none", "Root-Is-Purelib: false\n", "x86_64", "f", []),
    ("linux_x86_64", "py3-none", "", "aarch64", "f", ["linux_x86_64, but p/_C.so is for aarch64"]),
    ("linux_x86_64", "py3-none", "", "x86_64", "PyList_New", ["py3-none, but it uses PyList_New"]),
    ("linux_x86_64", "py3-none", "", "x86_64", "Pylon", []), ("linux_x86_64", "cp311-abi3", "", "x86_64", "_PyList_New", []),
])  # fmt: skip
def test_tags_of_a_wheel(platform: str, python: str, header: str, machine: str, symbol: str, words: list[str]) -> None:
    stated = header if "Tag" in header else f"Tag: {python}-{platform}\n{header}"
    facts = {"p/_C.so": _elf(machine=machine, dynamic=(_symbol(symbol, False),))}
    found = told(wheels.check_tag(_of(stated, platform=platform, python=python), facts))
    assert [line for word, (_, _, line) in zip(words, found, strict=len(words) > 0) if word not in line] == []
    assert words or found == [("PASS", "wheel tag", f"{python}-{platform}")]
    (wrong,) = told(wheels.check_tag(SimpleNamespace(path=Path("a.whl"), metadata={"WHEEL": ""}), {}))  # type: ignore[arg-type]
    assert wrong == ("FAIL", "wheel tag", "a.whl")


@pytest.mark.parametrize(("members", "words"), [
    (("p/a.py", "p/b.py"), []), (("a-1.data/purelib/p/a.py", "p/b.py"), []), (("a-1.data/purelib/p/a.py", "p/a.py"), ["installed twice: p/a.py"]),
    (("a-1.data/other/a",), ["data folder"]),
    (("a-1.data/purelib/",), ["data folder"]), (("p/x.data/y",), []),
    (("a-1.data/data/lib/python3.11/site-packages/p/a.py", "p/a.py"), ["installed twice: p/a.py"]),
    (("a-1.data/scripts/p/a.py", "p/a.py"), []), (("a-1.data/x", "a-1.data/platlib/b", "b"), ["data folder", "installed twice: b"]),
])  # fmt: skip
def test_places_of_members(members: tuple[str, ...], words: list[str]) -> None:
    assert [name for _, name, _ in told(wheels.check_places(_of("", *members)))] == words


@pytest.mark.parametrize(("lines", "found"), [
    ("a,sha256=x,1\nRECORD,,\n", ""), ("a,sha256=x,\nRECORD,,\n", ""), ("a,sha256=x,1\n\nRECORD,,\n", ""), ("a,sha256=y,1\nRECORD,,\n", "a"),
    ("a,,1\nRECORD,,\n", "a (no sha256)"),
    ("a,md5=x,1\nRECORD,,\n", "a (no sha256)"), ("RECORD,,\n", "a (not in RECORD)"), ("a,sha256=x,2\nRECORD,,\n", "a (2 bytes stated, 1 held)"),
    ("a,sha256=x,1\nRECORD,,\nb,,\n", "b (missing)"),
    ("a,sha256=x,1\na,sha256=x,1\nRECORD,,\n", "a (2 lines)"), ("a,sha256=x,1\nRECORD,,\nb\n", "b (not path, hash and size)"),
    ("a,sha256=x,1\nRECORD,sha256=z,\n", "RECORD"),
])  # fmt: skip
def test_lines_of_the_record(lines: str, found: str) -> None:
    wheel = _of("", "a", "RECORD", digests={"a": "x", "RECORD": "y"}, sizes={"a": 1, "RECORD": 2})
    wheel.metadata["RECORD"] = lines
    expected = (
        ("FAIL", "wheel record", f"differs: {found}")
        if found
        else ("PASS", "wheel record", "2 members, every sha256 matches")
    )
    assert told(wheels.check_record(wheel)) == [expected]


def test_names_of_inputs(tmp_path: Path) -> None:
    """Names are kept as given; an audit of nothing takes less than a minute."""
    (tmp_path / "link.so").symlink_to("gone")
    report = engine.audit(tmp_path / "link.so")
    assert (report.data["path"], report.seconds < 60) == ("link.so", True)
    (tmp_path / "a.o").mkdir()
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(AuditError, match="contains no object file"):
            engine.read_objects(folder)


def test_symbol_tables_and_other_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    table = symbols.check_symbol_table
    rows = [(True, (), "PASS"), (False, (), "PASS"), (True, None, "FAIL"), (False, None, "WARN")]
    assert [told(table(_context(ours, static=static)))[0][0] for ours, static, _ in rows] == [
        verdict for *_, verdict in rows
    ]
    monkeypatch.setattr(lookup, "python_exports", frozenset)
    for path, version, step in (
        ("a.so", lookup.here(), "audit with a complete Python"),
        ("a.cpython-399-x.so", "3.99", "audit with Python 3.99"),
    ):
        check = symbols.check_undefined(_wants("PyB", path=Path(path)))[1]
        assert (check.expected, check.next_step) == (f"names that Python {version} exports", step)


def test_data_of_the_shims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library's own names; a name that both export belongs to libtorch_cpu."""
    exports = {"c": {"aoti_torch_b", "aoti_torch_a", "f"}, "g": {"aoti_torch_a", "aoti_torch_c"}}
    torch = InstalledTorch("2.10.0+cpu", {"libtorch_cpu.so": Path("c"), "libtorch_cuda.so": Path("g")})
    monkeypatch.setattr(torch_libraries, "installed_torch", lambda: torch)
    monkeypatch.setattr(torch_libraries, "exported_names", lambda path: exports[path.name])
    path = torch_libraries.write_data(tmp_path)
    shims = {"libtorch_cpu.so": "aoti_torch_a aoti_torch_b", "libtorch_cuda.so": "aoti_torch_c"}
    held = {"schema": torch_libraries.SCHEMA, "torch": "2.10.0", "shims": shims}
    assert (path.name, path.read_text()) == ("torch_shims_2.10.0.json", json.dumps(held, indent=1) + "\n")
    monkeypatch.setattr(torch_libraries, "DATA", tmp_path)
    assert torch_libraries.shim_data("2.10.1").library == {
        "aoti_torch_a": "libtorch_cpu.so",
        "aoti_torch_b": "libtorch_cpu.so",
        "aoti_torch_c": "libtorch_cuda.so",
    }
