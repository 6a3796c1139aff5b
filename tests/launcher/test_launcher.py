"""./nox with a fake nox package in a local folder: no network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lock.wheels import make_wheel

ROOT = Path(__file__).resolve().parents[2]
FAKE_NOX = """
import json, os, sys
if __name__ == "__main__":
    print(json.dumps({"version": VERSION, "argv": sys.argv[1:], "prefix": sys.prefix, "cwd": os.getcwd()}))
    sys.exit(7 if "--fail" in sys.argv else 0)
"""
TOOLS = ("sh", "cksum", "tr", "cat", "mkdir", "rm", "sleep", "env", "uname")


class Checkout:
    """A folder with the launcher, a lock of the fake package, and an environment without the caller's index settings."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root / "wheels"
        self.wheels.mkdir(parents=True)
        (root / "lockfiles").mkdir()
        shutil.copy(ROOT / "nox", root)
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
        self.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self.wheels.as_uri(), "FLASHMOE_PYTHON": sys.executable}
        self.pin("1.0")

    def pin(self, version: str, digest: str = "") -> None:
        known = make_wheel(self.wheels, "nox", version, FAKE_NOX)
        lock = f"nox=={version} --hash=sha256:{digest or known}\n"
        (self.root / "lockfiles" / "launcher.txt").write_text(lock, encoding="utf-8")

    def run(self, *arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "nox"), *arguments],
            cwd=cwd or self.root,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def environments(self) -> list[str]:
        return sorted(path.name for path in (self.root / ".nox" / "launcher").iterdir())


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a path with spaces")


def test_it_is_committed_executable() -> None:
    assert os.access(ROOT / "nox", os.X_OK)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_environment_is_made_reused_and_made_anew_for_another_lock(checkout: Checkout, tmp_path: Path) -> None:
    first = checkout.run("-s", "test", "--", "-k", "a and b", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "making .nox/launcher/" in first.stderr
    assert f'"--noxfile", "{checkout.root}/noxfile.py", "-s", "test", "--", "-k", "a and b"' in first.stdout
    assert f'"prefix": "{checkout.root}/.nox/launcher/py' in first.stdout
    second = checkout.run()
    assert second.returncode == 0
    assert second.stderr == ""
    assert len(checkout.environments()) == 1
    assert checkout.run("--fail").returncode == 7
    checkout.pin("1.1")
    changed = checkout.run()
    assert "making .nox/launcher/" in changed.stderr
    assert '"version": "1.1"' in changed.stdout


def test_a_tampered_hash_stops_it_and_leaves_nothing_behind(checkout: Checkout) -> None:
    checkout.pin("1.0", digest="0" * 64)
    done = checkout.run()
    assert done.returncode == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert "installing lockfiles/launcher.txt failed" in done.stderr
    assert checkout.environments() == []


def test_two_at_once_both_run(checkout: Checkout) -> None:
    command = [str(checkout.root / "nox"), "--list"]
    both = [subprocess.Popen(command, env=checkout.environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all('"--list"' in answer for answer in answers)
    assert len(checkout.environments()) == 1


def tools_only(folder: Path) -> Path:
    """A PATH with the shell tools that the launcher uses and no Python."""
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return folder


def test_no_python_says_what_was_looked_for(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.run(PATH=str(tools_only(tmp_path / "bin")), FLASHMOE_PYTHON="")
    assert done.returncode == 1
    assert "no Python 3.10 or newer" in done.stderr
    assert "FLASHMOE_PYTHON=/path/to/python3 ./nox" in done.stderr


def test_a_python_that_is_too_old_or_broken_is_passed_over(checkout: Checkout, tmp_path: Path) -> None:
    tools = tools_only(tmp_path / "bin")
    (tools / "python3").write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    (tools / "python3.11").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    for name in ("python3", "python3.11"):
        (tools / name).chmod(0o755)
    done = checkout.run("--list", PATH=str(tools), FLASHMOE_PYTHON="")
    assert done.returncode == 0, done.stderr


def without_ensurepip(folder: Path, *, pip: bool) -> Path:
    """A python3 like Debian's without python3-venv: ``-m venv`` fails unless ``--without-pip`` is given."""
    tools = tools_only(folder)
    refuse_pip = "" if pip else '    -m:pip*) echo "No module named pip" >&2; exit 1 ;;\n'
    script = (
        '#!/bin/sh\ncase "$1:$2:$3" in\n    -m:venv:--without-pip) ;;\n'
        '    -m:venv:*) echo "ensurepip is not available" >&2; mkdir -p "$3"; exit 1 ;;\n'
        f'{refuse_pip}esac\nexec "{sys.executable}" "$@"\n'
    )
    (tools / "python3").write_text(script, encoding="utf-8")
    (tools / "python3").chmod(0o755)
    return tools


def has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def test_without_ensurepip_the_machines_pip_fills_it(checkout: Checkout, tmp_path: Path) -> None:
    if not has_pip():
        pytest.skip("this interpreter has no pip to stand in for the machine's")
    tools = without_ensurepip(tmp_path / "bin", pip=True)
    done = checkout.run("--list", PATH=str(tools), FLASHMOE_PYTHON="")
    assert done.returncode == 0, done.stderr
    assert '"--list"' in done.stdout


def test_without_ensurepip_and_pip_uv_fills_it(checkout: Checkout, tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    assert uv, "uv is in lockfiles/test.txt"
    tools = without_ensurepip(tmp_path / "bin", pip=False)
    (tools / "uv").symlink_to(uv)
    environ = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(checkout.wheels), "UV_PYTHON_DOWNLOADS": "never"}
    done = checkout.run("--list", PATH=str(tools), FLASHMOE_PYTHON="", **environ)
    assert done.returncode == 0, done.stderr
    assert '"--list"' in done.stdout


def test_without_any_way_in_it_says_what_to_install(checkout: Checkout, tmp_path: Path) -> None:
    tools = without_ensurepip(tmp_path / "bin", pip=False)
    done = checkout.run(PATH=str(tools), FLASHMOE_PYTHON="")
    assert done.returncode == 1
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"apt-get install python{version}-venv" in done.stderr
    assert "put uv on PATH" in done.stderr
    assert checkout.environments() == []


def test_a_missing_lock_is_named(checkout: Checkout) -> None:
    (checkout.root / "lockfiles" / "launcher.txt").unlink()
    done = checkout.run()
    assert done.returncode == 1
    assert "lockfiles/launcher.txt is missing" in done.stderr
