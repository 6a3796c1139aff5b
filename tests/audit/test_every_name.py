"""What is reported about each name that a file needs or defines and each module that a source loads, on made-up facts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_every_check import _context, _elf, _symbol, told

from flashmoe_tools.audit import (
    context,
    engine,
    loading,
    lookup,
    names,
    package,
    render,
    resolve,
    sources,
    symbols,
    torch_libraries,
    torch_symbols,
)
from flashmoe_tools.audit.elf import Search
from flashmoe_tools.audit.embedded import INDEX_SECTION
from flashmoe_tools.audit.kernels import KernelAudit
from flashmoe_tools.audit.torch_libraries import InstalledTorch, Shims
from flashmoe_tools.report import Check, Report, Verdict

ABS = "_ZN2at3absERKNS_6TensorE"  # at::abs
SUM = "_ZN2at3sumERKNS_6TensorE"
SHIMS = Shims("2.10.0", {"aoti_torch_a": "libtorch_cpu.so", "aoti_torch_c": "libtorch_cuda.so"})


def _wants(*wanted: Any, ours: bool = False, gives: tuple[str, ...] = (), **more: Any) -> Any:
    """A file that needs these symbols; the libraries define some of them."""
    closure = SimpleNamespace(absent={}, libraries={}, gives=lambda symbol: symbol.name in gives)
    dynamic = tuple(_symbol(one, False) if isinstance(one, str) else one for one in wanted)
    made = _context(ours, None, closure, dynamic=dynamic, **{key: more.pop(key) for key in ("needed", "static", "path") if key in more})  # fmt: skip
    made.__dict__.update({"torch": InstalledTorch("2.10.0", {}), "torch_version": "2.10.0", **more})
    return made


# Needed names


def test_what_is_said_of_a_name_that_nobody_gives() -> None:
    check = symbols.check_undefined
    assert told(check(_wants("f"))) == [("FAIL", "undefined symbol: f", "f is undefined")]
    assert told(check(_wants("_Z1fv"))) == [("FAIL", "undefined symbol: f()", "f() is undefined [_Z1fv]")]
    assert told(check(_wants(_symbol("f", False, version="V_1"), gives=()))) == [("FAIL", "undefined symbol: f", "f, version V_1 is undefined")]  # fmt: skip
    every = (_symbol("w", False, "weak"), "f", "aoti_torch_a", SUM, "PyLong_FromLong")
    found = (
        "5 undefined: 1 found by name and version in the libraries that it needs; 1 exported by Python {}; "
        "2 of torch, judged by its own checks; 1 weak, and may stay undefined"
    )
    assert told(check(_wants(*every, gives=("f",)))) == [("PASS", "undefined symbols", found.format(lookup.here()))]
    assert told(check(_wants())) == [("PASS", "undefined symbols", "0 undefined")]
    absent = _wants("f", "_Z1gv")
    absent.closure.absent = {"liba.so": "_C.so"}
    assert told(check(absent)) == [("FAIL", "undefined symbols", "2 could not be looked up: f, g()")]
    (name,) = check(_wants("Py_None_Such", ours=True))
    assert "Python" not in name.why
    other = told(check(_wants("Py_NoneSuch", path=Path("_C.cpython-399-x86_64-linux-gnu.so"))))
    assert other[1] == ("WARN", "Python names", f"1 not known to Python {lookup.here()}: Py_NoneSuch")
    (name,) = check(_wants("Py_NoneSuch", path=Path(f"_C.cpython-{lookup.here().replace('.', '')}-x.so")))
    assert "a misspelt name, or one of another version" in name.why
    assert told(check(_wants("f_of_none", ours=False)))[0][0] == "FAIL"


@pytest.mark.parametrize(("name", "wheel", "version"), [
    ("_C.cpython-311-x.so", "", "3.11"), ("_C.so", "a-1-cp310-cp310-x.whl", "3.10"), ("_C.abi3.so", "a-1-cp310-abi3-x.whl", ""),
    ("_C.abi3.so", "a-1-cp310-cp310-x.whl", ""),
    ("_C.so", "a-1-cp310-abi3-x.whl", ""), ("_C.so", "", ""), ("_C.cpython-311-x.so", "a-1-cp310-cp310-x.whl", "3.11"), ("_C.so", "a-1-py3-none-x.whl", ""),
])  # fmt: skip
def test_the_python_that_a_file_is_built_for(name: str, wheel: str, version: str) -> None:
    assert lookup.built_for(_wants(path=Path(name), wheel_name=wheel)) == version


def test_where_a_missing_name_may_be(tmp_path: Path) -> None:
    """The nearest cause is reported: a library of torch, Python, a similar name, a source."""

    def cause(
        name: str = "f()",
        candidates: tuple[str, ...] = (),
        elsewhere: str | None = None,
        ours: bool = True,
        symbol: str = "_Z1fv",
        **more: Any,
    ) -> str:
        made = _wants(ours=ours, resolver=SimpleNamespace(elsewhere=lambda *_: elsewhere), **more)
        return symbols._cause(made, _symbol(symbol, False), name, candidates)[0]

    assert cause(elsewhere="liba.so").startswith("liba.so exports it")
    assert cause(symbol="PyA").startswith("declared and called")
    assert cause(symbol="_PyA", ours=False).startswith("Python ")
    assert cause("void f<__half>()", ("void f<c10::Half>()",)).startswith("`void f<c10::Half>()` is defined, `void f<__half>()` is required")  # fmt: skip
    assert cause("void f<int>()", ("void f<float>()", "f()")).startswith("`f` is instantiated for <float> but not for <int>")  # fmt: skip
    assert cause("f(int)", ("f(float)",)).startswith("`f` is defined with another signature (f(float)): ")
    assert cause("f()", ("f()", "g()")) == "declared and called, and nothing that was linked defines it"
    user = _elf(path=Path("a.o"), static=(_symbol("_Z1fv", False), _symbol("_Z1gv")))
    assert cause(objects=(user, _elf())).endswith("; used by a.o")
    assert cause("g()", objects=(user,)).endswith("defines it")
    for text, words in (
        ("int f();", "is declared in src/a.cpp:1 and called"),
        ("int f() {}", "is defined in src/a.cpp:1, but"),
        ("int f();\nint f() {}", "is defined in src/a.cpp:2, but"),
        ("int a = g(f());", "declared and called"),
    ):
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src" / "a.cpp").write_text(text)
        assert words in cause(source=tmp_path / "src")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", ""),
        ("(int)", "(int)"),
        ("<int>", "<int>"),
        ("virtual thunk to a::f()", "a::f"),
        ("typeinfo name for A", "A"),
        ("void a<int>::g<b<c>>(d)", "a::g"),
    ],
)
def test_what_is_left_of_a_name(name: str, expected: str) -> None:
    assert names.qualified_name(name) == expected
    roots = {"SaveState": "SaveState", "N1a": "N1a", "_ZN1a1bE": "a", "_ZNKSt1aE": "std", "_ZTV1a": "a", "_Z": "_Z"}
    assert {word: names.root(word) for word in roots} == roots
    assert [names.is_torch(word) for word in ("at", ABS, "_ZN3c104HalfE", "_ZN3att1fE")] == [False, True, True, False]


def test_weak_names_that_may_stay_open() -> None:
    open_ones = [("w", True), ("_Z1wv", False), ("_ZTHw", True), ("_ZGTtw", True)]
    assert [(name, context.may_stay_open(_context(), _symbol(name, False, "weak"))) for name, _ in open_ones] == open_ones  # fmt: skip
    assert [context.may_stay_open(_context(False), _symbol("_Z1w", False, how)) for how in ("weak", "global")] == [
        True,
        False,
    ]


# Names of torch


def test_names_of_torch() -> None:
    check, weak = torch_symbols.check_torch_symbols, _symbol(ABS, False, "weak")
    stays = [("PASS", "torch C++ symbols", "none required, none exported (1 header-only ones stayed local)")]
    assert told(check(_wants("f", _symbol(ABS)))) == told(check(_wants(ours=True, static=(_symbol(ABS),)))) == stays
    assert told(check(_wants(_symbol(ABS), ours=True))) == [("FAIL", "torch C++ symbols exported", "1 exported: at::abs(at::Tensor const&)")]  # fmt: skip
    wanted = ("FAIL", "torch C++ symbols", "1 required: at::abs(at::Tensor const&)")
    there = ("PASS", "resolves against the installed torch", "all 1 are exported by torch 2.10.0: it imports with this one")  # fmt: skip
    assert told(check(_wants(weak))) == told(check(_wants(ABS, gives=(ABS,)))) == [wanted, there]
    lost = ("FAIL", "not in torch 2.10.0: at::abs(at::Tensor const&)", f"at::abs(at::Tensor const&) is undefined [{ABS}]")  # fmt: skip
    assert told(check(_wants(ABS))) == told(check(_wants(weak, ours=True))) == [wanted, lost]
    assert told(check(_wants(ABS, torch=None)))[1][:2] == ("SKIP", "resolves against the installed torch")


def test_shims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_symbols, "shims_for", lambda _: SHIMS)
    check, both = torch_symbols.check_shims, ("libtorch_cpu.so", "libtorch_cuda.so")
    assert told(check(_wants("f"))) == [("SKIP", "torch shims", "uses none")]
    assert told(check(_wants("f", ours=True))) == [("FAIL", "torch shims", "no shim is used")]
    assert told(check(_wants("aoti_torch_a", needed=both))) == [("PASS", "torch shims", "1 used, all exported by torch 2.10.0")]  # fmt: skip
    assert told(check(_wants("aoti_torch_x", needed=both))) == [("FAIL", "unknown shim: aoti_torch_x", "aoti_torch_x is undefined")]  # fmt: skip
    (lost,) = check(_wants("aoti_torch_a", "aoti_torch_c", "torch_x", needed=both[1:]))[1:]
    assert (lost.name, lost.found, lost.expected) == (
        "shim library: libtorch_cpu.so",
        f"needed: {both[1]}",
        "libtorch_cpu.so in DT_NEEDED, which exports aoti_torch_a",
    )
    asked = ((), ("aoti_torch_a",), ("aoti_torch_x",))
    verdicts = [told(torch_symbols.check_run_time_names(_wants(), (*given, "f", "torch_a"))) for given in asked]
    name = "shims looked up at run time"
    assert verdicts == [[], [("PASS", name, "aoti_torch_a")], [("WARN", name, "aoti_torch_x")]]


def test_the_torch_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = InstalledTorch("2.10.0+cpu", {"libtorch_cuda.so": Path("x"), "liba.so": Path("y")})
    monkeypatch.setattr(torch_libraries, "installed_torch", lambda: here)
    monkeypatch.setattr(torch_libraries, "exported_names", lambda _: frozenset({"aoti_torch_of_here", "f"}))
    assert torch_libraries.shims_for("2.10.0+cu128").library == {"aoti_torch_of_here": "libtorch_cuda.so"}
    assert "aoti_torch_of_here" not in torch_libraries.shims_for("2.10.1").library
    monkeypatch.setattr(torch_libraries, "installed_torch", lambda: None)
    assert "aoti_torch_get_dim" in torch_libraries.shims_for("2.10.0").library
    monkeypatch.undo()
    for spec in (None, SimpleNamespace(submodule_search_locations=None)):
        monkeypatch.setattr(torch_libraries.importlib.util, "find_spec", lambda _, spec=spec: spec)
        assert torch_libraries.installed_torch.__wrapped__() is None


def test_a_floor_is_judged_by_the_tag_where_it_states_one() -> None:
    wheel = SimpleNamespace(path=Path("a-1-py3-none-manylinux_2_28_x86_64.whl"))
    newer = {"versions": {"libc.so.6": ("GLIBC_2.99",)}}
    assert [
        told(loading.check_versions(_context(ours, given, **newer)))[0][0]
        for ours, given in ((False, wheel), (True, wheel), (False, None))
    ] == [
        "SKIP",
        "FAIL",
        "FAIL",
    ]


# What the package loads


@pytest.mark.parametrize(("extensions", "text", "needed", "verdict", "found"), [
    (("p/_C.so",), "from . import _C", (), "PASS", "p/_C.so: named in the sources, or needed by another library"),
    (("p/_C.so",), "x = 1", (), "WARN", "no import and no load_library names p/_C.so"),
    (("p/libx.so",), "x = 1", ("libx.so",), "PASS", "p/libx.so: named in the sources, or needed by another library"),
    (("fast.so",), "x = 1", (), "PASS", "fast.so: modules that are imported by their own names"),
    (("p/fast.so",), "x = 1", (), "WARN", "no import and no load_library names p/fast.so"),
    (("_fast.so",), "x = 1", (), "WARN", "no import and no load_library names _fast.so"),
    (("libfast.so",), "", (), "WARN", "no import and no load_library names libfast.so"),
    (("p/_C.so",), "import p._D", (), "FAIL", "p/a.py:1 loads module `_D`; the wheel holds p/_C.so"),
    (("p/_C.so",), "x\nCDLL('a/_D.so')", (), "FAIL", "p/a.py:2 loads file `_D.so`; the wheel holds p/_C.so"),
    (("p/_C.so",), "CDLL('libcuda.so.1')", (), "WARN", "no import and no load_library names p/_C.so"),
])  # fmt: skip
def test_files_that_a_package_loads(
    extensions: Any, text: str, needed: tuple[str, ...], verdict: str, found: str
) -> None:
    held = {"names": (*extensions, "p/a.py"), "extensions": extensions, "sources": {"p/a.py": text}}
    wheel: Any = SimpleNamespace(**held, metadata={"METADATA": ""}, is_ours=False)
    assert [one[::2] for one in told(package.check_loads(wheel, {"x": _elf(needed=needed)}))] == [(verdict, found)]


def test_the_file_that_is_meant() -> None:
    assert "built as `_C.so`, loaded as `_D`" in package._lost_check("a.py", 1, "_D", ["p/_C.so"]).why
    for idle in ([], ["p/_C.so", "p/_E.so"]):
        assert "nothing in the wheel is called `_D`" in package._lost_check("a.py", 1, "_D", idle).why


# Libraries and sources


def test_what_a_file_brings_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breadth first; RPATH applies to everything below, RUNPATH, if present, only to the library's own needs."""
    torch = InstalledTorch("2.10.0", {"t.so": Path("/torch/t.so")})
    needs = {"a.so": ("b.so", "gone.so"), "t.so": ("c.so",), "b.so": ("a.so", "d.so")}
    paths = {"a.so": Search(("/ra",)), "t.so": Search(("/unused",), ("/rt",))}
    asked: list[tuple[str, tuple[str, ...]]] = []

    def find(_: Any, soname: str, folders: Any) -> Path | None:
        asked.append((soname, tuple(map(str, folders))))
        return torch.libraries.get(soname) or (None if soname in ("n.so", "gone.so") else Path("/lib", soname))

    def provided(path: Path) -> Any:
        return SimpleNamespace(needed=needs.get(path.name, ()), search=paths.get(path.name, Search()))

    monkeypatch.setattr(resolve.Resolver, "find", find)
    monkeypatch.setattr(resolve, "provided", provided)
    resolver = resolve.Resolver(torch, named={"n.so": Path("/wheel/n.so"), "a.so": Path("/wheel/a.so")})
    found = resolver.closure(Path("/x/_C.so"), ("a.so", "t.so", "n.so"), Search((), ("/run",)))
    assert list(found.libraries) == ["a.so", "t.so", "n.so", "b.so", "c.so", "d.so"]
    assert (found.absent, found.from_torch, found.from_sources) == ({"gone.so": "a.so"}, ("t.so",), ("n.so",))
    assert asked == [*((name, ("/run",)) for name in ("a.so", "t.so", "n.so")),
                     ("b.so", ("/ra",)), ("gone.so", ("/ra",)), ("c.so", ("/rt",)), ("d.so", ("/ra",))]  # fmt: skip
    lent = resolver.closure(Path("/x/_C.so"), ("t.so",), Search(("/torch",)))
    assert (lent.from_torch, asked[-1]) == ((), ("c.so", ("/rt",)))


