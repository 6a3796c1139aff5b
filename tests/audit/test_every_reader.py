"""What is read out of symbol tables, wheels, folders and sources that are made up: each choice both ways, each limit on both sides."""

import io
import json
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_every_check import _context, _elf, _symbol, told
from test_every_name import _wants
from test_every_table import Elf, Named, Section

from flashmoe_tools.audit import (
    elf,
    embedded,
    engine,
    imports,
    inputs,
    kernels,
    lookup,
    lookup_tables,
    names,
    package,
    resolve,
    sources,
    symbols,
    torch_libraries,
    torch_symbols,
    wheels,
)
from flashmoe_tools.audit.elf import Search, Symbol
from flashmoe_tools.audit.errors import AuditError, NoBinariesError
from flashmoe_tools.audit.torch_libraries import InstalledTorch
from flashmoe_tools.report import Check, Report, Verdict

# ELF files

NAMES = b"\0f\0g\0h\0"


class Linked(Elf):
    def get_section(self, _: int) -> Any:
        return Section("", NAMES)


def _row(name: int, binding: int = 1, kind: int = 2, other: int = 0, place: int = 7) -> bytes:
    return elf._SYMBOL.pack(name, binding << 4 | kind, other, place, 0, 5)


def _dynsym(*rows: bytes, name: str = ".dynsym") -> Section:
    return Section(name, b"".join(rows), sh_link=1)


def test_symbols_of_a_table() -> None:
    """The first, and those of sections and files, are no names; of two bits of visibility internal and hidden are hidden."""
    rows = [
        _row(5),
        *(_row(1, kind=kind) for kind in (3, 4)),
        _row(1, 0, other=1),
        _row(3, 1, other=2),
        _row(5, 2, other=3, place=0),
        _row(1, 10, other=4),
    ]
    expected = [
        Symbol("f", True, "local", True, 5),
        Symbol("g", True, "global", True, 5),
        Symbol("h", False, "weak", False, 5),
        Symbol("f", True, "unique", False, 5),
    ]
    assert list(elf._symbols(Linked(), _dynsym(*rows), {})) == expected
    bound = Section(".gnu.version", struct.pack("<7H", 0, 1, 1, 2, 0x8003, 3, 4))
    found = list(elf._symbols(Linked(bound), _dynsym(*rows), {2: ("a", "V_2"), 3: ("b", "V_3")}))
    assert [(s.library, s.version) for s in found] == [("a", "V_2"), ("b", "V_3"), ("b", "V_3"), ("", "")]
    assert list(elf._symbols(Linked(bound), _dynsym(*rows, name=".symtab"), {2: ("a", "V_2")})) == expected
    assert next(elf._symbols(Linked(), _dynsym(_row(1), _row(1, 3)), {})).binding == "binding 3"


@pytest.mark.parametrize(("place", "is_right"), [(0, True), (7, False), (256, False)])
def test_a_hash_table_of_no_names(place: int, is_right: bool) -> None:
    """Right where every symbol is wanted, by the number of its section."""
    table = Section(".gnu.hash", struct.pack("<4IQI", 1, 1, 1, 5, 0, 0))
    file: Any = Linked(_dynsym(_row(0, 0, place=0), _row(1, place=place)), table)
    assert (list(lookup_tables.problems_of_lookup(file)) == []) is is_right


@pytest.mark.parametrize("defines", [False, True])
def test_what_a_library_provides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defines: bool) -> None:
    """Neither what it wants nor what is local; with versions, those under which it has each name, hidden ones, too."""
    path = tmp_path / "a.so"
    path.touch()
    rows = _dynsym(_row(0, 0, place=0), _row(1), _row(1), _row(3, 0), _row(5, place=0), _row(5, 2))
    table = Section(".gnu.version_d")
    table.iter_versions = lambda: [({"vd_ndx": n, "vd_flags": n == 1}, iter([Named(f"V_{n}")])) for n in (1, 2, 3)]  # type: ignore[attr-defined]
    bound = Section(".gnu.version", struct.pack("<6H", 0, 2, 0x8003, 2, 2, 1))
    tags = Section(".dynamic", tags=(("DT_NULL", 0),), sh_link=1)
    monkeypatch.setattr(elf, "require_pyelftools", lambda: lambda _: Linked(rows, tags, bound, *[table] * defines))
    found = elf.provided(path)
    assert found.exports == {"f", "h"}
    assert found.versions == ({"f": {"V_2", "V_3"}, "h": {""}} if defines else {})
    assert found.defined_versions == ({"V_2", "V_3"} if defines else frozenset())


