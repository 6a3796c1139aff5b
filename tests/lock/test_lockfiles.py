"""The committed lock files, and the program that rewrites them."""

import shutil
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flashmoe._version import DISTRIBUTION
from flashmoe_build.environments.lock import logical_lines, marker_environment, parse_lock, read_inputs, read_lock
from flashmoe_build.environments.relock import ORDER, changes, check, main
from flashmoe_tools.toml import tomllib

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "lockfiles"
HASH = "sha256:" + "ab" * 32


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LOCKS, tmp_path / "lockfiles"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_the_locks_answer_their_inputs_and_agree() -> None:
    assert check(LOCKS) == []


@pytest.mark.parametrize("name", sorted(path.name for path in LOCKS.iterdir()))
def test_no_lock_names_a_registry_or_a_path_of_a_machine(name: str) -> None:
    text = (LOCKS / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index-url" not in text
    assert "--find-links" not in text
    words = [word for line in logical_lines(text) for word in line.split()]
    assert not [word for word in words if word.startswith("/")]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_the_versions_that_the_design_names(python: str) -> None:
    pins = {
        pin.name: pin.version
        for pin in read_lock(LOCKS / "build.txt")
        if pin.applies(marker_environment(f"{python}.0"))
    }
    assert pins["torch"] == "2.10.0"
    assert pins["numpy"].startswith("1.26.")
    assert pins["nvidia-cuda-nvrtc-cu12"] == "12.8.93"
    assert pins["nvidia-cuda-runtime-cu12"] == "12.8.90"


def test_the_code_and_the_project_file_name_the_same_distribution() -> None:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        project = tomllib.load(stream)["project"]
    assert project["name"] == DISTRIBUTION
    assert project["scripts"].keys() == {"flashmoe", DISTRIBUTION}  # the latter so that `uvx` finds it by that name


def test_pip_wheel_builds_with_the_locked_versions() -> None:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        requires = [
            *(project := tomllib.load(stream))["build-system"]["requires"],
            *project["tool"]["flashmoe"]["compile-requires"],
        ]
    locked = {pin.name: pin.version for pin in read_lock(LOCKS / "build.txt")}
    for requirement in map(Requirement, requires):
        assert str(requirement.specifier) == f"=={locked[requirement.name]}", requirement.name


def test_a_new_requirement_without_a_new_lock_is_found(copy: Path) -> None:
    with (copy / "build.in").open("a", encoding="utf-8") as stream:
        stream.write("attrs\n")
    problems = "\n".join(check(copy))
    assert "build.txt was not written from the current build.in" in problems
    assert "test.txt was not written from the current test.in" in problems
    assert "no pin for attrs" in problems


def test_a_comment_in_an_input_changes_nothing(copy: Path) -> None:
    with (copy / "build.in").open("a", encoding="utf-8") as stream:
        stream.write("# a remark\n\n")
    assert check(copy) == []


def test_a_pin_that_differs_between_locks_is_found(copy: Path) -> None:
    edit(copy / "test.txt", "ninja==1.13.2", "ninja==1.13.1")
    assert "ninja differs between build.txt and test.txt; run `nox -s lock`" in check(copy)


def test_a_registry_in_a_lock_is_found(copy: Path) -> None:
    edit(copy / "launcher.txt", "# via nox", "# via nox, https://example.invalid/simple")
    assert any("launcher.txt names a location" in problem for problem in check(copy))


def test_every_lock_has_its_input() -> None:
    assert sorted(path.stem for path in LOCKS.glob("*.in")) == sorted(ORDER)
    assert sorted(path.stem for path in LOCKS.glob("*.txt")) == sorted(ORDER)
    for name in ORDER:
        assert read_inputs(LOCKS / f"{name}.in")


def test_changes_are_told_apart() -> None:
    before = parse_lock(f"a==1 --hash={HASH}\nb==1 --hash={HASH}\nc==1 --hash={HASH}", "x")
    after = parse_lock(f"a==1 --hash={HASH}\nb==2 --hash={HASH}\nd==1 --hash={HASH}", "x")
    assert changes("x.txt", before, after) == ["x.txt: -b==1", "x.txt: +b==2", "x.txt: -c==1", "x.txt: +d==1"]
    other = parse_lock("a==1 --hash=sha256:" + "cd" * 32, "x")
    assert changes("x.txt", before[:1], other) == ["x.txt: -a==1", "x.txt: +a==1"]


def test_check_is_a_program_with_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert "match their .in files, agree with each other, and name no registry" in capsys.readouterr().out