@pytest.mark.parametrize(
    ("ours", "installed", "asked", "version"),
    [
        (True, "9.9", None, engine.OUR_TORCH_VERSION),
        (True, "9.9", "9.8", "9.8"),
        (False, "9.9", None, "9.9"),
        (False, None, None, engine.OUR_TORCH_VERSION),
    ],
)
def test_what_a_library_is_judged_by(
    monkeypatch: pytest.MonkeyPatch, ours: bool, installed: str | None, asked: str | None, version: str
) -> None:
    """Ours is judged by the torch that we build with, whatever is installed, and by our tables if none are given."""
    seen: list[Any] = []

    def look(context: Any) -> tuple[Check, ...]:
        seen.append((context.torch_version, context.source))
        return ()

    def embedded(*given: Any) -> Any:
        seen.append(given[2])
        return KernelAudit((), ()), ()

    made: dict[str, Any] = {
        "read_elf": lambda _: _elf(sections=(INDEX_SECTION,) * ours),
        "installed_torch": lambda: InstalledTorch(installed, {}) if installed else None,
        "read_only_strings": lambda _: (),
        "check_symbols": look,
        "check_run_time_names": lambda *_: (),
        "check_loading": lambda _: (),
        "audit_embedded": embedded,
        "load_tables": lambda: "our tables",
        "default_source": lambda _: "csrc",
    }
    for name, value in made.items():
        monkeypatch.setattr(engine, name, value)
    for tables in (None, "other tables"):
        seen.clear()
        source = Path("src") if tables else None
        engine.audit_library("a", Path("a.so"), engine.Options(asked, source=source), tables)  # type: ignore[arg-type]
        assert seen == [(version, source or ("csrc" if ours else None)), *([tables or "our tables"] if ours else [])]