@pytest.mark.parametrize(("tag", "value", "keys"), [
    ("DT_FLAGS", 0x4, {"DT_TEXTREL"}), ("DT_FLAGS", 0x10, {"static TLS"}), ("DT_FLAGS", 0x14, {"DT_TEXTREL", "static TLS"}), ("DT_FLAGS", 0x8, set()),
    ("DT_DEBUG", 0x14, set()), ("DT_FLAGS_1", 0x14, {"not for import"}), ("DT_FLAGS_1", 0x40, {"not for import"}), ("DT_DEBUG", 0x0800_0040, set()),
])  # fmt: skip
def test_flags_of_the_dynamic_section(tag: str, value: int, keys: set[str]) -> None:
    found = elf._dynamic_tags(Linked(Section(".dynamic", tags=((tag, value),), sh_link=1)))
    assert set(found) == {tag, *keys}
    assert bool(found.get("not for import")) is (tag == "DT_FLAGS_1" and value == 0x40)


@pytest.mark.parametrize(("start", "is_right"), [
    (b"\x7fELF\x02\x01" + bytes(12) + b"\x3e\0", True), (b"\x7fELF\x02\x01" + bytes(12) + b"\x3f\0", False),
    (b"\x7fELF\x01\x01" + bytes(12) + b"\x3e\0", False),
    (b"/* a linker script */", True), (b"", True), (b"\x7fELF\x02\x01", False),
])  # fmt: skip
def test_files_that_the_loader_passes_over(tmp_path: Path, start: bytes, is_right: bool) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(start)
    assert elf.fits(path, "x86_64") is is_right
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "c.so").mkdir()
    (tmp_path / "b" / "c.so").write_bytes(start)
    found = resolve.Resolver(None, "x86_64").find("c.so", (tmp_path / "a", tmp_path / "b"))
    assert found == (tmp_path / "b" / "c.so" if is_right else None)


def test_sections_that_the_file_cuts() -> None:
    for size, kind, is_right in ((3, "SHT_PROGBITS", True), (4, "SHT_PROGBITS", False), (4, "SHT_NOBITS", True)):
        file: Any = Elf(Section("a", b"123", sh_size=size, sh_type=kind))
        if is_right:
            assert elf.section_data(file, "a") == b"123"
        else:
            with pytest.raises(AuditError, match="section a claims 4 bytes, the file holds 3 of them"):
                elf.section_data(file, "a")
    assert elf.section_data(file, "b") is None
    header = bytearray(128)
    for at, size, count in ((32, 54, 56), (40, 58, 60)):
        struct.pack_into("<Q", header, at, 64)
        struct.pack_into("<H", header, size, 16)
        struct.pack_into("<H", header, count, 4)
        elf._check_extent(bytes(header), "x")
        struct.pack_into("<H", header, count, 5)
        with pytest.raises(AuditError, match="header table ends at byte 144"):
            elf._check_extent(bytes(header), "x")
        struct.pack_into("<H", header, count, 0)


# Embedded binaries


@pytest.mark.parametrize(("offset", "size", "words"), [
    (0, 16, ""), (16, 16, ""), (0, 32, ""), (-32, 16, "the index places it at -32"), (0, 0, "with 0 bytes"), (0, 33, "with 33 bytes"), (32, 1, "at 32"),
    (8, 16, "lies at 8, not on a 16-byte boundary"), (0, -16, "with -16 bytes"),
])  # fmt: skip
def test_places_in_the_section(offset: int, size: int, words: str) -> None:
    content = bytes(32)[offset : offset + size]
    for kind in ("cubin", "ptx"):
        if not words:
            embedded._check_place("k", kind, offset, size, content)
            continue
        with pytest.raises(AuditError, match=f"k .*{words}"):
            embedded._check_place("k", kind, offset, size, content)
    with pytest.raises(AuditError, match="k is of kind 'so', neither cubin nor ptx"):
        embedded._check_place("k", "so", offset, size, content)


