"""A long step is never silent, on a terminal or in a log, and a short one prints little."""

import io
import re
import time

import pytest

from flashmoe_tools import progress
from flashmoe_tools.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")


def wait_for(stream: io.StringIO, text: str, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while text not in stream.getvalue() and time.monotonic() < end:
        time.sleep(0.02)
    assert text in stream.getvalue()


def test_a_log_gets_plain_lines_with_what_how_many_and_the_time() -> None:
    stream = io.StringIO()
    with Progress("device code", 3, stream=stream, every=0.0) as step:
        step.advance("a.cubin")
        step.advance("b.cubin", count=2)
    lines = stream.getvalue().splitlines()
    assert [re.sub(r"\d+s", "Ns", line) for line in lines] == [
        "device code 0/3 Ns",
        "device code 1/3 Ns a.cubin",
        "device code 3/3 Ns b.cubin",
        "device code 3/3 Ns",
    ]


def test_a_step_that_says_nothing_is_spoken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress.HEARTBEAT_SECONDS + 2.0 < 30.0, "a second for the timer, one for a busy machine"
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.5)
    stream = io.StringIO()
    with Progress("linking", stream=stream):
        wait_for(stream, "linking 1s")


def test_a_terminal_has_one_line_that_fits_it() -> None:
    stream = Terminal()
    with Progress("device code", 2, stream=stream) as step:
        step.note("attention_forward_sm80_bf16_d256_split.sm_90a.cubin")
        time.sleep(0.15)
        step.advance("attention_forward_sm80_bf16_d256_split.sm_90a.cubin")
    text = stream.getvalue()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    parts = text.rstrip("\n").split("\r")[1:]
    assert "\x1b" not in text, "a notebook would show it"
    assert len(parts[-1]) == 39
    assert parts[-1].startswith("device code 1/2 0s  "), "blanks cover the longer line before it"
    assert any(part.startswith("device code 1/2") for part in parts)
    assert max(map(len, parts)) == 39, "a line as wide as the terminal would wrap"


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_without_control_sequences_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    stream = Terminal()
    with Progress("building", stream=stream):
        pass
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 2


def test_a_failure_is_said_in_the_last_line() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match="no"), Progress("building", stream=stream):
        raise ValueError("no")
    assert stream.getvalue().endswith("stopped: ValueError\n")


def test_a_short_step_stays_quiet_and_a_long_one_does_not() -> None:
    short, long = io.StringIO(), io.StringIO()
    with Progress("audit", stream=short, quiet_for=60.0) as step:
        step.advance("x")
    assert short.getvalue() == ""
    with Progress("audit", stream=long, quiet_for=0.3):
        wait_for(long, "audit 1s")
    assert long.getvalue().splitlines()[-1].startswith("audit ")
