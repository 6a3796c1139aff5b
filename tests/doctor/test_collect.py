"""The I/O layer: reading from drivers, files and processes, including broken ones."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_tools.doctor import cli, collect
from flashmoe_tools.doctor.driver import read_driver
from flashmoe_tools.doctor.facts import Driver, Gpu, Links
from flashmoe_tools.doctor.links import read_links
from flashmoe_tools.doctor.shadow import find_shadows

ROOT = Path(__file__).resolve().parents[2]


class FakeCuda:
    """libcuda with the given results; a status of 0 is success."""

    def __init__(self, gpus: list[tuple[str, int, int]], init_status: int = 0) -> None:
        self.gpus = gpus
        self.init_status = init_status

    def cuDriverGetVersion(self, result: object) -> int:  # noqa: N802
        result._obj.value = 12080
        return 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init_status

    def cuDeviceGetCount(self, result: object) -> int:  # noqa: N802
        result._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, result: object, index: int) -> int:  # noqa: N802
        result._obj.value = index
        return 0

    def cuDeviceGetName(self, buffer: ctypes.Array[ctypes.c_char], size: int, device: int) -> int:  # noqa: N802
        buffer.value = self.gpus[device][0].encode()
        return 0

    def cuDeviceGetAttribute(self, result: object, attribute: int, device: int) -> int:  # noqa: N802
        result._obj.value = self.gpus[device][{75: 1, 76: 2}[attribute]]
        return 0

    def cuGetErrorName(self, status: int, result: object) -> int:  # noqa: N802
        if status == 100:
            result._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0


def test_a_driver_with_two_gpus() -> None:
    cuda = FakeCuda([("NVIDIA H100", 9, 0), ("Tesla T4", 7, 5)])
    assert read_driver(lambda name: cuda) == Driver(12080, (Gpu("NVIDIA H100", (9, 0)), Gpu("Tesla T4", (7, 5))))


def test_a_driver_without_a_gpu_keeps_cudas_own_name() -> None:
    assert read_driver(lambda name: FakeCuda([], 100)) == Driver(12080, error="CUDA_ERROR_NO_DEVICE")
    assert read_driver(lambda name: FakeCuda([], 999)) == Driver(12080, error="CUDA error 999")


TOPOLOGY = """\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-63\t0
GPU1\tNV18\t X \tSYS\t64-127\t1
NIC0\tPIX\tSYS\t X

Legend:
  X    = Self
"""


class FakePeers(FakeCuda):
    """Several GPUs, the second of which cannot access the first."""

    def cuDeviceCanAccessPeer(self, result: object, first: int, second: int) -> int:  # noqa: N802
        result._obj.value = int(first < second)
        return 0


def test_links_between_two_gpus() -> None:
    cuda = FakePeers([("NVIDIA H100", 9, 0)] * 2)
    requested: list[list[str]] = []

    def run(command: list[str]) -> str:
        requested.append(command)
        return TOPOLOGY

    found = read_links(lambda name: cuda, run)
    assert found == Links(unreachable=((1, 0),), topology=(("X", "NV18"), ("NV18", "X")))
    assert requested == [["nvidia-smi", "topo", "-m"]]


def test_links_that_cannot_be_asked() -> None:
    def run(command: list[str]) -> str:
        raise FileNotFoundError("no nvidia-smi")

    found = read_links(lambda name: FakeCuda([("NVIDIA H100", 9, 0)] * 2), run)
    assert "cuDeviceCanAccessPeer" in found.peers_problem
    assert found.topology_problem == "no nvidia-smi"
    assert read_links(lambda name: FakePeers([("NVIDIA H100", 9, 0)] * 2), lambda _: "").topology_problem
    assert read_links(lambda name: FakeCuda([("NVIDIA H100", 9, 0)]), run) == Links()
    assert read_links(lambda name: FakeCuda([], 100), run) == Links()


def test_no_driver() -> None:
    def load(name: str) -> object:
        raise OSError(name)

    assert read_driver(load) == Driver()


def test_a_library_that_is_no_driver_is_an_error_not_a_crash() -> None:
    assert read_driver(lambda name: object()).error


def test_the_compiler_of_cxx(tmp_path: Path) -> None:
    fake = tmp_path / "my-g++"
    fake.write_text("#!/bin/sh\necho 13.1.0\n", encoding="utf-8")
    fake.chmod(0o755)
    assert collect.read_compiler({"CXX": "my-g++", "PATH": str(tmp_path)}).version == "13.1.0"
    fake.write_text("#!/bin/sh\necho not a version\n", encoding="utf-8")
    assert collect.read_compiler({"CXX": "my-g++", "PATH": str(tmp_path)}).version == ""
    assert collect.read_compiler({"PATH": str(tmp_path)}).version == ""


def test_a_package_that_is_installed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("one", "1.26.4"), ("two", "2.1.0")):
        info = tmp_path / folder / f"numpy-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: numpy\nVersion: {version}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), str(tmp_path / "two")])
    assert collect.package("numpy").versions == ("1.26.4", "2.1.0")
    assert collect.package("nobody-has-this").versions == ()


def test_torchs_cuda_version_is_read_without_importing_torch() -> None:
    code = (
        "import sys; from flashmoe_tools.doctor.collect import torch_cuda; cuda = torch_cuda(); "
        "assert 'torch' not in sys.modules; import torch; assert cuda == (torch.version.cuda or ''), cuda"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(collect.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=120)


def test_probe_output_is_read_as_far_as_it_got() -> None:
    lines = [
        json.dumps({"torch": "2.10.0", "cuda": "12.8"}),
        "a warning",
        json.dumps({"loaded": True, "targets": ["sm_80"]}),
    ]
    whole = collect.parse_probe(0, "\n".join([*lines, json.dumps({"smoke": "right", "smoke_ok": True})]), "", 1.0)
    assert (whole.loaded, whole.smoke_ok, whole.targets) == (True, True, ("sm_80",))
    crashed = collect.parse_probe(-11, "\n".join(lines), "boom", 1.0)
    assert (crashed.loaded, crashed.smoke_ok, crashed.smoke) == (True, False, "ended by signal 11: boom")
    early = collect.parse_probe(1, lines[0], "Traceback\nImportError: libfoo.so", 1.0)
    assert (early.loaded, early.load_error) == (False, "exit status 1: ImportError: libfoo.so")


def test_a_probe_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    slow.chmod(0o755)
    monkeypatch.setattr(collect.sys, "executable", str(slow))
    probe = collect.run_probe(dict(os.environ), tmp_path / "x.so", has_torch=True, timeout_s=0.3)
    assert probe.timed_out
    assert "no answer within" in probe.problem


@pytest.mark.parametrize(
    "shadow", ["raise RuntimeError('half installed')", "import os; os.abort()", "raise SystemExit(3)"]
)
def test_the_probe_imports_what_this_interpreter_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shadow: str
) -> None:
    """A broken torch that precedes the installed one on the path of the doctor's interpreter."""
    (tmp_path / "torch.py").write_text(shadow)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    for library in (None, tmp_path / "absent.so"):
        probe = collect.run_probe(dict(os.environ), library, has_torch=True, timeout_s=60)
        assert probe.ran
        assert (probe.torch_version, bool(probe.problem)) == ("", True)
        assert ("half installed" in probe.problem) == ("half" in shadow)