def test_rows_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cubin", "ptx"):
        monkeypatch.setattr(embedded, f"read_{kind}", lambda content, label, kind=kind: (kind, content, label))
    row = {"name": "k", "sha256": "s", "entries": ["e"], "smem_dynamic": 3, "threads": 4, "size": 2}
    rows = [
        {**row, "target": "sm_80", "kind": "cubin", "offset": 0},
        {**row, "target": "t", "kind": "ptx", "offset": 16},
    ]

    def parsed(schema: str, given: list[Any]) -> Any:
        content = json.dumps({"schema": schema, "binaries": given}).encode()
        return embedded.parse_index(content + bytes(3), b"ab" + bytes(14) + b"cdef")

    found = parsed("flashmoe.index/1", rows)
    assert [binary.facts for binary in found] == [("cubin", b"ab", "k.sm_80"), ("ptx", b"cd", "k.t")]
    assert {(b.sha256, b.entries, b.smem_dynamic, b.threads, b.error) for b in found} == {("s", ("e",), 3, 4, None)}
    (bad,) = parsed("flashmoe.index/1", [{**rows[0], "size": 21}])
    assert (bad.facts, "with 21 bytes" in str(bad.error)) == (None, True)
    wrong: list[tuple[str, list[Any], str]] = [
        ("flashmoe.index/2", rows, "has schema"),
        ("flashmoe.index/1", [], "is empty"),
        ("flashmoe.index/1", [{}], "cannot be read"),
    ]
    for schema, given, words in wrong:
        with pytest.raises(AuditError, match=f"the index.* {words}"):
            parsed(schema, given)


@pytest.mark.parametrize(
    ("lost", "words"), [((), ""), ((0,), "flashmoe.index"), ((1,), "flashmoe.cubins"), ((0, 1), "flashmoe.index")]
)
def test_sections_of_device_code(monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...], words: str) -> None:
    held = {name: b"x" for at, name in enumerate((embedded.INDEX_SECTION, embedded.BINARY_SECTION)) if at not in lost}
    monkeypatch.setattr(embedded, "read_bytes", lambda _: b"")
    monkeypatch.setattr(embedded, "open_elf", lambda *_: None)
    monkeypatch.setattr(embedded, "section_data", lambda _, name: held.get(name))
    monkeypatch.setattr(embedded, "parse_index", lambda *given: given)
    if words:
        with pytest.raises(AuditError, match=rf"has no section \.{words}: "):
            embedded.read_embedded(Path("a.so"))
    else:
        assert tuple(map(bytes, embedded.read_embedded(Path("a.so")))) == (b"x", b"x")  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "record", "declared"), [
    (None, None, None), (None, {}, None), (None, {"targets": ["sm_80"]}, ("sm_80",)), (("sm_75",), {"targets": ["sm_80"]}, ("sm_75",)),
    ((), {"targets": ["sm_80"]}, ()),
    (("sm_75",), None, ("sm_75",)), (None, {"targets": []}, ()),
])  # fmt: skip
def test_targets_that_are_declared(monkeypatch: pytest.MonkeyPatch, asked: Any, record: Any, declared: Any) -> None:
    """Those asked for, those of the provenance, the whole table; of none a library without binaries is a warning."""
    monkeypatch.setattr(engine, "find_provenance", lambda *_: record)
    monkeypatch.setattr(engine, "read_embedded", lambda _: ("binary",))
    monkeypatch.setattr(engine, "check_provenance", lambda *given: (given[2],))
    monkeypatch.setattr(engine, "audit_kernels", lambda *given: kernels.KernelAudit(given, ("row",)))  # type: ignore[arg-type]
    found, binaries = engine.audit_embedded(Path("a"), engine.Options(targets=asked), "tables", None)  # type: ignore[arg-type]
    assert found == kernels.KernelAudit((("binary",), "tables", declared, ("binary",)), ("row",))  # type: ignore[arg-type]
    assert tuple(map(str, binaries)) == ("binary",)
    for error in (NoBinariesError("none", "build"), AuditError("damaged", "build")):

        def fail(_: Path, error: AuditError = error) -> Any:
            raise error

        monkeypatch.setattr(engine, "read_embedded", fail)
        found, binaries = engine.audit_embedded(Path("a"), engine.Options(targets=asked), "tables", None)  # type: ignore[arg-type]
        is_cpu = declared == () and isinstance(error, NoBinariesError)
        assert (found.checks[0].verdict, binaries) == (Verdict.WARN if is_cpu else Verdict.FAIL, ())
        assert found.checks[1:] == (((),) if is_cpu else ())


def test_where_the_provenance_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "read_provenance", lambda content: content)
    library, find = tmp_path / "lib" / "a.so", cast("Any", engine.find_provenance)
    library.parent.mkdir()
    assert find(library, None) is None
    for folder in (tmp_path, library.parent):
        (folder / "provenance.json").write_text(folder.name)
        assert find(library, None) == folder.name.encode()
    for held, found in (({}, None), ({"flashmoe/provenance.json": b"x"}, b"x"), ({"provenance.json": b"x"}, None)):
        assert find(library, SimpleNamespace(other=held)) == found


