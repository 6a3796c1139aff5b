"""Finding and loading the extension, and the errors when that fails."""

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flashmoe
from flashmoe import _extension, _version
from flashmoe.errors import ArgumentError, ExtensionError, TorchVersionError
from tests.forked_python import run_python

USE = "import flashmoe; flashmoe.attention"


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    with (
        tempfile.TemporaryDirectory() as elsewhere
    ):  # python -c searches its folder first, which may contain the sources
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **environment},
            cwd=elsewhere,
            check=False,
        )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_import_needs_neither_torch_nor_the_extension() -> None:
    done = _python(
        "import sys, flashmoe, flashmoe._extension\n"
        "assert 'torch' not in sys.modules\n"
        "assert flashmoe.__version__ and 'attention' in dir(flashmoe)",
        FLASHMOE_LIBRARY="/nonexistent",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["compat", "distributed", "errors", "integrations"])
def test_public_modules_are_attributes_before_anything_has_imported_them(module: str) -> None:
    done = run_python("-c", f"import flashmoe; print(flashmoe.{module}.__name__)")
    assert done.stdout.strip() == f"flashmoe.{module}", done.stderr


def test_unknown_attribute_names_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'atention'; it has .*attention"):
        _ = flashmoe.atention


def test_load_is_idempotent_and_safe_in_threads() -> None:
    path = _extension.load()
    assert path.is_file()
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(_extension.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [path] * 8


def test_first_use_from_several_threads_at_once() -> None:
    done = _python(
        "import threading, flashmoe\n"
        "errors = []\n"
        "def use():\n"
        "    import torch\n"
        "    try:\n"
        "        q = torch.ones(1, 1, 2, 8)\n"
        "        assert torch.equal(flashmoe.attention(q, q, q), q)\n"
        "    except BaseException as error:\n"
        "        errors.append(error)\n"
        "threads = [threading.Thread(target=use) for _ in range(6)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert not errors, errors"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["2.8.0", "2.9.1+cpu", "1.13.1", "0.4"])
def test_old_torch_is_refused(version: str) -> None:
    with pytest.raises(TorchVersionError) as caught:
        _extension.check_torch_version(version)
    text = str(caught.value)
    assert text.startswith(f"flashmoe needs torch >= 2.10; found {version}; ")
    assert "pip install 'torch>=2.10'" in text


@pytest.mark.parametrize("version", ["2.10.0+cu128", "2.10", "2.11.0a0+git1234", "2.13.0", "3.0.0"])
def test_newer_torch_is_accepted(version: str) -> None:
    _extension.check_torch_version(version)


def test_unreadable_version_is_refused() -> None:
    with pytest.raises(TorchVersionError, match="cannot read the version 'main'"):
        _extension.check_torch_version("main")


def test_old_torch_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    """A torch whose metadata says 2.8.0 and whose import would fail: the error reports the version."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    information = tmp_path / "torch-2.8.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    line = _last_line(_python(USE, PYTHONPATH=path))
    assert line.startswith("flashmoe.errors.TorchVersionError: flashmoe needs torch >= 2.10; found 2.8.0; ")


def test_absent_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ExtensionError, match=r"needs torch >= 2\.10; none is installed"):
        _extension.torch_version()


def test_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHMOE_LIBRARY", raising=False)
    monkeypatch.setattr(_extension, "LIBRARY_NAME", "libabsent.so")
    with pytest.raises(
        ExtensionError, match=r"libabsent\.so is not beside the package .*nox -s build.*FLASHMOE_LIBRARY"
    ):
        _extension.library_path()


def test_override_that_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_LIBRARY", "/nonexistent/lib.so")
    with pytest.raises(ExtensionError, match=r"FLASHMOE_LIBRARY is '/nonexistent/lib.so', which is not a file"):
        _extension.library_path()


def test_extension_errors_are_import_errors() -> None:
    code = f"try:\n    {USE}\nexcept ImportError as error:\n    raise SystemExit(type(error).__name__)"
    assert _last_line(run_python("-c", code, environ={"FLASHMOE_LIBRARY": "/x"})) == "ExtensionError"


def test_text_file_is_no_library(tmp_path: Path) -> None:
    fake = tmp_path / "libflashmoe.so"
    fake.write_text("this is no shared library, and long enough to hold a header of one: " + "x" * 200)
    line = _last_line(run_python("-c", USE, environ={"FLASHMOE_LIBRARY": str(fake)}))
    assert "ExtensionError: libflashmoe.so cannot be loaded: it is not a shared library for this machine" in line
    assert "Next: reinstall the wheel" in line


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler on this machine: the fixture libraries cannot be made")
    return found


def _library(compiler: str, folder: Path, source: str) -> Path:
    (folder / "source.cpp").write_text(source)
    target = folder / "libflashmoe.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(target), str(folder / "source.cpp")], check=True, timeout=60
    )
    return target


def test_undefined_symbol_is_explained(compiler: str, tmp_path: Path) -> None:
    """A function that is called but defined nowhere."""
    library = _library(compiler, tmp_path, "namespace flashmoe { void forward(); void (*address)() = &forward; }")
    line = _last_line(run_python("-c", USE, environ={"FLASHMOE_LIBRARY": str(library)}))
    assert "it needs the symbol _ZN8flashmoe7forwardEv" in line
    assert "python -m flashmoe audit libflashmoe.so" in line


def test_library_without_the_operator(compiler: str, tmp_path: Path) -> None:
    """The file is a library, but not flashmoe's."""
    library = _library(compiler, tmp_path, "int unrelated() { return 1; }")
    line = _last_line(run_python("-c", USE, environ={"FLASHMOE_LIBRARY": str(library)}))
    assert "registers no operator flashmoe::flash_attention_forward" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/lib/libc.so.6: version `GLIBC_2.34' not found (required by x)", ("GLIBC_2.34", "too old", "manylinux_2_28")),
        ("libtorch_cpu.so: cannot open shared object file: No such file", ("libtorch_cpu.so", "reinstall torch")),
        ("x.so: wrong ELF class: ELFCLASS32", ("not a shared library for this machine",)),
        ("Only a single TORCH_LIBRARY can be used to register", ("another copy", "new process")),
        ("something unheard of", ("something unheard of", "doctor")),
    ],
)
def test_loader_messages_are_explained(text: str, words: tuple[str, ...]) -> None:
    explained = _extension.explain_load_failure("libflashmoe.so", text, "2.10.0")
    assert explained.startswith("libflashmoe.so cannot be loaded: ")
    assert text in explained
    for word in words:
        assert word in explained


def test_c_interface() -> None:
    import torch

    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(_extension.last_kernel()))
    thread.start()
    thread.join()
    assert seen == [""]  # nothing ran on that thread
    q = torch.ones(1, 1, 2, 8)
    flashmoe.attention(q, q, q)
    assert _extension.last_kernel() == f"cpu:{_extension.cpu_isa()}"
    flashmoe.attention(q[:0], q[:0], q[:0])
    assert _extension.last_kernel() == ""
    index = _extension.index()
    assert index["schema"] == "flashmoe.index/1"
    assert isinstance(index["binaries"], list)


def test_cpu_instruction_set_can_be_chosen() -> None:
    before = _extension.cpu_isa()
    _extension.set_cpu_isa(before)
    assert _extension.cpu_isa() == before
    with pytest.raises(ArgumentError, match=f"no CPU kernels for 'mmx'.*now in use: {before}"):
        _extension.set_cpu_isa("mmx")
    assert _extension.cpu_isa() == before


def test_a_function_missing_from_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        pass

    _extension.load()
    _extension._c_interface.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(_extension.ctypes, "CDLL", lambda _: Empty())
        with pytest.raises(ExtensionError, match="has no function flashmoe_check"):
            _extension.last_kernel()
    assert isinstance(_extension.last_kernel(), str)


TOY = """
import torch
from flashmoe.operator import Operator

def double(x):
    return 2 * x

OPERATORS = (
    Operator(
        "toy_double",
        schema="toy_double(Tensor x) -> Tensor",
        impls={"CPU": double},
        fake=torch.empty_like,
        flops=lambda x, *_, **__: x[0],
        autocast=1,
    ),
)
"""


def test_a_further_operation_is_one_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from flashmoe.operator import find_operators, register

    _extension.load()
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "operators.py").write_text(TOY)
    monkeypatch.setattr(flashmoe, "__path__", [*flashmoe.__path__, str(tmp_path)])
    found = {operator.name: operator for operator in find_operators()}
    assert {"flash_attention_forward", "toy_double"} < set(found)
    register([found["toy_double"]])
    x = torch.ones(3)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(torch.ops.flashmoe.toy_double(x), 2 * x)
    assert counter.get_total_flops() == 3
    assert torch.ops.flashmoe.toy_double(x.to("meta")).shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ops.flashmoe.toy_double(x).dtype is torch.bfloat16


def test_no_module_hides_a_function() -> None:
    """Importing a submodule sets it on the package, so no submodule may have the name of a public function."""
    for name in flashmoe.__all__:
        assert name == "__version__" or importlib.util.find_spec(f"flashmoe.{name}") is None, name
    importlib.import_module("flashmoe.attn.varlen")
    assert inspect.isfunction(flashmoe.attention)


@pytest.mark.parametrize("cause", [None, OSError("file too short")])
def test_whose_words_are_explained(monkeypatch: pytest.MonkeyPatch, cause: OSError | None) -> None:
    """The loader's message, which some versions of torch wrap in their own."""
    wrapped = RuntimeError("undefined symbol: of_torch")
    wrapped.__cause__ = cause

    def fail(_: object) -> None:
        raise wrapped

    monkeypatch.setattr(torch.ops, "load_library", fail)
    with pytest.raises(ExtensionError, match="undefined symbol: of_torch" if cause is None else r"\(file too short\)"):
        _extension._load_library(Path("lib.so"))


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ExtensionError, match="installed but cannot be imported"):
        _extension._load_library(Path("lib.so"))


def test_a_thread_that_waits_finds_the_library_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _extension.load()
    monkeypatch.setattr(_extension, "_loaded", None)
    monkeypatch.setattr(_extension, "_load_library", lambda _: pytest.fail("loaded twice"))
    found: list[Path] = []
    with _extension._lock:
        thread = threading.Thread(target=lambda: found.append(_extension.load()))
        thread.start()
        thread.join(0.2)
        assert not found
        _extension._loaded = loaded
    thread.join()
    assert found == [loaded]


@pytest.mark.parametrize("schema", ["", "nothing() -> Tensor"])
def test_an_operator_that_the_library_lacks(monkeypatch: pytest.MonkeyPatch, schema: str) -> None:
    """Allowed only if it is written in Python."""
    operators, registered = (SimpleNamespace(name="nothing_of_ours", schema=schema),), []
    monkeypatch.setattr("flashmoe.operator.find_operators", lambda: operators)
    monkeypatch.setattr("flashmoe.operator.register", registered.append)
    with nullcontext() if schema else pytest.raises(ExtensionError, match="flashmoe::nothing_of_ours"):
        _extension._register_operators(Path("lib.so"))
    assert registered == ([operators] if schema else [])


def test_texts_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _extension,
        "_c_interface",
        lambda: SimpleNamespace(flashmoe_last_kernel=lambda: None, flashmoe_cpu_isa=lambda: b""),
    )
    assert _extension.last_kernel() == ""
    with pytest.raises(ArgumentError, match="FLASHMOE_CPU_ISA is None: unknown"):
        _extension.cpu_isa()


def test_whose_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of the torch that is imported."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="9.8.7"))  # type: ignore[arg-type]
    assert _extension.torch_version() == "9.8.7"


def test_which_wheels_are_ours() -> None:
    names = (
        "flashmoe_kernels-1.0-py3-none-any.whl",
        "flashmoe_kernels_more-1.0-py3-none-any.whl",
        "flashmoe-1.0-py3-none-any.whl",
    )
    assert [name.startswith(_version.WHEEL_PREFIX) for name in names] == [True, False, False]
