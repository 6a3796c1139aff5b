"""Two sessions in one checkout: the second waits, says so, and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flashmoe_build.exclusive import exclusive

ROOT = Path(__file__).resolve().parents[2]
HOLD = "import sys, pathlib; from flashmoe_build.exclusive import hold_until_exit as hold; "
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


def test_a_lock_that_was_given_back_is_free(tmp_path: Path) -> None:
    with exclusive(tmp_path / "env.lock"):
        pass
    with holder(tmp_path / "env.lock") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        other.communicate("", timeout=30)
