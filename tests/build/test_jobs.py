"""How many compilers run at once, and how their queue ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.compile.jobs import job_count, run_all, run_staged

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("text", ["0", "-1", "abc", "1.5", " 2", "²"])
def test_max_jobs_that_is_no_number_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(BuildError, match=f"MAX_JOBS={text!r}; a whole number of at least 1 is needed"):
        job_count({"MAX_JOBS": text})


def test_max_jobs_is_honoured_and_an_empty_one_is_none() -> None:
    assert job_count({"MAX_JOBS": "99"}) == 99
    assert job_count({"MAX_JOBS": ""}) == job_count({}) >= 1


def test_results_are_in_order_and_a_failure_stops_what_has_not_begun() -> None:
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise BuildError("three")
        time.sleep(0.01)  # running items may finish
        return -item

    assert run_all([1, 2], work, 2) == [-1, -2]
    begun.clear()
    with pytest.raises(BuildError, match="three"):
        run_all([3, *range(10, 1000)], work, 1)
    assert len(begun) < 900


def test_ctrl_c_does_not_work_off_the_queue() -> None:
    code = (
        "import sys, time; from flashmoe_build.compile.jobs import run_all\n"
        "def work(item):\n"
        "    sys.stdout.write('begun\\n'); sys.stdout.flush(); time.sleep(0.2)\n"  # print's newline would be a second write
        "run_all(range(300), work, 2)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begin < 20.0, "300 items take 30 s"
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_items_follow_their_key_and_the_first_failure_is_told() -> None:
    groups = {"a": [1, 2], "b": [3]}
    middles, results = run_staged(groups, str.upper, lambda item, middle: f"{middle}{item}", 2)
    assert (middles, sorted(results)) == (["A", "B"], ["A1", "A2", "B3"])
    with pytest.raises(ZeroDivisionError):
        run_staged(groups, str.upper, lambda item, middle: f"{1 // (item - 3)}", 2)
