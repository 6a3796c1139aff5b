"""If `verify` cannot do something, its message names the cause: git, the commit's files, the bundle."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from release_builders import Workshop, clone_of, git

from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.verify import cli, files, repository
from flashmoe_tools.verify.content import read_wheel
from flashmoe_tools.verify.errors import VerifyError
from flashmoe_tools.verify.metadata import read_project, wheel_sources
from flashmoe_tools.verify.rebuild import build_environment, compare
from flashmoe_tools.verify.repository import Objects, borrow_objects, check_out
from flashmoe_tools.verify.signature import _read

WheelMaker = Callable[..., Path]


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_without_git_or_with_one_that_does_not_answer(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = clone_of(clone)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert repository.find_clone(clone) is None
    with pytest.raises(VerifyError, match="git is not installed"):
        Objects(known, tmp_path / "objects")
    program(tmp_path / "slow", "git", "exec /bin/sleep 20")
    monkeypatch.setenv("PATH", str(tmp_path / "slow"))
    monkeypatch.setattr(repository, "GIT_LIMIT", 0.2)
    with pytest.raises(VerifyError, match=r"git did not answer within 0\.2 s"):
        Objects(known, tmp_path / "objects")


def test_what_git_refuses_is_told(clone: Path, tmp_path: Path) -> None:
    known = clone_of(clone)
    (tmp_path / "file").write_text("")
    with pytest.raises(VerifyError, match=r"git cannot make a repository in .*file"):
        borrow_objects(known, tmp_path / "file")
    commit, absent = git(clone, "rev-parse", "HEAD"), "0" * 40
    with pytest.raises(VerifyError, match=f"git cannot check out {commit[:12]}: .*bad..name"):
        check_out(known, commit, tmp_path / "checkout", ("bad..name",))
    with pytest.raises(VerifyError, match=f"git cannot check out {absent[:12]}: "):
        check_out(known, absent, tmp_path / "other", ())
    with pytest.raises(VerifyError, match=f"the clone lacks object {absent[:12]}; a whole clone has it"):
        Objects(known, tmp_path / "bare").read([absent])
    with pytest.raises(VerifyError, match=f"the clone lacks object {commit[:12]}"):  # an object that is not a file
        Objects(known, tmp_path / "bare").read([commit])


@pytest.mark.parametrize("text", ["[", "[tool]", "tool = 1", "[tool.hatch.build.targets.wheel]\npackages = 7"])
def test_a_commit_that_names_no_packages(text: str) -> None:
    with pytest.raises(VerifyError, match="names no packages of the wheel"):
        wheel_sources(text.encode(), ["flashmoe/__init__.py"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot be read: "),
        ("", "names no project"),
        ("project = 1", "names no project"),
        ("[project]\nname = 1", "names no"),
    ],
)
def test_a_commit_that_names_no_project(text: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        read_project(text.encode())


def test_a_bundle_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff")
    for name in ("absent.json", "binary.json"):
        with pytest.raises(VerifyError, match=f"cannot read the bundle {name}: "):
            _read(tmp_path / name)


def test_binaries_that_only_one_of_two_builds_has(make_wheel: WheelMaker, workshop: Workshop, tmp_path: Path) -> None:
    """In neither direction does it count as a build for the CPU only."""
    with_some = read_wheel(make_wheel(), tmp_path / "one")
    none = workshop.library((), torch=False, host='extern "C" int flashmoe_cpu_isa() { return 0; }').read_bytes()
    without = read_wheel(make_wheel(none), tmp_path / "two")
    assert with_some.cubins
    assert not without.cubins
    for given, rebuilt in ((with_some, without), (without, with_some)):
        wrong = [check.name for check in compare(given, rebuilt) if check.verdict is Verdict.FAIL]
        assert len([name for name in wrong if name.startswith("rebuilt device binary")]) == len(with_some.cubins)


def test_the_last_line_lists_what_was_not_checked_where_something_was_not() -> None:
    data = {"wheel": "a.whl", "commit": "c" * 40}
    whole = cli.render(Report("verify", (Check("commit", Verdict.PASS, "here"),), data))
    assert whole[-1] == f"verify PASS: a.whl of commit {'c' * 12}"
    part = cli.render(
        Report("verify", (Check("commit", Verdict.PASS, "here"), Check("signature", Verdict.SKIP, "no")), data)
    )
    assert [line.split("  ")[0] for line in part[:2]] == ["PASS", "not checked"]
    assert part[-1] == f"verify PASS: a.whl of commit {'c' * 12}; not checked: signature"


def test_a_rebuilt_wheel_is_kept_where_that_is_asked(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, kept = make_wheel(), tmp_path / "kept" / "inner"
    monkeypatch.setattr(cli, "rebuild", lambda *_: wheel)
    for keep in (None, kept):
        (tmp_path / str(keep is None)).mkdir()
        request = cli.Request(clone_of(clone), again=True, keep=keep)
        report = cli.verify(wheel, request)
        assert [check.verdict for check in report.checks if check.name.startswith("rebuilt")] == [Verdict.PASS] * 2
        assert [path.name for path in kept.glob("*")] == ([] if keep is None else [wheel.name])


def test_a_rebuild_is_for_the_targets_of_the_wheel(make_wheel: WheelMaker, tmp_path: Path) -> None:
    content = read_wheel(make_wheel(), tmp_path / "one")
    assert content.stated.targets
    assert build_environment(content, {})["FLASHMOE_ARCHS"] == ",".join(content.stated.targets)


def test_what_the_commit_does_not_have(clone: Path, tmp_path: Path) -> None:
    known, commit = clone_of(clone), SimpleNamespace(digest="c" * 40, tree={})
    with pytest.raises(VerifyError, match=r"commit cccccccccccc has no README\.md, which its pyproject.toml names"):
        files._read(Objects(known, tmp_path / "objects"), commit, "README.md")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "is_table"),
    [
        ("csrc/tables/arch.toml", True), ("csrc/moe/operations.toml", True), ("csrc/moe/kernels.toml", True), ("csrc/arch.toml", False),
        ("csrc/moe/other.toml", False), ("csrc/kernels.toml", False), ("csrc/moe/in/kernels.toml", False), ("docs/moe/kernels.toml", False),
    ],
)  # fmt: skip
def test_which_files_are_tables(path: str, is_table: bool) -> None:
    assert files._is_table(path) == is_table


def test_the_clone_around_this_folder_is_taken_where_it_is_of_flashmoe(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._clone(None) is None
    with pytest.raises(VerifyError, match="is not in a clone that git can read"):
        cli._clone(tmp_path)
    monkeypatch.chdir(clone)
    assert cli._clone(None) == clone_of(clone) == cli._clone(clone)
    other = tmp_path / "other"
    subprocess.run(["git", "clone", "-q", str(clone), str(other)], check=True)
    (other / "lockfiles" / "build.txt").unlink()
    monkeypatch.chdir(other)
    assert (cli._clone(None), cli._clone(other)) == (None, clone_of(other))


@pytest.mark.parametrize("has_commands", [True, False])
def test_a_wheel_has_entry_points_where_the_project_has_commands(
    make_wheel: WheelMaker, tmp_path: Path, has_commands: bool
) -> None:
    content = read_wheel(make_wheel(), tmp_path / "one")
    info = next(name for name in content.wheel.names if name.endswith("/METADATA")).removesuffix("/METADATA")
    rest = {
        name: content.read(name) for name in content.wheel.names if "dist-info" not in name and name not in files.BUILT
    }
    expected = SimpleNamespace(info=info, entry_points="[x]" if has_commands else "", files=rest)
    check = files._check_files(content, expected)  # type: ignore[arg-type]
    assert ("entry_points.txt" in check.found) is not has_commands, check


def test_objects_named_by_sha256_are_borrowed(tmp_path: Path) -> None:
    root = tmp_path / "new"
    git(tmp_path, "init", "-q", "--object-format=sha256", str(root))
    (root / "file").write_text("text")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    digest = git(root, "rev-parse", "HEAD:file")
    assert len(digest) == 64
    assert Objects(clone_of(root), tmp_path / "objects").read([digest]) == {digest: b"text"}
