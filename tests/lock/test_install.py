"""Installing from a lock with uv, from a folder of tiny wheels: no network."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flashmoe._version import DISTRIBUTION
from flashmoe.errors import LockError
from flashmoe_build.environments import environment
from flashmoe_build.environments.environment import Interpreter, choose_python, explain_failure, judge_python, prepare
from tests.lock.wheels import make_wheel

OWN = Interpreter(sys.executable, (sys.version_info.major, sys.version_info.minor))


class Project:
    """A folder with lockfiles/tiny.txt for one tiny wheel, and the index that contains it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = root / "index of wheels"
        self.index.mkdir(parents=True)
        self.locks = root / "lockfiles"
        self.locks.mkdir()
        self.digest = make_wheel(self.index, "tinypkg", "1.0")
        (self.locks / "tiny.in").write_text("tinypkg\n", encoding="utf-8")
        self.pin(self.digest)

    def pin(self, digest: str, version: str = "1.0") -> None:
        (self.locks / "tiny.txt").write_text(f"tinypkg=={version} --hash=sha256:{digest}\n", encoding="utf-8")

    def prepare(self) -> Path:
        return prepare("tiny", root=self.root, python=OWN, extra=["--no-index", "--find-links", str(self.index)])


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "a project")


def installed_version(python: Path) -> str:
    command = [str(python), "-c", "import tinypkg; print(tinypkg.VERSION)"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_an_environment_is_made_once_and_reused(project: Project) -> None:
    python = project.prepare()
    assert installed_version(python) == "1.0"
    stamp = python.parent.parent / environment.STAMP
    made = stamp.stat().st_mtime_ns
    assert project.prepare() == python
    assert stamp.stat().st_mtime_ns == made


@pytest.mark.parametrize(("setting", "lock", "made"), [("1", "tiny", True), ("1", "other", False), ("", "tiny", False)])
def test_bytecode_comes_with_it_where_python_keeps_none(
    setting: str, lock: str, made: bool, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", setting)
    monkeypatch.setattr(environment, "IMPORTED", {lock: ("no_such_module", "tinypkg")})
    folder = project.prepare().parent.parent
    assert bool(list(folder.glob("lib/*/site-packages/**/__pycache__/*.pyc"))) == made


def test_a_changed_lock_makes_it_anew(project: Project) -> None:
    project.prepare()
    project.pin(make_wheel(project.index, "tinypkg", "1.1"), "1.1")
    assert installed_version(project.prepare()) == "1.1"


def test_a_tampered_hash_names_the_package_and_both_hashes(project: Project) -> None:
    tampered = project.digest[:-1] + ("0" if project.digest[-1] != "0" else "1")
    project.pin(tampered)
    with pytest.raises(
        LockError, match=r"installing lockfiles/tiny\.txt failed:(?s:.*)tinypkg==1\.0(?s:.*)do not install it"
    ) as caught:
        project.prepare()
    assert tampered in str(caught.value)
    assert project.digest in str(caught.value)


def test_a_tampered_file_is_refused(project: Project) -> None:
    wheel = next(project.index.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(LockError, match="Hash mismatch for `tinypkg"):
        project.prepare()


def test_a_failed_install_is_not_taken_for_a_finished_one(project: Project) -> None:
    project.pin("0" * 64)
    with pytest.raises(LockError):
        project.prepare()
    with pytest.raises(LockError):
        project.prepare()
    project.pin(project.digest)
    assert installed_version(project.prepare()) == "1.0"


def test_something_installed_beside_the_lock_stops_the_next_session(project: Project) -> None:
    python = project.prepare()
    site = next((python.parent.parent / "lib").glob("python3*/site-packages"))
    (site / "numpy-2.1.0.dist-info").mkdir()
    (site / "numpy-2.1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n")
    with pytest.raises(LockError, match=r"numpy 2\.1\.0 is installed but not in the lock") as caught:
        project.prepare()
    assert str(python.parent.parent) in str(caught.value)


def test_the_callers_uv_settings_cannot_switch_the_hash_check_off(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_NO_VERIFY_HASHES", "1")
    project.pin("0" * 64)
    with pytest.raises(LockError, match="Hash mismatch"):
        project.prepare()


def test_two_at_once_end_with_one_good_environment(project: Project) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(project.prepare())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert len(set(results)) == 1
    assert installed_version(results[0]) == "1.0"


def test_a_wheel_replaces_the_installed_one_by_its_hash(project: Project) -> None:
    python, module = project.prepare(), DISTRIBUTION.replace("-", "_")

    def version() -> str:
        # -B: both modules have the same size and may be written within one second, so that Python might reuse the other's bytecode.
        command = [str(python), "-B", "-c", f"import {module}; print({module}.VERSION)"]
        return subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=True).stdout.strip()

    for number in ("0.1", "0.2"):
        make_wheel(project.root, module, number)
        environment.install_wheel(python, project.root / f"{module}-{number}-py3-none-any.whl")
        assert version() == number
    make_wheel(project.root, module, "0.2", "VERSION = 'rebuilt'\n")
    environment.install_wheel(python, project.root / f"{module}-0.2-py3-none-any.whl")
    assert version() == "rebuilt"
    assert project.prepare() == python


def test_a_lock_that_does_not_exist_lists_those_that_do(project: Project) -> None:
    with pytest.raises(LockError, match="no lock 'tset'; lockfiles/ has tiny"):
        prepare("tset", root=project.root, python=OWN)


def test_uv_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LockError, match=r"uv is not installed; `\./nox` brings its own"):
        environment.find_uv()


def test_an_installer_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    status, stderr = environment.run_logged(["sleep", "60"], "sleeping", 0.2)
    assert status == 124
    assert "FLASHMOE_INSTALL_TIMEOUT_S" in stderr


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        ("error: In `--require-hashes` mode, all requirements must have a hash, but none were provided for: a==1.0", "nox -s lock"),
        ("error: In `--require-hashes` mode, all requirements must have their versions pinned with `==`, but found: a>=1", "nox -s lock"),
        ("error: Hash-checking is required, but no trusted hash was provided for: `filelock`", "nox -s lock"),
        ("error: failed to copy file: No space left on device (os error 28)", "The disk is full"),
        ("error: dns error", "package index"),
    ],
)  # fmt: skip
def test_other_failures_of_uv_are_explained(stderr: str, says: str) -> None:
    text = explain_failure(stderr, "x.txt")
    assert text.startswith(f"installing x.txt failed:\n{stderr}\n")
    assert says in text


