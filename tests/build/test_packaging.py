"""The wheel built in every way (this repository's program, plain PEP 517, the sdist), and a build without a network."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from flashmoe._version import DISTRIBUTION, WHEEL_PREFIX

pytestmark = [pytest.mark.slow, pytest.mark.drawn]

CPU_ONLY = {"FLASHMOE_ARCHS": "none"}
# A change to each that no cache contains; the kernel's also changes its machine code.
CHANGES = (
    (
        "csrc/attention/append/append.cuh",
        "const int lane = ptx::lane_index();",
        "const int lane = 31 - ptx::lane_index();",
    ),
    ("csrc/host/copies.cpp", '#include "host/copies.h"', '#include "host/copies.h"  // in no cache'),
)


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in {"SOURCE_DATE_EPOCH", "COVERAGE_FILE"}}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The working tree's tracked and new files in a separate repository, as in a newcomer's clone."""
    folder = tmp_path_factory.mktemp("a clone")
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], root).stdout
    for name in filter(None, listed.split("\0")):
        source = root / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    run(["git", "init", "-q"], folder)
    run(["git", "add", "-A"], folder)
    identity = ["-c", "user.name=test", "-c", "user.email=test@invalid"]
    run(["git", *identity, "commit", "-qm", "test"], folder, GIT_COMMITTER_DATE="1700000000 +0000")
    return folder


@pytest.fixture(scope="module")
def cache(root: Path) -> dict[str, str]:
    return {"FLASHMOE_CACHE_DIR": str(root / "build" / "cache")}


@pytest.fixture(scope="module")
def wheel(clone: Path, cache: dict[str, str]) -> Path:
    run([sys.executable, "-m", "flashmoe_build", "--dist", str(clone / "dist")], clone, **CPU_ONLY, **cache)
    (built,) = (clone / "dist").glob("*.whl")
    return built


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def version(clone: Path) -> str:
    """The version of a clean commit without a tag and without GPU code."""
    return f"0.1.0.dev0+g{run(['git', 'rev-parse', 'HEAD'], clone).stdout[:12]}.cpu"


def test_wheel_name_and_content(wheel: Path, version: str) -> None:
    assert wheel.name == f"{WHEEL_PREFIX}{version}-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = Parser().parsestr(archive.read(f"{WHEEL_PREFIX}{version}.dist-info/METADATA").decode())
        assert f'__version__ = "{version}"' in archive.read("flashmoe/_version.py").decode()
    assert {"flashmoe/libflashmoe.so", "flashmoe/provenance.json", "flashmoe/_tables/attention/kernels.toml"} <= names
    assert "flashmoe_tools/operations/attention/suites/smoke.toml" in names
    assert not [
        name for name in names if name.startswith(("flashmoe_build/", "tests/", "csrc/")) or "/emulation/" in name
    ]
    assert [name for name in names if name.endswith(".so")] == ["flashmoe/libflashmoe.so"]
    assert metadata["Name"] == DISTRIBUTION
    assert metadata["Requires-Python"] == ">=3.10"
    assert "torch>=2.10" in metadata.get_all("Requires-Dist", [])


