"""Wheels whose import fails: the interpreter and its loader report it, and the audit must find it without them."""

import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from audit_builders import BESIDE, Workshop, audit, failures, named

from flashmoe_tools.audit.wheels import installed_name
from flashmoe_tools.report import Verdict

HERE = f"{sys.version_info.major}{sys.version_info.minor}"
MACHINE = platform.machine()
NAME = f"science-1.0-cp{HERE}-cp{HERE}-linux_{MACHINE}.whl"
LIB = f"science-1.0.data/data/lib/python3.{HERE[1:]}/site-packages"
# An empty module, using the stable part of PyModuleDef: reference count, type, init, index, copy, name, doc, size,
# methods and so on.
MODULE = """
extern "C" void* PyModule_Create2(void*, int);
static void* definition[16] = {(void*)1, 0, 0, 0, 0, (void*)"_C", 0, (void*)-1};
extern "C" void* PyInit__C() { return PyModule_Create2(definition, 1013); }
"""
IMPORT = "from . import _C\n"
HELPER = 'extern "C" int helper() { return 1; }'
USES = f'extern "C" int helper(); int used = helper();\n{MODULE}'
TLS = 'static __thread char block[%d]; extern "C" char* at(int i) { return block + i; }'
Files = dict[str, bytes | str]


def built(workshop: Workshop, source: str = MODULE, *link: str, flags: tuple[str, ...] = ()) -> bytes:
    return workshop.extension({"bind.cpp": source}, flags=flags, link=link).read_bytes()


def files(extension: bytes, init: str = IMPORT, **more: bytes | str) -> Files:
    return {"science/__init__.py": init, "science/_C.so": extension, **more}


def helper(workshop: Workshop) -> Path:
    return workshop.extension({"help.cpp": HELPER}, link=["-Wl,-soname,libhelper.so"], name="libhelper.so")