def test_the_folder_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that Python names for its library; if it names none, Python's own folder."""
    for said, folder in (("/python/lib", "/python/lib"), (None, resolve.sys.base_prefix)):
        monkeypatch.setattr(resolve.sysconfig, "get_config_var", {"LIBDIR": said}.get)
        assert resolve.python_folder() == Path(folder)


@pytest.mark.parametrize(("text", "kinds"), [
    ("int f();", [False]), ("int f() { return 1; }", [True]), ("return f();", []), ("// int f();\n", []), ("x = f(1);", []), ("int gf();", []), ("a.f();", []),
    ("/* int f(); */ int f(int (*)(int), int) {", [True]), ("template <> int a::f<int>(int);", [False]), ("int f(", []),
    ("#define X\nint* f();", [False]), ("f(1);", []),
])  # fmt: skip
def test_where_a_source_names_a_function(tmp_path: Path, text: str, kinds: list[bool]) -> None:
    for name in ("a.cpp", "a.txt"):
        (tmp_path / name).write_text("\n" + text)
    found = sources.find_mentions(tmp_path, "f")
    line = 2 + text.startswith("#")
    assert found == tuple(sources.Mention(f"{tmp_path.name}/a.cpp:{line}", kind) for kind in kinds)


# Reports


def test_long_lists() -> None:
    """The verdict of the merged checks is the worst of them."""
    told_why = [
        context.failed("a", found="", expected="", why="W.", cause=cause, next_step="").why for cause in ("", "C")
    ]
    assert told_why == ["W.", "W. Cause: C"]
    assert [context.listing("abc", limit) for limit in (2, 3)] == ["a, b and 1 more", "a, b, c"]
    rows = [Check(f"a: {at}", Verdict.WARN) for at in range(22)]
    assert context.limited(rows[:20]) == rows[:20]
    for last in (Verdict.WARN, Verdict.FAIL):
        found = context.limited([*rows[:21], Check("b", last)])
        assert (found[:20], len(found), found[20].name, found[20].verdict) == (rows[:20], 21, "a: 2 more", last)


