"""The command in a hostile folder, with closed streams, in an ASCII terminal, and with unknown options."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashmoe
from flashmoe._path import is_started_as_program

PACKAGE = Path(flashmoe.__file__).resolve().parents[1]
AS_SCRIPT = "import sys; from flashmoe.__main__ import main; sys.exit(main())"  # like an installed `flashmoe`


def run(words: list[str], cwd: Path, *, shell: str = '"$@"', **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a program through a shell; ``shell`` may close streams."""
    command = ["/bin/sh", "-c", shell, "sh", sys.executable, *words]
    inner = {**os.environ, "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1", **environ}
    return subprocess.run(command, cwd=cwd, env=inner, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("started", [["-m", "flashmoe"], ["-c", AS_SCRIPT]], ids=["-m", "command"])
def test_nothing_in_the_current_folder_is_executed(tmp_path: Path, started: list[str]) -> None:
    """Modules named like ones of the standard library, of the extras, and of torch; an empty entry of PYTHONPATH also means the current folder."""
    for name in (
        "typing",
        "argparse",
        "json",
        "elftools",
        "packaging",
        "rich",
        "torch",
        "tomllib",
        "flashmoe_build",
        "zipfile",
    ):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    (tmp_path / "x.so").write_bytes(b"no library")
    for words in (["audit", "."], ["smem", "--head-dim", "64"], ["--version"]):
        paths = f"{PACKAGE}{os.pathsep}" if started[0] == "-m" else str(PACKAGE)
        extra = ["-P"] if started[0] == "-c" and sys.version_info >= (3, 11) else []  # -c searches the current folder
        done = run([*extra, *started, *words], tmp_path, PYTHONPATH=paths)
        assert "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.parametrize(
    ("line", "is_program"),
    [
        ("python -m flashmoe audit x", True),
        ("python -Bm flashmoe_tools.smoke", True),
        ("python -X dev -m flashmoe", True),
        ("python -m flashmoe_build", False),
        ("python -m pytest flashmoe", False),
        ("python script.py -m flashmoe", False),
        ("python -c pass -m flashmoe", False),
        ("python", False),
    ],
)
def test_which_command_lines_are_ours(line: str, is_program: bool) -> None:
    assert is_started_as_program(line.split()) is is_program


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    """The exit code is the verdict's, and the report, which would be opened as descriptor 1, contains nothing else."""
    words = ["-m", "flashmoe", "audit", ".", "--json", "report.json"]
    done = run(words, tmp_path, shell=f'"$@" {closed}')
    assert done.returncode == run(words, tmp_path).returncode == 3
    assert "Traceback" not in done.stderr


def test_ascii_output(tmp_path: Path) -> None:
    (tmp_path / "größe.so").write_bytes(b"no library")
    done = run(["-m", "flashmoe", "audit", "."], tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()


def test_an_unknown_option_prints_the_usage_of_its_command(tmp_path: Path) -> None:
    done = run(["-m", "flashmoe", "doctor", "--jsom"], tmp_path)
    assert done.returncode == 2
    assert "doctor [-h]" in done.stderr
    assert "unrecognized arguments: --jsom" in done.stderr