def test_reports_of_nothing() -> None:
    def empty(*rows: str) -> bool:
        return engine.exit_is_empty(Report("audit", tuple(Check(name, Verdict.FAIL) for name in rows)))

    assert [empty("input: empty"), empty("a: input: unreadable", "input: empty")] == [True, True]
    assert [
        empty(),
        empty("input: damaged"),
        empty("input: empty", "symbols"),
        empty("input: empty", "b: input: damaged"),
    ] == [False] * 4


# Names


@pytest.mark.parametrize(("missing", "defined", "words"), [
    ("f<int>()", "f<float>()", "`f` is instantiated for <float> but not for <int>"), ("void f<int>()", "void f()", "with another signature"),
    ("void f()", "void f<int>()", "with another signature"), ("a::f<b<1>>(int)", "a::f<c>(int)", "instantiated for <c> but not for <b<1>>"),
])  # fmt: skip
def test_names_that_nearly_match(missing: str, defined: str, words: str) -> None:
    near = names.explain(missing, [defined])
    assert near is not None
    assert words in near.cause
    assert near.defined == (defined,)
    assert names.explain(missing, [missing]) is None


@pytest.mark.parametrize(("name", "version", "ours", "exports", "path", "kind"), [
    ("PyA", "", False, {"PyA"}, "a.so", "python"), ("PyA", "", True, {"PyA"}, "a.so", "missing"), ("PyA", "V_1", False, {"PyA"}, "a.so", "missing"),
    ("PyB", "", False, {"PyA"}, "a.so", "missing"), ("PyB", "", False, set(), "a.so", "other_python"), ("PyB", "", True, set(), "a.so", "missing"),
    ("Pyb", "", False, set(), "a.so", "missing"), ("PyB", "", False, {"PyA"}, "a.cpython-399-x.so", "other_python"),
    ("PyA", "", False, {"PyA"}, "a.cpython-399-x.so", "python"),
    ("_ZN2at1fEv", "", False, set(), "a.so", "torch"), ("_ZN2at1fEv", "V_1", False, set(), "a.so", "missing"),
    ("aoti_torch_a", "", False, set(), "a.so", "torch"),
    ("aoti_torch_a", "V_1", False, set(), "a.so", "missing"), ("given", "V_1", False, set(), "a.so", "found"), ("own", "", False, set(), "a.so", "found"),
    ("own", "V_1", False, set(), "a.so", "missing"),
])  # fmt: skip
def test_where_a_name_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str, ours: bool, exports: set[str], path: str, kind: str
) -> None:
    monkeypatch.setattr(lookup, "python_exports", lambda: exports)
    looked = lookup.look_up(
        _wants(
            _symbol(name, False, version=version),
            ours=ours,
            gives=("given",),
            path=Path(path),
            static=(_symbol("own", binding="local"),),
        )
    )
    counts = {each: value if isinstance(value, int) else len(value) for each, value in vars(looked).items()}
    assert {each for each, count in counts.items() if count} == {kind}


@pytest.mark.parametrize(("version", "library", "there", "known", "is_newer"), [
    ("GLIBC_2.18", "libc.so.6", ("GLIBC_2.17", "GLIBC_PRIVATE", "OTHER_9.9"), True, True), ("GLIBC_2.17", "libc.so.6", ("GLIBC_2.17",), True, False),
    ("GLIBC_2.18", "libc.so.6", (), True, True),
    ("GLIBC_2.18", "libc.so.6", ("GLIBC_2.17",), False, False), ("GLIBC_2.18", "libm.so.6", ("GLIBC_2.17",), True, False),
    ("GLIBC_NEW", "libc.so.6", ("GLIBC_2.17",), True, False),
    ("OTHER_9", "libc.so.6", ("GLIBC_2.17",), True, False),
])  # fmt: skip
def test_versions_above_this_machines(
    monkeypatch: pytest.MonkeyPatch, version: str, library: str, there: tuple[str, ...], known: bool, is_newer: bool
) -> None:
    monkeypatch.setattr(lookup, "provided", lambda _: SimpleNamespace(defined_versions=there))
    monkeypatch.setattr(lookup, "is_known_version", lambda *_: known)
    made = _context(closure=SimpleNamespace(libraries={"libc.so.6": Path("libc.so.6")}, gives=lambda _: False))
    assert lookup._is_newer_than_this_machine(made, _symbol("f", False, version=version, library=library)) is is_newer


# Libraries and sources


