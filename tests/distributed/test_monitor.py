"""What a rank learns about the others from their heartbeats, without GPUs and with simulated ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from flashmoe.distributed import monitor
from flashmoe.distributed.heartbeat import GroupState, key_of, note_of
from flashmoe.errors import DistributedError


class _Group(GroupState):
    """Group g of ranks 0 to 2, of which this is 0, with a timeout of 50 s; it has begun seven exchanges and captured a graph."""

    def __init__(self) -> None:
        self.name: Any = "g"
        self.rank, self.ranks, self.call, self.begun = 0, [1, 2], "context_parallel_attention", 7
        self.pending_call = self.failed = ""
        self.is_raised, self.timeout, self.is_nccl = threading.Event(), timedelta(seconds=50), True
        self.stream, self.probe, self.is_captured, self.aborted, self.busy = None, None, True, 0, False
        self.group: Any = lambda: self

    def _get_backend(self, device: Any) -> _Group:
        return self

    def is_busy(self) -> bool:
        return self.busy

    def abort(self) -> None:
        self.aborted += 1


class _World:
    """Two ranks that send a heartbeat once a second, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.used, self.now, self.beats = HashStore(), _Group(), 1000.0, 0
        self.monitor = monitor.Monitor(self.store)
        monkeypatch.setattr("flashmoe.distributed.monitor.time.monotonic", lambda: self.now)

    def pass_time(
        self, seconds: int, *, silent: int = 0, begun: int = 7, gone: bool = False, pending_call: str = ""
    ) -> None:
        """``silent``: a rank that sends no heartbeats; the other arguments describe rank 1."""
        for _ in range(seconds):
            self.beats, self.now = self.beats + 1, self.now + 1
            for rank in (1, 2):
                said = {"g": pending_call} if pending_call and rank == 1 else {}
                beat = {
                    "gone": gone and rank == 1,
                    "begun": {"g": begun if rank == 1 else self.used.begun},
                    "pending_call": said,
                }
                if rank != silent:
                    self.store.set(key_of(rank), json.dumps({"beats": self.beats, **beat}))
            self.on_heart(self.monitor.look, {"g": self.used})

    def on_heart(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls it in the heartbeat thread, not in the caller's."""
        heart = threading.Thread(target=call, args=arguments)
        try:
            heart.start()  # the error may come before this returns
            while heart.is_alive():
                heart.join(0.01)  # an interrupt waits until this returns
        finally:
            heart.join()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> _World:
    return _World(monkeypatch)


def _until_told(world: _World, seconds: int, **said: Any) -> str:
    with pytest.raises(DistributedError) as raised:
        world.pass_time(seconds, **said)
    assert str(raised.value) == world.used.failed
    assert world.used.is_raised.is_set()
    assert world.used.aborted == 1
    return str(raised.value)


def test_hearts_that_beat_are_no_error(world: _World, capsys: pytest.CaptureFixture[str]) -> None:
    world.pass_time(60)
    world.pass_time(25, silent=1)  # C code may hold the interpreter for that long
    world.used.begun = 8
    world.pass_time(35)  # late, but within the timeout
    world.pass_time(2, begun=8)
    assert not world.used.failed + capsys.readouterr().err


def test_a_heart_that_stops_ends_what_waits(world: _World, capsys: pytest.CaptureFixture[str]) -> None:
    world.pass_time(3)
    assert "rank 2 has ended or is stopped: its heartbeat does not change" in _until_told(world, 40, silent=2)
    assert "rank 2 has ended" in capsys.readouterr().err
    with pytest.raises(DistributedError, match="rank 2 has ended"):
        world.used.begin("ExpertParallel")


def test_a_rank_that_has_left_is_missed_only_by_who_waits(world: _World) -> None:
    world.pass_time(40, gone=True)
    assert not world.used.failed
    world.used.busy = True
    assert "rank 1 has ended" in _until_told(world, 15, gone=True)


def test_a_rank_that_is_behind_is_stuck_before_the_timeout(world: _World) -> None:
    text = _until_told(world, 50, begun=5)
    assert "rank 1 is stuck elsewhere: it runs, but has begun 5 exchanges where rank 0 has begun 7" in text
    assert 40 < world.now - 1000 < 45


def test_a_rank_that_calls_something_else_is_found_at_once(world: _World) -> None:
    world.pass_time(2, begun=5, pending_call="attention with q [1]")
    world.pass_time(5)  # a late heartbeat
    text = _until_told(world, 5, begun=5, pending_call="attention with q [1]")
    assert "rank 1 calls attention with q [1], but rank 0 repeats an earlier call" in text


def test_what_another_rank_has_found_is_told_at_the_next_exchange(world: _World) -> None:
    world.used.is_captured = False
    world.store.set(note_of("g"), "rank 1 is stuck elsewhere")
    world.pass_time(1)
    assert world.used.aborted == 1
    with pytest.raises(DistributedError, match="on rank 0: rank 1 is stuck elsewhere"):
        world.used.begin("ExpertParallel")


def test_without_the_store_what_waits_is_ended(world: _World) -> None:
    world.used.busy = True

    def lose() -> None:
        for _ in range(40):
            world.now += 1
            world.on_heart(world.monitor.look_alone, {"g": world.used}, RuntimeError("broken pipe"))

    with pytest.raises(DistributedError, match=r"does not answer \(broken pipe\): rank 0, which holds it, has ended"):
        lose()