def test_provenance_states_this_commit(wheel: Path, clone: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        stated = json.loads(archive.read("flashmoe/provenance.json"))
        library = archive.read("flashmoe/libflashmoe.so")
    assert stated["commit"] == run(["git", "rev-parse", "HEAD"], clone).stdout.strip()
    assert stated["dirty"] is False
    assert stated["source_date_epoch"] == 1700000000
    assert stated["extension_sha256"] == hashlib.sha256(library).hexdigest()
    assert stated["targets"] == []
    assert stated["locks"]["build.txt"] == sha256(clone / "lockfiles" / "build.txt")
    assert stated["compilers"]["nvrtc"] == "12.8.93"


def test_plain_pep517_gives_the_same_wheel(wheel: Path, clone: Path, cache: dict[str, str], tmp_path: Path) -> None:
    """Does what `pip wheel .` does, without pip: calls the declared backend's build_wheel."""
    code = "import sys; from flashmoe_build.backend import build_wheel; print(build_wheel(sys.argv[1]))"
    epoch = {"SOURCE_DATE_EPOCH": "1700000000"}
    run([sys.executable, "-c", code, str(tmp_path)], clone, **CPU_ONLY, **cache, **epoch)
    assert sha256(tmp_path / wheel.name) == sha256(wheel)


def test_the_sdist_gives_the_same_wheel(wheel: Path, clone: Path, cache: dict[str, str], tmp_path: Path) -> None:
    run([sys.executable, "-m", "flashmoe_build", "--sdist", "--dist", str(tmp_path)], clone)
    (archive,) = tmp_path.glob("*.tar.gz")
    (tmp_path / "unpacked").mkdir()
    run(["tar", "-xf", str(archive), "-C", str(tmp_path / "unpacked")], clone)
    (tree,) = (tmp_path / "unpacked").iterdir()
    assert not (tree / ".git").exists()
    assert (tree / "docs" / "build.md").is_file()
    assert not (tree / "docs" / "results").exists()
    run([sys.executable, "-m", "flashmoe_build", "--dist", str(tmp_path / "dist")], tree, **CPU_ONLY, **cache)
    (built,) = (tmp_path / "dist").glob("*.whl")
    # Hatchling uses an sdist's version as it is, so the suffix of a build for some targets is missing.
    assert _contents(built) == _contents(wheel)


def _contents(wheel: Path) -> dict[str, bytes]:
    """Every file, with the partial build's ".cpu" removed from names and text; without the list of hashes."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        texts = {name: archive.read(name) for name in names}
    plain = (".dist-info/", "/_version.py", "/provenance.json")
    return {
        name.replace(".cpu.dist-info/", ".dist-info/"): text.replace(b".cpu", b"")
        if any(p in name for p in plain)
        else text
        for name, text in texts.items()
    }


def test_verify_accepts_the_wheel_of_the_clone(wheel: Path, clone: Path) -> None:
    """A build produces exactly what `verify` expects for the commit, down to the last header of METADATA."""
    done = run([sys.executable, "-m", "flashmoe", "verify", str(wheel)], clone)
    assert all(
        line.startswith(("PASS", "not checked", "      next", "verify PASS")) for line in done.stdout.splitlines()
    )
    assert "\nPASS  files: " in done.stdout


def test_an_editable_install_links_the_checkout_and_compiles_nothing(clone: Path, tmp_path: Path) -> None:
    """Does what `pip install -e .` does: it does not require torch, and the wheel contains a link to the sources."""
    code = (
        "import sys; from flashmoe_build import backend; print(backend.get_requires_for_build_editable()); "
        "print(len(backend.get_requires_for_build_wheel())); print(backend.build_editable(sys.argv[1]))"
    )
    requested, for_wheels, name = run([sys.executable, "-c", code, str(tmp_path)], clone).stdout.splitlines()
    assert "torch" not in requested
    assert int(for_wheels) > 5
    with zipfile.ZipFile(tmp_path / name) as archive:
        (link,) = [member for member in archive.namelist() if member.endswith(".pth")]
        assert archive.read(link).decode().strip() == str(clone)
        assert not [member for member in archive.namelist() if member.startswith("flashmoe/")]


@pytest.mark.parametrize("package", ["torch-2.9.1", "numpy-2.1.0", "nvidia_cuda_nvcc_cu12-12.9.41"])
def test_tools_that_are_not_the_locked_ones_stop_a_plain_build(clone: Path, tmp_path: Path, package: str) -> None:
    """`python -m flashmoe_build` and `pip wheel --no-build-isolation` run in any environment."""
    name, _, version = package.partition("-")
    info = tmp_path / f"{package}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    command = [sys.executable, "-m", "flashmoe_build", "--library-only", "--out", str(tmp_path / "out")]
    environment = {**os.environ, **CPU_ONLY, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not the one that build.txt describes" in done.stderr
    assert version in done.stderr
    assert "./nox -s build" in done.stderr
    assert "Traceback" not in done.stderr


def isolation() -> list[str]:
    """A command prefix that runs its arguments in an empty network namespace; empty if the kernel does not allow one."""
    for prefix in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        if (
            shutil.which(prefix[0])
            and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
        ):
            return prefix
    return []


FORBID_SOCKETS = """
import sys
def guard(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto"):
        raise RuntimeError(f"the build used the network: {event} {arguments}")
sys.addaudithook(guard)
import runpy
sys.argv = ["flashmoe_build", *sys.argv[1:]]
runpy.run_module("flashmoe_build", run_name="__main__")
"""


def test_build_needs_no_network(clone: Path, cache: dict[str, str], tmp_path: Path) -> None:
    """Every tool runs with all socket calls forbidden and, if the kernel allows it, without a network, on a kernel and a host source that are not
    in any cache. Rebuilding cached files as well would take another minute of the same tools."""
    arguments = ["--library-only", "--out", str(tmp_path / "out")]
    command = [*isolation(), sys.executable, "-c", FORBID_SOCKETS, *arguments]
    known, filled = Path(cache["FLASHMOE_CACHE_DIR"]), tmp_path / "cache"
    if known.is_dir():
        shutil.copytree(known, filled, copy_function=os.symlink)
    try:
        for name, old, new in CHANGES:
            text = (clone / name).read_text()
            assert text.count(old) == 1
            (clone / name).write_text(text.replace(old, new))
        done = run(command, clone, FLASHMOE_CACHE_DIR=str(filled), FLASHMOE_ARCHS="75")
    finally:
        run(["git", "checkout", "-q", "--", "csrc"], clone)
    assert "built    " in done.stdout
    report = json.loads((tmp_path / "out" / "reports" / "build.json").read_text())
    assert report["verdict"] == "PASS"
    made = {path.suffix for path in filled.rglob("*") if path.is_file() and not path.is_symlink()}
    assert made >= {".ptx", ".cubin", ".o"}  # from NVRTC, ptxas and g++


def test_the_network_guard_guards(clone: Path) -> None:
    code = (
        FORBID_SOCKETS.split("import runpy", maxsplit=1)[0]
        + "import socket; socket.create_connection(('127.0.0.1', 9))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the build used the network" in done.stderr