def test_tables_of_kernels() -> None:
    """The worst of a unit's kernels with the fewest blocks; empty for a target that the unit lacks."""
    row = {
        "unit": "k",
        "target": "sm_80",
        "gpu": "sm80",
        "threads": 128,
        "smem_static": 0,
        "smem_dynamic": 16,
        "registers": 40,
        "blocks_per_sm": 3,
        "problems": [],
    }
    rows = [
        row,
        {**row, "registers": 64, "blocks_per_sm": 2, "threads": 256},
        {**row, "gpu": "sm86", "problems": ["x"]},
        {**row, "unit": "p", "target": "ptx", "registers": None},
    ]
    table = [("unit", "threads", "static", "dynamic", "ptx", "sm_80"), ("k", "256", "0", "16", "", "64: 2 0"), ("p", "128", "0", "16", "-: 3", "")]  # fmt: skip
    assert render.kernel_table({"subjects": [{"launchability": rows[:2]}, {"launchability": rows[2:]}, {}]}) == table
    assert render.kernel_table({}) == render.kernel_table({"subjects": [{"launchability": []}]}) == []
    sound = Report("audit", (Check("a", Verdict.PASS, "b\n"),), {"path": "x", "subjects": []})
    assert list(render.plain(sound)) == ["PASS  a: b\\n", "", "audit of x: PASS (1 PASS; 0.0 s)"]
    assert list(render.plain(replace(sound, data={"path": "x", "subjects": [{"launchability": rows[:1]}]})))[1:5] == [
        "", render.LEGEND, "unit  threads  static  dynamic  sm_80", "k     128      0       16       40: 3"]  # fmt: skip
    worse = replace(sound, checks=(*sound.checks, Check("c", Verdict.FAIL, "d", next_step="e")))
    assert list(render.plain(worse, every=False)) == [
        "audit of x: FAIL (1 PASS, 1 FAIL; 0.0 s)", "FAIL  c", "        found    d", "        next     e",
        "--details lists what passed, and the kernels' registers and blocks"]  # fmt: skip
    assert render.summary(Report("audit", ())) == "audit of : FAIL (nothing checked; 0.0 s)"