def test_where_a_library_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own wins; a path is no name to search; what a file brings in is looked for once, by the first that needs it."""
    torch = InstalledTorch("2.10.0", {"t.so": tmp_path / "torch" / "t.so"})
    for name in ("t.so", "u.so"):
        (tmp_path / name).write_text("a script")
    with_torch, without = resolve.Resolver(torch), resolve.Resolver(None)
    for name in ("t.so", "u.so"):
        assert without.find(name, (tmp_path,)) == tmp_path / name
        assert with_torch.find(name, (tmp_path,)) == torch.libraries.get(name, tmp_path / name)
        assert with_torch.find(str(tmp_path / name)) is without.find(str(tmp_path / name)) is None
    monkeypatch.setattr(resolve, "exported_names", lambda path: {"f"} if path.name == "t.so" else set())
    for resolver, libraries, found in (
        (with_torch, {}, "t.so"),
        (with_torch, torch.libraries, None),
        (without, {}, None),
    ):
        assert resolver.elsewhere("f", resolve.Closure(libraries, {})) == found
        assert resolver.elsewhere("g", resolve.Closure(libraries, {})) is None
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}:")
    assert list(resolve.Resolver.process())[-2:] == [resolve.python_folder(), tmp_path]
    asked: list[str] = []
    monkeypatch.setattr(resolve.Resolver, "find", lambda _, soname, __: asked.append(soname))
    closure = without.closure(tmp_path / "a.so", ("gone.so", "gone.so"), Search())
    assert (asked, closure.absent) == (["gone.so"], {"gone.so": "a.so"})


def test_libraries_that_the_loader_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    output = "2 libs found\n\ta.so (libc6,x86-64) => /1/a.so\n\ta.so (libc6) => /2/a.so\n\tb.so (libc5) => /b.so\n"
    for program, run, found in (
        ("ldconfig", lambda *_, **__: SimpleNamespace(stdout=output), {"a.so": (Path("/1/a.so"), Path("/2/a.so"))}),
        (None, lambda *_, **__: SimpleNamespace(stdout=output), {}),
        ("gone/ldconfig", resolve.subprocess.run, {}),
    ):
        monkeypatch.setattr(resolve.shutil, "which", lambda *_, program=program, **__: program)
        monkeypatch.setattr(resolve.subprocess, "run", run)
        assert resolve.loader_cache.__wrapped__() == found


@pytest.mark.parametrize(("named", "is_there", "exports", "found"), [
    ("libp.so", True, "Py_Initialize", {"Py_Initialize", "main"}), ("libp.so", False, "Py_Initialize", set()), (None, True, "Py_Initialize", set()),
    ("libp.so", True, "PyA", set()),
])  # fmt: skip
def test_what_this_python_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, is_there: bool, exports: str, found: set[str]
) -> None:
    if is_there:
        (tmp_path / "libp.so").touch()
    monkeypatch.setattr(resolve.sysconfig, "get_config_var", {"LIBDIR": str(tmp_path), "INSTSONAME": named}.get)
    monkeypatch.setattr(resolve, "provided", lambda _: SimpleNamespace(needed=(), search=Search()))
    monkeypatch.setattr(resolve, "exported_names", lambda path: {exports} if path.name == "libp.so" else {"main"})
    assert resolve.python_exports.__wrapped__() == found


def test_sources_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are not too large; a folder may be called as one."""
    text = "int f();\n"
    (tmp_path / "folder.cpp").mkdir()
    (tmp_path / "a.cpp").write_text(text)
    for limit, count in ((len(text), 1), (len(text) - 1, 0)):
        monkeypatch.setattr(sources, "MAX_BYTES", limit)
        assert len(sources.find_mentions(tmp_path, "f")) == count
    assert sources.default_source(tmp_path) is None
    (tmp_path / "csrc" / "tables").mkdir(parents=True)
    (tmp_path / "csrc" / "tables" / "arch.toml").touch()
    for start in (tmp_path, tmp_path / "folder.cpp"):
        assert sources.default_source(start) == tmp_path / "csrc"


# Wheels


def _wheel(tmp_path: Path, members: dict[str, bytes]) -> inputs.Wheel:
    path = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return inputs.unpack(path, tmp_path / "root")


def test_what_is_kept_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts up to a size, metadata of any, together up to another; shared objects lie on the disk, other files nowhere."""
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
        assert found[0].expected == f".cpython-{wanted}-{machine}-linux-gnu.so, or .so alone"
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
    """Of all its shared objects, in both tables; a stripped one has the dynamic table alone."""
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
    """A member that goes nowhere is hashed, too."""
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
    """As they were given; an audit of nothing takes no minute."""
    (tmp_path / "link.so").symlink_to("gone")
    report = engine.audit(tmp_path / "link.so")
    assert (report.data["path"], report.seconds < 60) == ("link.so", True)
    (tmp_path / "a.o").mkdir()
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(AuditError, match="holds no object file"):
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
    """Of each library its own, of both the processor's."""
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