def test_the_probe_does_not_import_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('of the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert collect.run_probe(dict(os.environ), None, has_torch=True, timeout_s=100).torch_version


def test_without_torch_there_is_no_probe(tmp_path: Path) -> None:
    assert not collect.run_probe({}, tmp_path / "x.so", has_torch=False, timeout_s=1).ran


def test_the_library_of_the_variable_wins_even_when_it_is_not_there(tmp_path: Path) -> None:
    gone = tmp_path / "gone.so"
    found = collect.find_library({"FLASHMOE_LIBRARY": str(gone)}, None)
    assert found == gone
    assert collect.read_extension(found, None).error == "no such file"


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(collect.__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "flashmoe", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": package, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_program_says_why_a_library_does_not_load(tmp_path: Path) -> None:
    broken = tmp_path / "libflashmoe.so"
    broken.write_bytes(b"not a shared object")
    done = doctor("--json", FLASHMOE_LIBRARY=str(broken))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["schema"] == "flashmoe.report/1"
    loads = next(check for check in report["checks"] if check["name"] == "loads")
    assert loads["verdict"] == "FAIL"
    assert "libflashmoe.so cannot be loaded" in loads["found"]
    extension = next(check for check in report["checks"] if check["name"] == "extension")
    assert (extension["verdict"], extension["found"].endswith("it is not an ELF file")) == ("FAIL", True)


def test_a_strangers_package_is_found_by_its_name_and_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_shadows() == ()
    info = tmp_path / "flashmoe_py-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashmoe-py\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("flashmoe.__version__", "0.0.1")
    assert find_shadows() == ("flashmoe-py 0.1.2", "a flashmoe/__init__.py that is not ours, or none")


@pytest.mark.parametrize("seconds", ["0", "-1", "abc", "nan", "inf"])
def test_a_time_limit_that_is_no_time_is_a_usage_error(seconds: str) -> None:
    done = doctor("--timeout", seconds)
    assert done.returncode == 2
    assert "is not a time; write a number of seconds above 0" in done.stderr


def test_starting_the_doctor_imports_no_torch() -> None:
    code = (
        "import sys, flashmoe_tools.doctor.cli, flashmoe_tools.doctor.collect, flashmoe_tools.doctor.judge; "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(collect.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=60)


def test_a_missing_dependency_of_python_3_10_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashmoe_tools.tables", None)
    assert "flashmoe_tools.tables" in str(cli.read_tables())


def test_a_report_file_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    done = doctor("--json", str(path), "--timeout", "100")
    report = json.loads(path.read_text(encoding="utf-8"))
    assert done.returncode == (1 if report["verdict"] == "FAIL" else 0)
    assert report["kind"] == "doctor"
    assert f"doctor {report['verdict']}: " in done.stdout