def test_a_user_without_a_home_gets_a_cache_in_the_checkout(tmp_path: Path) -> None:
    """root can write to every folder, so a file is in the home's place, which nobody can use as a folder."""
    (tmp_path / "a file").touch()
    own = tmp_path / "own"

    def cache(**environ: str) -> str | None:
        return environment.uv_environment(environ, own).get("UV_CACHE_DIR")

    assert cache(HOME=str(tmp_path / "a file")) == str(own)
    assert cache(HOME=str(tmp_path)) is None
    assert cache(HOME=str(tmp_path / "a file"), XDG_CACHE_HOME=str(tmp_path / "new" / "folder")) is None
    assert cache(HOME=str(tmp_path / "a file"), UV_CACHE_DIR="/given") == "/given"
    assert cache(HOME=str(tmp_path / "a file"), UV_NO_CACHE="1") is None


@pytest.mark.parametrize("text", ["abc", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(LockError, match=f"FLASHMOE_INSTALL_TIMEOUT_S='{text}' is not a time"):
        environment.install_limit({"FLASHMOE_INSTALL_TIMEOUT_S": text})
    assert environment.install_limit({"FLASHMOE_INSTALL_TIMEOUT_S": ""}) == environment.DEFAULT_TIMEOUT_S


def test_a_checkout_that_cannot_be_written_to_says_so(project: Project) -> None:
    """root can write to every folder, so a file is in the folder's place, which fails for every user."""
    (project.root / ".nox").write_text("", encoding="utf-8")
    with pytest.raises(LockError, match=r"cannot make the environment of lockfiles/tiny\.txt: .*check the path"):
        project.prepare()


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ("CPython 3.10.13 linux-x86_64", (3, 10)),
        ("CPython 3.12.1 linux-x86_64", (3, 12)),
        ("CPython 3.13.0 linux-x86_64", None),
        ("CPython 3.9.2 linux-x86_64", None),
        ("PyPy 3.11.2 linux-x86_64", None),
        ("CPython 3.11.2 linux-aarch64", (3, 11)),
        ("CPython 3.11.2 linux-riscv64", None),
        ("", None),
    ],
)
def test_which_interpreters_can_hold_the_lock(answer: str, version: tuple[int, int] | None) -> None:
    assert judge_python(answer)[0] == version


def test_the_first_usable_python_is_taken() -> None:
    answers = {"a": "", "b": "CPython 3.13.0 linux-x86_64", "c": "CPython 3.10.1 linux-x86_64"}
    assert choose_python("", iter(answers), answers.__getitem__) == Interpreter("c", (3, 10))


def test_no_python_names_everything_that_was_looked_at() -> None:
    answers = {"/x/python3": "CPython 3.13.0 linux-x86_64", "/y/python3.12": ""}
    with pytest.raises(LockError) as caught:
        choose_python("3.12", iter(answers), answers.__getitem__)
    text = str(caught.value)
    assert "wanted FLASHMOE_PYTHON=3.12" in text
    assert "/x/python3: CPython 3.13.0 for linux-x86_64" in text
    assert "/y/python3.12: did not run" in text


def test_a_chosen_version_is_not_replaced_by_another() -> None:
    answers = {"python3.11": "CPython 3.11.7 linux-x86_64"}
    with pytest.raises(LockError, match=r"FLASHMOE_PYTHON=3\.12"):
        choose_python("3.12", iter(answers), answers.__getitem__)


def test_candidates_come_from_the_path_and_from_version_managers(tmp_path: Path) -> None:
    managed = tmp_path / ".pyenv" / "versions" / "3.11.9" / "bin" / "python3"
    managed.parent.mkdir(parents=True)
    managed.touch()
    command = tmp_path / "bin" / "python3.12"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n", encoding="utf-8")
    command.chmod(0o755)
    environ = {"PATH": str(command.parent), "HOME": str(tmp_path)}
    assert list(environment.python_candidates("", environ, "own")) == ["own", str(command), str(managed)]
    assert list(environment.python_candidates("3.11", environ, "own")) == [str(managed)]
    assert list(environment.python_candidates("/opt/python", environ, "own")) == ["/opt/python"]
