"""What a wheel's sources load at import: only what certainly runs can prove a failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_builders import Workshop, audit, failures, named

from flashmoe_tools.report import Report, Verdict

MODULE = 'extern "C" __attribute__((visibility("default"))) void* PyInit__ext() { return nullptr; }'
NAME = "science-1.0-cp311-cp311-linux_x86_64.whl"


@pytest.fixture(scope="module")
def extension(workshop: Workshop) -> bytes:
    return workshop.extension({"bind.cpp": MODULE}, name="_ext.so").read_bytes()


def report_of(workshop: Workshop, extension: bytes, files: dict[str, str]) -> Report:
    return audit(workshop.wheel({"science/_ext.so": extension, **files}, name=NAME))


# Each of these imports. The comments say what it was once taken for.
SOUND = {
    "a name of an extension": {"science/__init__.py": "from ._ext import _name, other\n"},
    "a name of a module": {"science/__init__.py": "from . import _ext\nfrom .use import _private\n", "science/use.py": "import _ext\n"},
    "type checking": {
        "science/__init__.py": "from typing import TYPE_CHECKING\nfrom . import _ext\nif TYPE_CHECKING:\n    from ._types import T\n"
    },
    "another platform": {"science/__init__.py": "import sys\nfrom . import _ext\nif sys.platform == 'win32':\n    from . import _dll\n"},
    "an optional module": {
        "science/__init__.py": "from . import _ext\ntry:\n    from ._version import v\nexcept ImportError:\n    v = ''\n"
    },
    "suppressed": {
        "science/__init__.py": "from contextlib import suppress\nfrom . import _ext\nwith suppress(ImportError):\n    from . import _fast\n"
    },
    "in a function": {"science/__init__.py": "from . import _ext\ndef later():\n    from . import _extra\n"},
    "after a return": {
        "science/__init__.py": "from . import _ext\ndef f():\n    if not here:\n        return\n    from . import _extra\nf()\n"
    },
    "a module that nothing imports": {"science/__init__.py": "from . import _ext\n", "science/tests.py": "from . import _data\n"},
    "bound at run time": {"science/__init__.py": "from . import _ext\nglobals()['_more'] = 1\n", "science/use.py": "from . import _more\n"},
    "a star": {"science/__init__.py": "from ._ext import *\nfrom . import use\n", "science/use.py": "from . import _more\n"},
    "a namespace of several distributions": {
        "science/core/__init__.py": "from .. import _ext\nfrom science.other import x\nfrom science import _ext\n"
    },
    "another's AMD library": {
        "science/__init__.py": "import ctypes, os\ntry:\n    import hip\nexcept ImportError:\n    hip = None\n"
        "def amd():\n    return ctypes.CDLL(os.path.join(os.environ['ROCM_PATH'], 'lib', 'libamdhip64.so'))\n"
    },
    "a system library": {"science/__init__.py": "import ctypes\nfrom . import _ext\nctypes.CDLL('libsndfile.so.1')\n"},
    "installed under .data": {
        "science/__init__.py": "from . import _ext, _more\n",
        "science-1.0.data/platlib/science/_more.py": "",
    },
}  # fmt: skip


@pytest.mark.parametrize("files", SOUND.values(), ids=SOUND)
def test_what_imports_is_no_failure(workshop: Workshop, extension: bytes, files: dict[str, str]) -> None:
    report = report_of(workshop, extension, files)
    assert not failures(report), [(c.name, c.found, c.why) for c in failures(report)]


# Each of these fails at `import science`, in CPython and here.
LOST = {
    "a module": ({"science/__init__.py": "from . import _ext, _gone\n"}, "_gone"),
    "of any name": ({"science/__init__.py": "from .gone import x\n"}, "gone"),
    "absolute": ({"science/__init__.py": "import science.gone\n"}, "gone"),
    "two steps away": ({"science/__init__.py": "from .use import f\n", "science/use.py": "from science import gone\n"}, "gone"),
    "in a class": ({"science/__init__.py": "class A:\n    from . import gone\n"}, "gone"),
    "in a function that is called": ({"science/__init__.py": "def load():\n    from . import gone\n    return 1\nload()\n"}, "gone"),
    "in a try that raises again": (
        {"science/__init__.py": "try:\n    from . import gone\nexcept ImportError as error:\n    raise ImportError('x') from error\n"},
        "gone",
    ),
    "a file": (
        {"science/__init__.py": "import ctypes, pathlib\nctypes.CDLL(str(pathlib.Path(__file__).parent / 'libgone.so'))\n"},
        "libgone.so",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "what"), LOST.values(), ids=LOST)
def test_what_cannot_import_is_a_failure(
    workshop: Workshop, extension: bytes, files: dict[str, str], what: str
) -> None:
    assert named(report_of(workshop, extension, files), f"the package loads this file: {what}")


def test_a_module_that_nothing_imports_is_a_warning(workshop: Workshop, extension: bytes) -> None:
    report = report_of(workshop, extension, SOUND["a module that nothing imports"])
    check = next(c for c in report.checks if c.name.endswith("the package loads this file"))
    assert check.verdict is Verdict.WARN
    assert check.found == "science/tests.py:1 asks for science._data"


@pytest.mark.parametrize(
    ("source", "verdict", "found"),
    [
        ("x = " + "(" * 5000 + ")" * 5000, None, "Error"),
        ("x = " + "-" * 200_000 + "1", None, "Error"),
        ("x = 'a" + "\0" + "b'", None, "null byte"),
        ("x = '" + "a" * (3 << 20) + "'", Verdict.FAIL, "too large to be parsed"),
        ("x = [" + "a," * 200_000 + "]", Verdict.FAIL, "too large to be parsed"),
        ("x = ", Verdict.WARN, "SyntaxError"),
    ],
    ids=["brackets", "deep", "NUL", "large", "dense", "syntax"],
)  # fmt: skip
def test_a_source_that_cannot_be_parsed_is_a_finding(
    workshop: Workshop, extension: bytes, source: str, verdict: Verdict | None, found: str
) -> None:
    report = report_of(workshop, extension, {"science/__init__.py": source})
    check = next(c for c in report.checks if "unreadable source: science/__init__.py" in c.name)
    assert found in check.found
    assert verdict in (None, check.verdict)


def test_such_a_source_that_nothing_imports_is_none(workshop: Workshop, extension: bytes) -> None:
    files = {"science/__init__.py": "from . import _ext\n", "science/template.py": "{{ name }} = \n"}
    assert not failures(report_of(workshop, extension, files))


def test_the_unreadable_is_one_finding_each(workshop: Workshop, extension: bytes, tmp_path: Path) -> None:
    """RECORD with a field longer than csv reads; the other checks of the wheel are still made."""
    path = workshop.wheel(
        {"science/_ext.so": extension, "science/__init__.py": "from . import _ext\n"},
        name=NAME,
        record=lambda text: text + '"' + "a" * 200_000 + '",sha256=x,1\n',
    )
    report = audit(path)
    assert "field larger than field limit" in named(report, "unreadable: RECORD").found
    assert any(c.name.endswith("wheel tag") for c in report.checks)
