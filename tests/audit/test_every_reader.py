"""What is read from made-up symbol tables, indices, libraries and sources: both outcomes of each choice and limit."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_every_check import _context, _symbol
from test_every_name import _wants
from test_every_table import Elf, Named, Section

from flashmoe_tools.audit import (
    cubin,
    elf,
    embedded,
    engine,
    kernels,
    lookup,
    lookup_tables,
    names,
    resolve,
    sources,
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
    """The first symbol and those of sections and files are no names; visibility internal and hidden both mean hidden."""
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
    """Correct if every symbol is undefined, according to its section number."""
    table = Section(".gnu.hash", struct.pack("<4IQI", 1, 1, 1, 5, 0, 0))
    file: Any = Linked(_dynsym(_row(0, 0, place=0), _row(1, place=place)), table)
    assert (list(lookup_tables.problems_of_lookup(file)) == []) is is_right
    assert list(lookup_tables.problems_of_lookup(cast("Any", Linked(_dynsym(_row(1)), Section(".gnu.hash"))))) == []


@pytest.mark.parametrize("defines", [False, True])
def test_what_a_library_provides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defines: bool) -> None:
    """Excludes undefined and local symbols; with versions, those of each name, including hidden ones."""
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


def test_files_of_another_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor code instead of a cubin, a shared object without a dynamic section, unreadable tables, not an ELF file."""
    held: Any = Elf(e_machine="EM_X86_64")
    monkeypatch.setattr(cubin, "open_elf", lambda *_: held)
    with pytest.raises(AuditError, match="k is an ELF file for EM_X86_64, not device code"):
        cubin.read_cubin(b"", "k")
    held["e_machine"] = "EM_CUDA"
    with pytest.raises(AuditError, match="k: a table inside cannot be read"):
        cubin.read_cubin(b"", "k")
    with pytest.raises(AuditError, match=r"has no \.dynamic section"):
        elf._dynamic_tags(held)
    with pytest.raises(AuditError, match="k is not an ELF file: it is text"):
        elf.open_elf(b"text", "k")
    (tmp_path / "a.so").write_text("text")
    with pytest.raises(AuditError, match=r"cannot read the dynamic symbols of a\.so"):
        elf.provided(tmp_path / "a.so")


def test_folders_to_search() -> None:
    """RPATH has no effect if there is a RUNPATH; empty parts are ignored."""
    origin, here = Path("/o"), "$ORIGIN/a:${ORIGIN}::/b"
    found = (Path("/o/a"), Path("/o"), Path("/b"))
    assert [Search(*paths).folders(origin) for paths in (((here,),), ((), (here,)), (("/c",), (here,)), ((here, "$ORIGINAL"),))] == [
        (found, ()), ((), found), ((), found), ((*found, Path("$ORIGINAL")), ())]  # fmt: skip


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


@pytest.mark.parametrize(("requested", "record", "declared"), [
    (None, None, None), (None, {}, None), (None, {"targets": ["sm_80"]}, ("sm_80",)), (("sm_75",), {"targets": ["sm_80"]}, ("sm_75",)),
    ((), {"targets": ["sm_80"]}, ()),
    (("sm_75",), None, ("sm_75",)), (None, {"targets": []}, ()),
])  # fmt: skip
def test_targets_that_are_declared(monkeypatch: pytest.MonkeyPatch, requested: Any, record: Any, declared: Any) -> None:
    """The requested targets, those of the provenance, or the whole table.

    With no target, a library without binaries is a warning.
    """
    monkeypatch.setattr(engine, "find_provenance", lambda *_: record)
    monkeypatch.setattr(engine, "read_embedded", lambda _: ("binary",))
    monkeypatch.setattr(engine, "check_provenance", lambda *given: (given[2],))
    monkeypatch.setattr(engine, "audit_kernels", lambda *given: kernels.KernelAudit(given, ("row",)))  # type: ignore[arg-type]
    found, binaries = engine.audit_embedded(Path("a"), engine.Options(targets=requested), "tables", None)  # type: ignore[arg-type]
    assert found == kernels.KernelAudit((("binary",), "tables", declared, ("binary",)), ("row",))  # type: ignore[arg-type]
    assert tuple(map(str, binaries)) == ("binary",)
    for error in (NoBinariesError("none", "build"), AuditError("damaged", "build")):

        def fail(_: Path, error: AuditError = error) -> Any:
            raise error

        monkeypatch.setattr(engine, "read_embedded", fail)
        found, binaries = engine.audit_embedded(Path("a"), engine.Options(targets=requested), "tables", None)  # type: ignore[arg-type]
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
    """torch's own library wins; a path is not searched for; each library is looked up once, for the first that needs it."""
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
    requested: list[str] = []
    monkeypatch.setattr(resolve.Resolver, "find", lambda _, soname, __: requested.append(soname))
    closure = without.closure(tmp_path / "a.so", ("gone.so", "gone.so"), Search())
    assert (requested, closure.absent) == (["gone.so"], {"gone.so": "a.so"})


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
    """Files that are not too large; a folder may have a file's name."""
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
