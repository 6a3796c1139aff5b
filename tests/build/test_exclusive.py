"""Two sessions in one checkout: the second waits, says so, and then continues."""

import os
import subprocess
import sys
from pathlib import Path

from flashmoe_build.environments.exclusive import exclusive

ROOT = Path(__file__).resolve().parents[2]
HOLD = "import sys, pathlib; from flashmoe_build.environments.exclusive import hold_until_exit as hold; "
TWICE = HOLD + "path = pathlib.Path(sys.argv[1]); hold(path); hold(path); print('has it', flush=True); sys.stdin.read()"


def holder(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TWICE, str(path)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_the_second_process_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "build.lock"
    with holder(path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "has it\n", "twice in one process is free"
        with holder(path) as second:
            assert second.stderr is not None
            assert second.stdout is not None
            assert "waiting for another session that is making build" in second.stderr.readline()
            assert first.poll() is None
            first.communicate("", timeout=30)
            assert second.stdout.readline() == "has it\n"
            second.communicate("", timeout=30)
            assert (first.returncode, second.returncode) == (0, 0)


def build(out: Path, cache: Path) -> subprocess.Popen[str]:
    """A build without GPU code, in a separate process."""
    command = [sys.executable, "-m", "flashmoe_build", "--library-only", "--out", str(out)]
    environ = {**os.environ, "FLASHMOE_ARCHS": "none", "FLASHMOE_CACHE_DIR": str(cache)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def test_a_build_waits_for_the_one_that_writes_the_same_folder(tmp_path: Path) -> None:
    with exclusive(tmp_path / "out" / "build.lock"):
        second = build(tmp_path / "out", ROOT / "build" / "cache")
        assert second.stderr is not None
        assert "waiting for another session that is making build" in second.stderr.readline()
        assert not (tmp_path / "out" / "lib").exists()
    output, errors = second.communicate(timeout=240)
    assert second.returncode == 0, output + errors
    assert (tmp_path / "out" / "lib" / "libflashmoe.so").is_file()


def test_a_cache_that_cannot_be_written_stops_the_build_in_words(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    done = build(tmp_path / "out", tmp_path / "cache")
    _, errors = done.communicate(timeout=240)
    assert done.returncode == 1
    assert "the build stopped: " in errors
    assert "check the path" in errors
    assert "Traceback" not in errors


def test_a_lock_that_was_given_back_is_free(tmp_path: Path) -> None:
    with exclusive(tmp_path / "env.lock"):
        pass
    with holder(tmp_path / "env.lock") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        other.communicate("", timeout=30)
