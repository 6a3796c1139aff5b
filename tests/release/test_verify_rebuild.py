"""`verify --rebuild`: a rebuilt wheel is compared byte for byte, and only another host compiler leaves something unproved."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from release_builders import KERNEL, clone_of, git, write_sources

from flashmoe.errors import ExitCode
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.verify.content import read_wheel
from flashmoe_tools.verify.errors import VerifyError
from flashmoe_tools.verify.rebuild import build_environment, compare, find_compiler, rebuild

WheelMaker = Callable[..., Path]


def compared(first: Path, second: Path, folder: Path) -> list[Check]:
    return compare(read_wheel(first, folder / "one"), read_wheel(second, folder / "two"))


def test_a_rebuilt_wheel_of_the_same_bytes(make_wheel: WheelMaker, tmp_path: Path) -> None:
    wheel = make_wheel()
    shutil.copy(wheel, tmp_path / wheel.name)
    checks = compared(wheel, tmp_path / wheel.name, tmp_path)
    assert [check.verdict for check in checks] == [Verdict.PASS, Verdict.PASS]


def test_what_the_wheel_says_of_its_compiler_excuses_nothing(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path
) -> None:
    """An edited library that names another compiler does not pass in any form, neither in the text nor by exit code."""
    compilers = {"cxx": "g++ 14.1.0"}
    edited = make_wheel(library + b"\0", compilers=compilers)
    binaries, wheel = compared(edited, make_wheel(), tmp_path)
    assert binaries.verdict is Verdict.PASS
    assert wheel.verdict is Verdict.UNPROVED
    assert "says that its host part was compiled by g++ 14.1.0; here it was g++ 12.2.0" in wheel.why
    assert Report("verify", (binaries, wheel)).exit_code == ExitCode.NOT_PROVED != 0


def test_another_compiler_explains_no_other_file(make_wheel: WheelMaker, library: bytes, tmp_path: Path) -> None:
    edited = make_wheel(library + b"\0", compilers={"cxx": "g++ 14.1.0"}, files={"flashmoe/__init__.py": "edited"})
    assert compared(edited, make_wheel(), tmp_path)[1].verdict is Verdict.FAIL


def test_the_same_host_compiler_must_give_the_same_bytes(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path
) -> None:
    _, wheel = compared(make_wheel(), make_wheel(library + b"\0"), tmp_path)
    assert wheel.verdict is Verdict.FAIL
    assert "flashmoe/libflashmoe.so" in wheel.found


def test_a_device_binary_must_match_whatever_the_host_compiler(
    make_wheel: WheelMaker, library: bytes, tmp_path: Path
) -> None:
    edited = library.replace(KERNEL, b"\x7fELF bf17 ", 1)
    first, *_ = compared(make_wheel(), make_wheel(edited, compilers={"cxx": "g++ 14.1.0"}), tmp_path)
    assert (first.name, first.verdict) == ("rebuilt device binary attention_bf16.sm_80", Verdict.FAIL)


def test_the_compiler_that_the_wheel_names_is_taken_where_it_is(tmp_path: Path) -> None:
    for name, version in (("g++", "12.2.0"), ("g++-14", "14.1.0"), ("g++-13", "13.1.0")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    assert find_compiler("g++ 14.1.0", environ) == str(tmp_path / "g++-14")
    assert find_compiler("g++ 12.2.0", environ) == str(tmp_path / "g++")
    assert find_compiler("g++ 13.3.0", environ) == find_compiler("g++ 9.1.0", environ) == ""
    assert find_compiler("g++ 14.1.0; rm -rf .", environ) == ""


def test_rebuild_takes_the_wheels_commit_and_leaves_the_clone_as_it_was(
    make_wheel: WheelMaker, clone: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    write_sources(root)
    (root / "nox").write_text(
        '#!/bin/sh\nfound="$(git status --porcelain; git tag)"; mkdir dist && echo "$found" >dist/a.whl\n'
    )
    (root / "nox").chmod(0o755)
    git(root, "add", "nox")
    git(root, "commit", "-q", "-m", "nox")
    head, refs = git(root, "rev-parse", "HEAD"), git(root, "show-ref")
    wheel = make_wheel(commit=head, source_date_epoch=int(git(root, "log", "-1", "--format=%ct")))
    built = rebuild(read_wheel(wheel, tmp_path / "given"), clone_of(root), ["v0.1.0"], tmp_path)
    assert built.read_text() == "v0.1.0\n"  # a clean tree, with the tag
    assert (git(root, "show-ref"), git(root, "worktree", "list").count("\n")) == (refs, 0)


def test_a_build_that_fails_is_told_with_its_last_lines(make_wheel: WheelMaker, clone: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(clone, tmp_path / "clone"))
    (root / "nox").write_text("#!/bin/sh\nmkdir dist && touch dist/a.whl && echo nvrtc is missing && exit 7\n")
    (root / "nox").chmod(0o755)
    git(root, "add", "nox")
    git(root, "commit", "-q", "-m", "nox")
    stamp = int(git(root, "log", "-1", "--format=%ct"))
    given = read_wheel(make_wheel(commit=git(root, "rev-parse", "HEAD"), source_date_epoch=stamp), tmp_path / "given")
    with pytest.raises(VerifyError, match=r"exit status 7:\nnvrtc is missing"):
        rebuild(given, clone_of(root), (), tmp_path)


@pytest.mark.parametrize(("machine", "here", "platform"), [("x86_64", "x86_64", None), ("x86_64", "aarch64", "x86_64")])
def test_a_rebuild_for_another_machine_names_it(
    make_wheel: WheelMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    here: str,
    platform: str | None,
) -> None:
    """The library's machine, from its header, compared with the one that rebuilds, and the compiler for it."""
    content = read_wheel(make_wheel(), tmp_path / "given")
    assert content.machine == machine
    monkeypatch.setattr("platform.machine", lambda: here)
    version = content.stated.cxx.removeprefix("g++ ")
    for name in ("g++", f"{machine}-linux-gnu-g++"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    built = build_environment(content, {"PATH": str(tmp_path), "FLASHMOE_PLATFORM": "other"})
    assert built.get("FLASHMOE_PLATFORM") == platform
    assert built["CXX"] == str(tmp_path / (f"{machine}-linux-gnu-g++" if platform else "g++"))
