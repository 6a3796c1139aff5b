"""Reading locks, and comparing them with the requirements and with installed packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe.errors import LockError
from flashmoe_build.environments.lock import (
    check_lock,
    find_drift,
    installed_distributions,
    parse_lock,
    read_inputs,
    verify_environment,
)
from tests.lock.wheels import make_wheel

HASH = "sha256:" + "ab" * 32
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"python_version": "3.11", "python_full_version": "3.11.4", "sys_platform": "linux"}


def lock_text(*lines: str) -> str:
    return "".join(f"{line} \\\n    --hash={HASH}\n    # via something\n" for line in lines)


def test_continuations_comments_and_markers_are_read() -> None:
    text = "# Written by hand\n" + lock_text("NumPy==1.26.4 ; python_version < '3.13'", "torch==2.10.0")
    numpy, torch = parse_lock(text, "x.txt")
    assert (numpy.name, numpy.version, numpy.hashes) == ("numpy", "1.26.4", (HASH,))
    assert numpy.applies({"python_version": "3.12"})
    assert not numpy.applies({"python_version": "3.13"})
    assert torch.marker is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"--index-url https://example.invalid/simple\na==1 --hash={HASH}", "option '--index-url'"),
        ("a==1", "a==1 has no hash"),
        (f"a>=1 --hash={HASH}", "a is not pinned to one version"),
        (f"a==1.* --hash={HASH}", "a is not pinned to one version"),
        (f"a @ file:///tmp/a.whl --hash={HASH}", "a is not pinned to one version"),
        ("a==1 --hash=md5:0123", "malformed hash 'md5:0123'"),
        (f"a==1 --hash={HASH[:-1]}", "malformed hash"),
        ("!!", "cannot read '!!'"),
        ("# nothing", "pins nothing"),
    ],
)
def test_a_line_that_is_not_pinned_and_hashed_is_refused(line: str, says: str) -> None:
    with pytest.raises(LockError, match=r"x\.txt") as caught:
        parse_lock(line, "x.txt")
    assert says in str(caught.value)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_missing_pin_is_named_with_the_file_that_asks(tmp_path: Path) -> None:
    write(tmp_path, "base.in", "torch==2.10.0\n")
    expected = read_inputs(write(tmp_path, "more.in", "-r base.in\n-c base.txt\nrich\n"))
    with pytest.raises(LockError, match=r"base\.in asks for torch==2\.10\.0, but the lock has no pin for torch"):
        check_lock(expected, parse_lock(lock_text("rich==15.0"), "more.txt"), ENVIRONMENT)


def test_a_pin_outside_what_was_asked_for_is_named(tmp_path: Path) -> None:
    expected = read_inputs(write(tmp_path, "a.in", "numpy<2\n"))
    with pytest.raises(LockError, match=r"asks for numpy<2, but the lock has numpy==2\.1\.0"):
        check_lock(expected, parse_lock(lock_text("numpy==2.1.0"), "a.txt"), ENVIRONMENT)
    check_lock(expected, parse_lock(lock_text("numpy==1.26.4"), "a.txt"), ENVIRONMENT)


def test_a_requirement_for_another_python_needs_no_pin(tmp_path: Path) -> None:
    expected = read_inputs(write(tmp_path, "a.in", "tomli; python_version < '3.11'\nrich\n"))
    pins = parse_lock(lock_text("rich==15.0"), "a.txt")
    check_lock(expected, pins, ENVIRONMENT)
    with pytest.raises(LockError, match="tomli"):
        check_lock(expected, pins, {**ENVIRONMENT, "python_version": "3.10", "python_full_version": "3.10.1"})


def test_drift_of_every_kind() -> None:
    pins = parse_lock(lock_text("numpy==1.26.4", "torch==2.10.0", "rich==15.0", "gone==1"), "a.txt")
    installed = {
        "numpy": ["1.26.4", "2.1.0"],
        "torch": ["2.10.0+cu128"],
        "rich": ["14.0"],
        "stray": ["3"],
        "flashmoe-kernels": ["0.1.0"],
    }
    assert find_drift(pins, installed, ENVIRONMENT) == [
        "gone is not installed; the lock has 1",
        "numpy is installed more than once (1.26.4 and 2.1.0); the lock has 1.26.4",
        "rich is 14.0; the lock has 15.0",
        "stray 3 is installed but not in the lock",
    ]


def test_only_named_packages_are_looked_at_on_request() -> None:
    pins = parse_lock(lock_text("numpy==1.26.4", "rich==15.0"), "a.txt")
    installed = {"numpy": ["1.26.4"], "stray": ["3"]}
    assert find_drift(pins, installed, ENVIRONMENT, names=["NumPy"]) == []


def unpack(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def test_a_second_numpy_in_site_packages_stops_the_check(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    unpack(site, "numpy", "1.26.4")
    lock = write(tmp_path, "a.txt", lock_text("numpy==1.26.4"))
    write(tmp_path, "a.in", "numpy<2\n")
    verify_environment(lock, path=[str(site)])
    unpack(site, "numpy", "2.1.0")
    assert installed_distributions([str(site), str(site)]) == {"numpy": ["1.26.4", "2.1.0"]}
    with pytest.raises(LockError, match=r"numpy is installed more than once \(1\.26\.4 and 2\.1\.0\)"):
        verify_environment(lock, path=[str(site)])


def test_a_second_numpy_on_another_path_is_found_too(tmp_path: Path) -> None:
    unpack(tmp_path / "one", "numpy", "1.26.4")
    unpack(tmp_path / "two", "numpy", "1.26.4")
    pins = parse_lock(lock_text("numpy==1.26.4"), "a.txt")
    found = installed_distributions([str(tmp_path / "one"), str(tmp_path / "two")])
    assert "installed more than once" in find_drift(pins, found, ENVIRONMENT)[0]


def test_a_missing_lock_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(LockError, match=r"cannot read a\.txt .* restore it from git"):
        verify_environment(tmp_path / "a.txt")


def test_the_program_exits_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, "a.in", "nobody-has-this==1\n")
    lock = write(tmp_path, "a.txt", lock_text("nobody-has-this==1"))
    command = [sys.executable, "-m", "flashmoe_build.environments.lock", str(lock)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "nobody-has-this is not installed; the lock has 1" in done.stderr


def test_wheel_fixture_is_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    assert make_wheel(tmp_path, "tiny", "1.0") == make_wheel(tmp_path / "again", "tiny", "1.0")
