"""The clone that `verify` compares a wheel with: no program in its configuration runs, and a commit is named by its full hash."""

import os
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from release_builders import README, checked, clone_of, git, problems

from flashmoe.__main__ import main
from flashmoe_tools.verify import repository
from flashmoe_tools.verify.content import read_wheel
from flashmoe_tools.verify.errors import VerifyError
from flashmoe_tools.verify.files import expected_content
from flashmoe_tools.verify.rebuild import rebuild
from flashmoe_tools.verify.repository import Clone, Objects, find_clone

WheelMaker = Callable[..., Path]


def test_no_program_of_the_clones_configuration_runs(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clone's configuration names programs for everything that git could run; git itself would run the signature program."""
    root, traces = Path(shutil.copytree(clone, tmp_path / "clone")), tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho \"$0 $*\" >>'{traces}'\n")
    program.chmod(0o755)
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        (root / ".git" / "hooks").mkdir(exist_ok=True)
        shutil.copy(program, root / ".git" / "hooks" / hook)
    for name in (
        "core.fsmonitor",
        "core.pager",
        "core.sshCommand",
        "gpg.program",
        "core.editor",
        "filter.x.smudge",
        "filter.x.process",
    ):
        git(root, "config", name, str(program))
    git(root, "config", "log.showSignature", "true")
    git(root, "config", "alias.cat-file", f"!{program}")
    (root / ".git" / "info").mkdir(exist_ok=True)
    (root / ".git" / "info" / "attributes").write_text("* filter=x\n")
    wheel = make_wheel()
    assert problems(checked(wheel, root)) == []
    with pytest.raises(VerifyError, match=r"no \./nox"):
        rebuild(read_wheel(wheel, tmp_path / "given"), clone_of(root), (), tmp_path)
    assert (tmp_path / "tree" / "README.md").read_text() == README
    assert not traces.exists(), traces.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: a folder cannot be given to another user")
def test_a_repository_of_another_user_is_refused(
    make_wheel: WheelMaker,
    clone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    for path in (root, root / ".git"):
        os.chown(path, 65534, 65534)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    assert main(["verify", str(make_wheel()), "--root", str(root)]) == 1
    assert "it belongs to another user" in capsys.readouterr().err
    trusted = tmp_path / "gitconfig"
    trusted.write_text(f"[safe]\n\tdirectory = {root}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(trusted))
    assert main(["verify", str(make_wheel()), "--root", str(root)]) == 0


def test_a_replaced_object_is_not_taken_for_the_commit(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    first = git(root, "rev-parse", "HEAD")
    (root / "flashmoe" / "__init__.py").write_text("evil = True\n")
    git(root, "commit", "-q", "-a", "-m", "evil")
    git(root, "replace", first, git(root, "rev-parse", "HEAD"))
    objects = Objects(clone_of(root), tmp_path / "objects.git")
    commit = objects.commit(first)
    assert commit is not None
    digest = commit.tree["flashmoe/__init__.py"]
    assert b"evil" not in objects.read([digest])[digest]


@pytest.mark.parametrize("name", ["HEAD", "v0.1.0", "0" * 39, "0" * 39 + "g"])
def test_the_reader_of_objects_takes_a_full_hash(clone: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(VerifyError, match="is not the full hash of a commit"):
        Objects(clone_of(clone), tmp_path / "objects.git").commit(name)


@pytest.mark.parametrize(
    "gone", ["pyproject.toml", "flashmoe/_version.py", "lockfiles/build.txt", "LICENSE", "README.md"]
)
def test_a_commit_without_what_a_build_needs_is_none_of_ours(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A licence that no pattern matches does not count; the wheel then contains an extra file."""
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    git(root, "rm", "-q", gone)
    git(root, "commit", "-q", "-m", "less")
    stamp = int(git(root, "log", "-1", "--format=%ct"))
    wheel = make_wheel(commit=git(root, "rev-parse", "HEAD"), source_date_epoch=stamp)
    assert main(["verify", str(wheel), "--root", str(root)]) == 1
    message = capsys.readouterr()
    assert gone in message.out + message.err


def test_a_clone_without_the_commits_tree_is_told(clone: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    head, tree = git(root, "rev-parse", "HEAD"), git(root, "rev-parse", "HEAD^{tree}")
    (root / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    with pytest.raises(VerifyError, match=f"only a part of commit {head[:12]}"):
        Objects(clone_of(root), tmp_path / "objects.git").commit(head)


@pytest.mark.parametrize("gone", ["pyproject.toml", "flashmoe/_version.py"])
def test_a_commit_without_a_version_is_named_as_none_of_ours(clone: Path, tmp_path: Path, gone: str) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    git(root, "rm", "-q", gone)
    git(root, "commit", "-q", "-m", "less")
    objects = Objects(clone_of(root), tmp_path / "objects.git")
    commit = objects.commit(git(root, "rev-parse", "HEAD"))
    assert commit is not None
    with pytest.raises(VerifyError, match=f"has no {gone}, so it is not a commit of flashmoe"):
        expected_content(objects, commit, frozenset())


def test_a_root_that_is_no_clone_is_told(
    make_wheel: WheelMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(make_wheel()), "--root", str(tmp_path)]) == 1
    assert "is not in a clone that git can read" in capsys.readouterr().err


def test_a_repository_without_objects_is_no_clone(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git reads objects from GIT_OBJECT_DIRECTORY, but those belong to another repository."""
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    answer = types.SimpleNamespace(returncode=0, stdout=f"{root}\n{tmp_path / 'gone'}\n".encode(), stderr=b"")
    monkeypatch.setattr("flashmoe_tools.verify.repository._run", lambda *_: answer)
    assert find_clone(root) is None


@pytest.mark.parametrize(("status", "lines"), [(1, 2), (0, 1), (0, 3)])
def test_an_answer_of_git_that_is_no_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, lines: int
) -> None:
    """A clone's answer is two lines without an error: the folders of the files and of the objects."""
    (tmp_path / "objects").mkdir()

    def answer(status: int, lines: int, error: bytes = b"") -> None:
        done = subprocess.CompletedProcess([], status, f"{tmp_path}\n".encode() * lines, error)
        monkeypatch.setattr(repository, "_run", lambda *_: done)

    answer(0, 2)
    assert find_clone(tmp_path) == Clone(tmp_path, tmp_path / "objects")
    answer(status, lines)
    assert find_clone(tmp_path) is None
    for words in (b"fatal: detected dubious ownership", b"git config --add safe.directory"):
        answer(128, 0, words)
        with pytest.raises(VerifyError, match="belongs to another user"):
            find_clone(tmp_path)


def test_tags_of_a_commit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"a" * 40 + b" refs/tags/v1^{}\n" + b"b" * 40 + b" refs/tags/v2\n"
    monkeypatch.setattr(repository, "_run", lambda *_: subprocess.CompletedProcess([], 0, text, b""))
    assert Clone(tmp_path, tmp_path).tags_at("a" * 40) == {"v1"}