def outcome(wheel: Path, folder: Path) -> tuple[int, str]:
    """Unpacks the wheel like pip and imports it with this interpreter."""
    with zipfile.ZipFile(wheel) as archive:
        for member in sorted(archive.infolist(), key=lambda m: ".data/" in m.filename):
            path = folder / installed_name(member.filename)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(member))
    done = subprocess.run(
        [sys.executable, "-c", "import science"],
        cwd=folder,
        env={},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def sound_wheels(workshop: Workshop) -> dict[str, Files]:
    library = helper(workshop)
    extension = built(workshop)
    inside = {"science.libs/libhelper.so": library.read_bytes()}
    preload = "import ctypes, pathlib\nctypes.CDLL(str(pathlib.Path(__file__).parent / 'libhelper.so'))\n"
    return {
        "plain": files(extension),
        "own suffix": {"science/__init__.py": IMPORT, f"science/_C.cpython-{HERE}-{MACHINE}-linux-gnu.so": extension},
        "beside": {**files(built(workshop, USES, str(library), BESIDE)), "science/libhelper.so": library.read_bytes()},
        "in a folder": {**files(built(workshop, USES, str(library), "-Wl,-rpath,$ORIGIN/../science.libs")), **inside},
        "data folder": {"science/__init__.py": IMPORT, "science-1.0.data/platlib/science/_C.so": extension},
        "loaded before": {**files(built(workshop, USES, str(library)), preload + IMPORT), "science/libhelper.so": library.read_bytes()},
    }  # fmt: skip


def broken_wheels(workshop: Workshop) -> dict[str, tuple[Files, str]]:
    """Each broken wheel with the name of the check that must fail."""
    library = helper(workshop)
    content, extension = library.read_bytes(), built(workshop)
    libs = {"science.libs/libhelper.so": content}
    nameless = workshop.extension({"help.cpp": HELPER}, name="libhelper.so")
    through_path = built(workshop, USES, str(nameless))
    nameless.unlink()
    needed, source = "needed libraries: libhelper.so", "source: science/__init__.py"
    other = "310" if HERE != "310" else "311"
    return {
        "no run path": ({**files(built(workshop, USES, str(library))), "science/libhelper.so": content}, needed),
        "grafted, no run path": ({**files(built(workshop, USES, str(library))), **libs}, needed),
        "wrong run path": ({**files(built(workshop, USES, str(library), "-Wl,-rpath,$ORIGIN/lib")), **libs}, needed),
        "a path": ({**files(through_path), "science/libhelper.so": content}, "needed libraries: /"),
        "another Python": ({"science/__init__.py": IMPORT, f"science/_C.cpython-{other}-{MACHINE}-linux-gnu.so": extension}, "science._C"),
        "another machine": ({"science/__init__.py": IMPORT, f"science/_C.cpython-{HERE}-mips-linux-gnu.so": extension}, "science._C"),
        "no module": (files(built(workshop, HELPER)), "module name: _C.so"),
        "hidden module": (files(built(workshop, MODULE, flags=("-fvisibility=hidden",))), "module name: _C.so"),
        "two other modules": (files(built(workshop, MODULE.replace("PyInit__C", "PyInit_a") + HELPER.replace("helper", "PyInit_b"))), "module name: _C.so"),
        "overridden": ({**files(extension), "science-1.0.data/purelib/science/__init__.py": "1 / 0\n"}, "installed twice"),
        "overridden in lib": ({**files(extension), f"{LIB}/science/__init__.py": "1 / 0\n"}, "installed twice"),
        "NUL": (files(extension, f"{IMPORT}\0"), source),
        "deep": (files(extension, "x = " + "(" * 5000 + ")" * 5000), source),
        "deeper than the compiler": (files(extension, "x = " + "-" * 5000 + "1"), source),
        "TLS": (files(built(workshop, TLS % (1 << 20) + MODULE, flags=("-ftls-model=initial-exec",))), "thread-local storage"),
    }  # fmt: skip


def test_what_imports_passes(workshop: Workshop, tmp_path: Path) -> None:
    for name, members in sound_wheels(workshop).items():
        wheel = workshop.wheel(members, name=NAME)
        assert outcome(wheel, tmp_path / name) == (0, ""), name
        assert not failures(audit(wheel)), (name, failures(audit(wheel)))


def test_what_does_not_import_fails(workshop: Workshop, tmp_path: Path) -> None:
    for name, (members, check) in broken_wheels(workshop).items():
        wheel = workshop.wheel(members, name=NAME)
        assert named(audit(wheel), check), name
        status, message = outcome(wheel, tmp_path / name)
        assert status, (name, message)


@pytest.mark.parametrize("option", ["audit", "depaudit", "filter", "auxiliary"])
def test_libraries_that_the_loader_would_run_instead(workshop: Workshop, option: str) -> None:
    """A filter gets its symbols from another library; an audit library runs in every tool that asks the loader."""
    link = f"-Wl,--{option},libaud.so"
    report = audit(workshop.wheel(files(built(workshop, MODULE, link)), name=NAME))
    assert named(report, "loaded beside DT_NEEDED").found == f"DT_{option.upper()} libaud.so"


def test_thread_local_storage_that_may_not_fit_is_a_warning(workshop: Workshop) -> None:
    source = TLS % 1000 + MODULE
    report = audit(workshop.wheel(files(built(workshop, source, flags=("-ftls-model=initial-exec",))), name=NAME))
    assert [c.verdict for c in report.checks if "thread-local" in c.name] == [Verdict.WARN]


@pytest.mark.parametrize(
    ("stated", "verdict"), [("1.0", None), ("1.9", Verdict.WARN), ("9.0", Verdict.FAIL), ("", Verdict.FAIL)]
)
def test_version_of_the_wheel_format(workshop: Workshop, stated: str, verdict: Verdict | None) -> None:
    members: Files = {
        **files(built(workshop)),
        "science-1.0.dist-info/METADATA": "Name: science\n",
        "science-1.0.dist-info/WHEEL": f"Wheel-Version: {stated}\nTag: cp{HERE}-cp{HERE}-linux_{MACHINE}\n"
        if stated
        else "Tag: x\n",
    }
    report = audit(workshop.wheel_of(members, NAME))
    assert [c.verdict for c in report.checks if "wheel version" in c.name] == ([verdict] if verdict else [])


@pytest.mark.parametrize(
    ("init", "use", "is_right"),
    [
        ("import torch\nfrom . import _C\n", "", True),
        ("from . import use\n", "import torch\nfrom science import _C\n", True),
        ("import torch.nn\nfrom . import use\n", "from ._C import go\n", True),
        ("from . import _C\nimport torch\n", "", False),
        ("from . import _C\n", "", False),
        ("from . import use\n", "import science._C\n", False),
    ],
)  # fmt: skip
def test_torch_before_what_needs_it(workshop: Workshop, init: str, use: str, is_right: bool) -> None:
    torch = Path(__import__("torch").__file__).parent / "lib"
    content = built(
        workshop, MODULE, "-Wl,--no-as-needed", f"-L{torch}", "-lc10", "-Wl,--as-needed", "-Wl,--allow-shlib-undefined"
    )
    wheel = workshop.wheel(files(content, init, **{"science/use.py": use}), name=NAME)
    found = [check.name for check in failures(audit(wheel)) if "torch before" in check.name]
    assert bool(found) is not is_right
