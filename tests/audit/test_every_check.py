"""What each check reports for each single fault, on made-up facts: no compiler, no library."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_tools.audit import binutils, elf, engine, imports, kernels, loading, lookup, package, symbols, wheels
from flashmoe_tools.audit.cubin import CubinFacts, KernelFacts
from flashmoe_tools.audit.elf import ElfFacts, Provided, Search, Symbol
from flashmoe_tools.audit.embedded import Binary
from flashmoe_tools.audit.errors import NotElfError
from flashmoe_tools.audit.policy import load_policy
from flashmoe_tools.audit.ptx import PtxEntry, PtxFacts
from flashmoe_tools.audit.resources import MAX_PARAM_BYTES, check_launches, check_parameters, check_resources, launches
from flashmoe_tools.report import Check
from flashmoe_tools.tables import load_tables

Told = list[tuple[str, str, str]]


def told(checks: Sequence[Check]) -> Told:
    return [(str(check.verdict), check.name, check.found) for check in checks]


# Device code


KERNEL = KernelFacts("k_full", 64, 0, 0, 512, 128, 16, 1000)
UNIT: Any = SimpleNamespace(
    name="k",
    dtype="f16",
    row=SimpleNamespace(threads=128, allow=(), operation="attention", family="sm80", smem_bytes=lambda _: 2048),
)
EXPECTED: dict[tuple[str, str], Any] = {("k", "sm_80"): UNIT}
BINARY = Binary(
    "k",
    "sm_80",
    "cubin",
    0,
    100,
    "a" * 64,
    ("k_full",),
    2048,
    128,
    "a" * 64,
    CubinFacts("sm_80", (KERNEL,), ("k_full",)),
)


def _with(binary: Binary = BINARY, **kernel: Any) -> Binary:
    return replace(binary, facts=CubinFacts("sm_80", (replace(KERNEL, **kernel),), ("k_full",)))


SOUND = [("PASS", "resources", "threads, shared memory and local memory as the table says")]


@pytest.mark.parametrize(
    ("binary", "allow", "found"),
    [
        (BINARY, (), SOUND), (_with(max_threads=0), (), SOUND), (replace(BINARY, name="other", threads=1), (), SOUND),
        (replace(BINARY, smem_dynamic=2049), (), [("FAIL", "shared memory: k.sm_80", "2049 bytes in the index")]),
        (replace(_with(max_threads=256), threads=129), (), [("FAIL", "threads: k.sm_80", "129 in the index")]),
        (_with(max_threads=127), (), [("FAIL", "launch bounds: k_full", "at most 127 threads (sm_80)")]),
        (_with(local=8), (), [("FAIL", "local memory: k_full", "8 bytes per thread for sm_80")]),
        (_with(stack=16, local=8), ("other",), [("FAIL", "local memory: k_full", "16 bytes per thread for sm_80")]),
        (_with(stack=8), ("spill",), [*SOUND, ("PASS", "local memory that kernels.toml allows", "1: k_full 8 bytes per thread (sm_80)")]),
        (BINARY, ("spill",), SOUND),
    ],
)  # fmt: skip
def test_resources(binary: Binary, allow: tuple[str, ...], found: Told) -> None:
    unit = SimpleNamespace(**{**vars(UNIT), "row": SimpleNamespace(**{**vars(UNIT.row), "allow": allow})})
    assert told(check_resources([binary], {("k", "sm_80"): unit})) == found  # type: ignore[dict-item]


def test_parameters() -> None:
    name = "parameters: attention_sm80"
    assert told(check_parameters([BINARY, replace(BINARY, facts=None)], EXPECTED)) == [
        ("PASS", "kernel parameters", "attention_sm80: 16 bytes")
    ]
    assert told(check_parameters([_with(param_bytes=MAX_PARAM_BYTES)], EXPECTED))[0][0] == "PASS"
    assert told(check_parameters([_with(param_bytes=MAX_PARAM_BYTES + 1)], EXPECTED)) == [
        ("FAIL", name, f"{MAX_PARAM_BYTES + 1} bytes")
    ]
    two = [BINARY, _with(replace(BINARY, target="sm_90a"), param_bytes=24)]
    assert told(check_parameters(two, EXPECTED)) == [
        ("FAIL", name, "16 bytes in k_full (sm_80); 24 bytes in k_full (sm_90a)")
    ]

    ptx = replace(BINARY, target="ptx", facts=PtxFacts("sm_80", "8.7", (PtxEntry("k_ptx", 0, 0, 0, 24, False),)))
    assert told(check_parameters([BINARY, ptx], EXPECTED)) == [
        ("FAIL", name, "16 bytes in k_full (sm_80); 24 bytes in k_ptx (ptx)")
    ]


def test_entries() -> None:
    """The content of a binary is listed; an unreadable one contains nothing here and is judged by another check."""

    def found(binary: Binary, *stated: str) -> Told:
        unit: Any = SimpleNamespace(entries=tuple(("f16", symbol) for symbol in stated))
        return told(kernels._check_entries([binary], {("k", "sm_80"): unit}))

    ptx = replace(BINARY, facts=PtxFacts("sm_80", "8.7", (PtxEntry("k_full", 0, 0, 0, 0, False),)))
    assert found(ptx, "k_full") == found(BINARY, "k_full")
    unread, empty = replace(BINARY, facts=None), replace(BINARY, entries=("k",), facts=CubinFacts("sm_80", (), ()))
    assert found(BINARY, "k_full") == [("PASS", "kernel entries", "1 symbols, each in its binary")]
    assert found(replace(BINARY, entries=("k",)), "k") == [
        ("FAIL", "missing entry: k", "k.sm_80 holds k_full"),
        ("FAIL", "entry outside the table: k_full", "k_full in k.sm_80"),
    ]
    assert found(empty, "k") == [("FAIL", "missing entry: k", "k.sm_80 holds nothing")]
    assert found(BINARY, "k_full", "k")[1:] == [("FAIL", "index entries: k.sm_80", "k_full")]
    assert found(unread, "k") == [("PASS", "kernel entries", "0 symbols, each in its binary")]
    assert unread.symbols == frozenset()


def test_launches_of_what_is_known() -> None:
    tables = load_tables()
    rows = list(launches([BINARY, replace(BINARY, target="sm_99")], tables))
    assert [row.gpu for row in rows] == list(tables.target("sm_80").gpus)
    assert told(check_launches(rows))[0][2].startswith(f"{len(rows)} kernel and GPU pairs")
    ptx = replace(BINARY, facts=PtxFacts("sm_80", "8.7", (PtxEntry("k_ptx", 8, 4, 96, 16, False),)))
    assert [(row.need.registers, row.need.smem_static, row.need.local_memory) for row in launches([ptx], tables)] == [
        (None, 8, 4)
    ] * len(rows)
    assert told(check_resources([ptx], EXPECTED))[0] == ("FAIL", "launch bounds: k_ptx", "at most 96 threads (sm_80)")
    assert list(launches([replace(BINARY, facts=None)], tables)) == []
    bad = list(launches([_with(registers=300)], tables))
    assert {(verdict, name) for verdict, name, _ in told(check_launches(bad))} == {
        ("FAIL", f"not launchable: k_full on {row.gpu}") for row in bad
    }
    assert told(check_launches([])) == [("FAIL", "launchability", "no kernel could be read")]


def _provenance(**changes: Any) -> dict[str, Any]:
    line = {"name": "k", "target": "sm_80", "sha256": "a" * 64, "size": 100, "entries": ["k_full"]}
    return {"extension_sha256": "", "commit": "c" * 40, "targets": ["sm_80"], "binaries": [line], **changes}


def test_provenance(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"library")
    digest, line = wheels.hashlib.sha256(b"library").hexdigest(), _provenance()["binaries"][0]

    def found(built: Sequence[Binary] = (BINARY,), **changes: Any) -> Told:
        return told(wheels.check_provenance(_provenance(**{"extension_sha256": digest, **changes}), library, built))

    assert found() == [("PASS", "provenance", f"library and 1 binaries are those of commit {'c' * 12}")]
    assert told(wheels.check_provenance(None, library, ()))[0][2] == "no readable provenance.json"
    assert found(extension_sha256="b") == [("FAIL", "provenance", f"sha256 {digest[:16]}...")]
    targets = "provenance: targets"
    assert found(targets=[]) == [("FAIL", targets, "none stated, in 1 lines")]
    assert found(targets=["sm_75", "sm_80"]) == [("FAIL", targets, "sm_75, sm_80 stated, in 1 lines")]
    assert found(binaries=[line, line]) == [("FAIL", targets, "sm_80 stated, in 2 lines")]
    assert found((), targets=["sm_80"]) == [
        ("FAIL", targets, "sm_80 stated, in 1 lines"),
        ("FAIL", "provenance: k.sm_80", "not embedded"),
    ]
    assert found(binaries=[]) == [("FAIL", "provenance: k.sm_80", "embedded")]
    assert found(binaries=[{**line, "size": 99}])[0][1:] == (
        "provenance: k.sm_80",
        "{'size': 99, 'entries': ['k_full']}",
    )
    assert found(binaries=[{**line, "sha256": "b" * 64}]) == [("FAIL", "provenance: k.sm_80", f"sha256 {'a' * 16}...")]
    record = wheels.check_provenance(_provenance(extension_sha256=digest), library, ())
    assert record[0].expected == "none, as embedded, in 0 lines"


# Behaviour of the loader


def _elf(**facts: Any) -> ElfFacts:
    given = {"path": Path("_C.so"), "sha256": "", "is_shared": True, "dynamic": (), "static": None, "needed": (), "soname": "", "search": Search(),
             "versions": {}, "has_text_relocations": False, "stack_flags": 6, "sections": ()}  # fmt: skip
    return ElfFacts(**{**given, **facts})


def _context(ours: bool = True, wheel: Any = None, closure: Any = None, **facts: Any) -> Any:
    closure = closure or SimpleNamespace(absent={}, from_sources=[], libraries={}, gives=lambda _: False)
    resolver = SimpleNamespace(elsewhere=lambda *_: None)
    return SimpleNamespace(facts=_elf(**facts), ours=ours, policy=load_policy(), closure=closure, resolver=resolver, wheel=wheel,
                           wheel_name=wheel.path.name if wheel else "", objects=(), source=None)  # fmt: skip


TORCH = ("libtorch_cpu.so",)
AT_START = "bytes in the block that is set up when the process starts"
ITSELF, FLOOR, F = (
    "of libc.so.6, for the file itself",
    "version floor",
    Symbol("f", False, "global", False, 0, "GLIBC_2.99"),
)
HIGHEST = f"GLIBC_{load_policy().versions['GLIBC']}"
NOTHING = "nothing; thread-local storage needs no place fixed at start"
LOADING: tuple[tuple[Callable[[Any], Any], bool, dict[str, Any], Told], ...] = (
    (loading.check_needed, True, {"needed": TORCH}, [("PASS", "needed libraries", "libtorch_cpu.so")]),
    (loading.check_needed, True, {}, [("FAIL", "needed libraries: libtorch_cpu.so", "DT_NEEDED is empty")]),
    (loading.check_needed, True, {"needed": ("libc.so.6",)}, [("FAIL", "needed libraries: libtorch_cpu.so", "libc.so.6")]),
    (loading.check_needed, True, {"needed": (*TORCH, "libx.so")}, [("FAIL", "needed libraries: libx.so", "libx.so")]),
    (loading.check_needed, False, {"needed": ("libx.so",)}, [("PASS", "needed libraries", "libx.so")]),
    (loading.check_needed, False, {}, [("PASS", "needed libraries", "none")]),
    (loading.check_start, True, {}, [("PASS", "loaded beside DT_NEEDED", NOTHING)]),
    (loading.check_start, True, {"loads": ("a.so",)}, [("FAIL", "loaded beside DT_NEEDED", "a.so")]),
    (loading.check_start, True, {"static_tls": loading.SURE_TLS}, [("PASS", "loaded beside DT_NEEDED", NOTHING)]),
    *[(loading.check_start, True, {"static_tls": size}, [(verdict, "thread-local storage", f"{size} {AT_START}")])
      for size, verdict in ((513, "WARN"), (1664, "WARN"), (1665, "FAIL"))],
    (loading.check_run_paths, True, {}, [("PASS", "run path", "no RPATH, no RUNPATH")]),
    (loading.check_run_paths, True, {"search": Search(("$ORIGIN",))}, [("FAIL", "run path", "$ORIGIN")]),
    (loading.check_run_paths, True, {"search": Search(("$ORIGIN:/a",))}, [("FAIL", "run path", "/a")]),
    (loading.check_run_paths, False, {"search": Search(("$ORIGIN:/a",))}, [("WARN", "run path", "/a")]),
    (loading.check_run_paths, False, {"search": Search((), ("$ORIGIN",))}, [("PASS", "run path", "relative to the file only: $ORIGIN")]),
    *[(loading.check_protection, True, {"stack_flags": flags, "has_text_relocations": has_text}, [
        ("PASS", "executable stack", "the stack is not executable") if flags == 6 else ("FAIL", "executable stack", found),
        ("FAIL", "text relocations", "DT_TEXTREL is set") if has_text else ("PASS", "text relocations", "none")])
      for flags, found in ((6, ""), (7, "PT_GNU_STACK is executable"), (None, "no PT_GNU_STACK header")) for has_text in (False, True)],
    (loading.check_versions, True, {}, [("SKIP", FLOOR, "no versioned symbol is used")]),
    (loading.check_versions, True, {"versions": {"libc.so.6": ("GLIBC_2.17", "GLIBC_2.9")}}, [("PASS", FLOOR, "GLIBC_2.17")]),
    (loading.check_versions, True, {"versions": {"libc.so.6": ("GLIBC_2.99",)}}, [("FAIL", f"{FLOOR}: GLIBC_2.99", f"GLIBC_2.99 {ITSELF}")]),
    (loading.check_versions, True, {"versions": {"libc.so.6": ("GLIBC_2.99",)}, "dynamic": (F, replace(F, name="g", version=""))},
     [("FAIL", f"{FLOOR}: GLIBC_2.99", "GLIBC_2.99 of libc.so.6, for f")]),
    *[(loading.check_versions, True, {"versions": {"libc.so.6": (f"GLIBC_{word}",)}}, [("FAIL", f"{FLOOR}: GLIBC_{word}", f"GLIBC_{word} {ITSELF}")])
      for word in ("PRIVATE", "ABI_DT_RELR")],
    (loading.check_versions, True, {"versions": {"libx.so": ("OTHER_99.9", "OTHER_PRIVATE", "GLIBC_TUNABLE")}}, [("PASS", FLOOR, "")]),
    (loading.check_versions, True, {"versions": {"libc.so.6": (HIGHEST,)}}, [("PASS", FLOOR, HIGHEST)]),
    (loading.check_versions, True, {"has_packed_relocations": True, "versions": {"libc.so.6": ("GLIBC_ABI_DT_RELR",)}},
     [("FAIL", f"{FLOOR}: GLIBC_ABI_DT_RELR", f"GLIBC_ABI_DT_RELR {ITSELF}")]),
    (loading.check_versions, True, {"has_packed_relocations": True}, [("FAIL", f"{FLOOR}: DT_RELR", "packed relocations without GLIBC_ABI_DT_RELR")]),
)  # fmt: skip


@pytest.mark.parametrize("case", LOADING, ids=lambda case: f"{case[0].__name__} {case[2]}"[:60])
def test_how_the_loader_treats_it(case: Any) -> None:
    check, ours, facts, found = case
    assert told(check(_context(ours, **facts))) == found


def test_who_binds_a_newer_version() -> None:
    for dynamic, who in (((), "it"), ((F,), "f")):
        (check,) = loading.check_versions(_context(versions={"libc.so.6": ("GLIBC_2.99",)}, dynamic=dynamic))
        assert f"whose headers bind {who} to GLIBC_2.99" in check.why


@pytest.mark.parametrize("place", ["path", "member", "folder", "nowhere"])
def test_a_library_that_is_absent(tmp_path: Path, place: str) -> None:
    soname = "/opt/libx.so" if place == "path" else "libx.so"
    if place == "folder":
        (tmp_path / soname).touch()
    closure = SimpleNamespace(absent={soname: "_C.so"}, from_sources=["liby.so"])
    wheel = (
        SimpleNamespace(path=tmp_path / "w.whl", names=("pkg/libx.so", "pkg/notlibx.so", "libx.so.1"))
        if place == "member"
        else None
    )
    lost, named = told(loading.check_needed(_context(False, wheel, closure, path=tmp_path / "_C.so")))
    beside = "pkg/libx.so" if place == "member" else "libx.so"
    expected = {
        "path": "_C.so needs the path /opt/libx.so",
        "nowhere": "libx.so, needed by _C.so, was not found in the run paths, torch, the CUDA packages or the system",
    }.get(place, f"_C.so needs libx.so; {beside} is there, but no run path leads to it")
    assert lost == ("FAIL", f"needed libraries: {soname}", expected)
    assert named == ("WARN", "needed libraries: liby.so", "in no run path, but a source names it")


# Symbols


def _symbol(name: str, defined: bool = True, binding: str = "global", version: str = "", library: str = "") -> Symbol:
    return Symbol(name, defined, binding, False, 0, version, library)


def test_exports() -> None:
    every = tuple(_symbol(name) for name in load_policy().exports)
    sound = [("PASS", "exports", f'{len(every)} extern "C" names, nothing else')]
    assert told(symbols.check_exports(_context(dynamic=every))) == sound
    assert told(symbols.check_exports(_context(dynamic=every[1:]))) == [
        ("FAIL", f"export: {every[0].name}", "not exported")
    ]
    assert told(symbols.check_exports(_context(dynamic=(*every, _symbol("f"))))) == [
        ("FAIL", "export: f", "f is exported")
    ]
    assert told(symbols.check_exports(_context(False, dynamic=(_symbol("g"), _symbol("f"))))) == [
        ("PASS", "exports", "2: f, g")
    ]
    nothing = [("WARN", "exports", "nothing is exported")]
    unseen = (_symbol("f", binding="local"), replace(_symbol("g"), hidden=True), _symbol("h", defined=False))
    assert told(symbols.check_exports(_context(False))) == nothing
    assert told(symbols.check_exports(_context(False, dynamic=unseen))) == nothing


def test_duplicates() -> None:
    objects = [
        _elf(path=Path(name), static=(_symbol(own), _symbol("w", binding="weak"), _symbol("u", defined=False)))
        for name, own in (("a.o", "f"), ("b.o", "g"))
    ]
    sound = [("PASS", "duplicate definitions", "2 strong definitions in 3 object files, each once")]
    assert told(symbols.check_duplicates([*objects, _elf()])) == sound
    twice = [*objects, _elf(path=Path("c.o"), static=(_symbol("f"),))]
    assert told(symbols.check_duplicates(twice)) == [("FAIL", "duplicate definitions: f", "defined in a.o and in c.o")]


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (None, "does not define V_2"),
        (frozenset(), "does not define V_2"),
        (frozenset({"V_2"}), "has V_2 but no `f` in it"),
    ],
)
def test_a_version_that_the_library_lacks(monkeypatch: pytest.MonkeyPatch, there: Any, words: str) -> None:
    monkeypatch.setattr(symbols, "provided", lambda _: SimpleNamespace(defined_versions=there))
    closure = SimpleNamespace(libraries={} if there is None else {"libx.so": Path("libx.so")})
    cause, step = symbols._cause(
        _context(closure=closure), _symbol("f", False, version="V_2", library="libx.so"), "f", ()
    )
    assert cause == f"linked against another libx.so: the one found here {words}"
    assert step.startswith("link against the libx.so that it will be loaded with")


@pytest.mark.parametrize(
    ("version", "defined", "gives"),
    [
        ("", frozenset({"V"}), True),
        ("V", frozenset({"V"}), True),
        ("W", frozenset({"V"}), False),
        ("W", frozenset(), True),
    ],
)
def test_what_a_library_gives(version: str, defined: frozenset[str], gives: bool) -> None:
    library = Provided(frozenset({"f"}), (), {"f": frozenset({"V"})}, defined)
    assert library.gives(_symbol("f", False, version=version)) is gives
    assert not library.gives(_symbol("g", False, version=version))


def test_a_library_gives_what_it_exports() -> None:
    """Symbols that it needs itself are not included."""
    spec = importlib.util.find_spec("torch")
    path = next(Path(str(spec and spec.origin)).parent.glob("_C.*.so"))
    facts, given = elf.read_elf(path), elf.exported_names(path)
    assert given == {symbol.name for symbol in facts.exported}
    assert "PyInit__C" in given
    assert not given & {symbol.name for symbol in facts.undefined}


def test_a_symbol_of_a_version_is_not_found_in_the_file_itself() -> None:
    own = _symbol("f", binding="local")
    for version, found in (("", 1), ("V_1", 0)):
        looked = lookup.look_up(_context(dynamic=(_symbol("f", False, version=version),), static=(own,)))
        assert (looked.found, len(looked.missing)) == (found, 1 - found)


@pytest.mark.parametrize(("status", "output"), [(1, "f()\n"), (0, ""), (0, "f()\ng()\n")])
def test_a_demangler_that_fails(monkeypatch: pytest.MonkeyPatch, status: int, output: str) -> None:
    monkeypatch.setattr(binutils.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=output, returncode=status))
    monkeypatch.setattr(binutils.shutil, "which", lambda _: "c++filt")
    assert binutils.demangle(["f", "_Z1fv"]) == {"f": "f", "_Z1fv": "_Z1fv (mangled: c++filt failed)"}


# Sources


@pytest.mark.parametrize(("error", "version", "verdict"), [
    ("SyntaxError: x", 999, "WARN"), ("ValueError: x", 999, "FAIL"), ("SyntaxError: x", 3, "FAIL"), ("SyntaxError: x", imports.sys.version_info.minor, "FAIL"),
])  # fmt: skip
def test_a_source_that_does_not_compile(error: str, version: int, verdict: str) -> None:
    wheel: Any = SimpleNamespace(path=Path(f"a-1.0-cp3{version}-cp3{version}-linux_x86_64.whl"))
    assert told([imports._broken_check(wheel, "a.py", error)]) == [(verdict, "source: a.py", error)]


@pytest.mark.parametrize(("source", "text", "names"), [
    ("p/q/m.py", "import a.b, c", ["a.b", "c"]), ("p/q/m.py", "from . import x", ["p.q", "p.q.x"]), ("p/q/m.py", "from .. import x", ["p", "p.x"]),
    ("p/q/m.py", "from .n import x", ["p.q.n", "p.q.n.x"]), ("p/q/m.py", "from a.b import x, y", ["a.b", "a.b.x", "a.b.y"]),
    ("p/q/__init__.py", "from . import x", ["p.q", "p.q.x"]), ("p/q/__init__.py", "from ..r import x", ["p.r", "p.r.x"]),
])  # fmt: skip
def test_what_a_source_imports(source: str, text: str, names: list[str]) -> None:
    assert list(imports._modules(source, imports.ast.parse(text).body)) == names


# Strings, platforms


@pytest.mark.parametrize(
    ("content", "looks"), [(b"", "empty"), (b"text of\nlines", "text"), (b"\x7fELG", "binary"), (b"\xff", "binary")]
)
def test_what_is_no_elf_file(tmp_path: Path, content: bytes, looks: str) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(content)
    with pytest.raises(NotElfError, match=f"is not an ELF file: it is {looks} "):
        elf.require_magic(path)
    path.write_bytes(elf.MAGIC + content)
    elf.require_magic(path)


@pytest.mark.parametrize(("data", "found"), [(None, ()), (b"\0_a1\0b c\0dE\0f", ("_a1", "dE")), (b"ab\0", ("ab",))])
def test_strings_that_may_be_names(monkeypatch: pytest.MonkeyPatch, data: bytes | None, found: tuple[str, ...]) -> None:
    for name in ("read_bytes", "open_elf"):
        monkeypatch.setattr(engine, name, lambda *_: None)
    monkeypatch.setattr(engine, "section_data", lambda *_: data)
    assert engine.read_only_strings(Path("a.so")) == found


@pytest.mark.parametrize(("tags", "content", "verdict", "outside"), [
    ("manylinux_2_28_x86_64", "manylinux_2_28_x86_64", "PASS", ""), ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "PASS", ""),
    ("manylinux_2_17_x86_64", "manylinux_2_28_x86_64", "FAIL", "; outside manylinux_2_17_x86_64: libx.so"),
    ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "PASS", ""),
    ("manylinux_2_28_x86_64", "linux_x86_64", "FAIL", ""), ("linux_x86_64", "linux_x86_64", "PASS", ""), ("linux_x86_64", "manylinux_2_28_x86_64", "PASS", ""),
    ("macosx_11_0", "manylinux_2_28_x86_64", "FAIL", ""), ("alias_x86_64", "manylinux_2_28_x86_64", "PASS", ""),
    ("linux_x86_64.macosx_11_0", "manylinux_2_28_x86_64", "FAIL", ""),
])  # fmt: skip
def test_platforms_that_the_content_has(
    monkeypatch: pytest.MonkeyPatch, tags: str, content: str, verdict: str, outside: str
) -> None:
    references = {
        "manylinux_2_17_x86_64": SimpleNamespace(libs={"libx.so": None}),
        "macosx_11_0": SimpleNamespace(libs={"liby.so": None}),
        "other": SimpleNamespace(libs={"libz.so": None}),
    }
    policy = SimpleNamespace(name=content, aliases=["alias_x86_64"])
    result = SimpleNamespace(overall_policy=policy, external_refs=references)
    monkeypatch.setattr("auditwheel.wheel_abi.analyze_wheel_abi", lambda *_, **__: result)
    wheel: Any = SimpleNamespace(path=Path(f"a-1.0-cp311-cp311-{tags}.whl"), extensions=("a/_C.so",))
    assert told(wheels.check_auditwheel(wheel, {})) == [(verdict, "auditwheel", f"the content is {content}{outside}")]


def test_modules_that_a_source_asks_for() -> None:
    """Names that another source defines are not lost; a source too large to be read is ignored."""
    sources = {
        "p/__init__.py": "from . import _C\nfrom . import _D\n",
        "p/d.py": "def _D(): pass\n",
        "p/large.py": "",
    }
    wheel: Any = SimpleNamespace(names=tuple(sources), metadata={"METADATA": ""}, sources=sources)
    assert package._lost(wheel, ["p/_E.so"]) == [("p/__init__.py", 1, "_C")]
    assert package._lost(wheel, []) == []
