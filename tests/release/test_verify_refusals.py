"""What `verify` cannot do ends in words that name the reason: git, the commit's files, the bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from release_builders import Workshop, clone_of, git

from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.verify import cli, repository
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
    with pytest.raises(VerifyError, match=f"the clone lacks object {commit[:12]}"):  # which is no file
        Objects(known, tmp_path / "bare").read([commit])


@pytest.mark.parametrize("text", ["[", "[tool]", "tool = 1", "[tool.hatch.build.targets.wheel]\npackages = 7"])
def test_a_commit_that_names_no_packages(text: str) -> None:
    with pytest.raises(VerifyError, match="names no packages of the wheel"):
        wheel_sources(text.encode(), ["flashmoe/__init__.py"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[", "cannot be read: "),
        ("", "names no project"),
        ("project = 1", "names no project"),
        ("[project]\nname = 1", "names no"),
    ],
)
def test_a_commit_that_names_no_project(text: str, told: str) -> None:
    with pytest.raises(VerifyError, match=told):
        read_project(text.encode())


def test_a_bundle_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff")
    for name in ("absent.json", "binary.json"):
        with pytest.raises(VerifyError, match=f"cannot read the bundle {name}: "):
            _read(tmp_path / name)


def test_binaries_that_only_one_of_two_builds_has(make_wheel: WheelMaker, workshop: Workshop, tmp_path: Path) -> None:
    """Neither direction is a build for the CPU only."""
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
