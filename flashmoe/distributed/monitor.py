"""Detects ranks that are lost or stuck, over NCCL. There an exchange that not all ranks join never returns, and torch's watchdog ends
the process, from C++, after the group's timeout.

So the heartbeat thread checks the other ranks' heartbeats. When a rank of a group is gone, stuck or calls something else, the thread
reports it on stderr, aborts the group's communicators, which ends the waiting kernels, and raises DistributedError in the main thread as
soon as that runs Python again, all before the watchdog acts. If the main thread does not return, the process ends, as the watchdog
would end it. None of this runs on the calling thread, and the GPU is not queried while all ranks have heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flashmoe.distributed.heartbeat import (
    INTERVAL,
    Beats,
    GroupState,
    describe_culprits,
    interrupt,
    look,
    note_of,
    store_lost,
)

SILENCE = 30.0  # seconds without a heartbeat after which a rank counts as dead; C code may hold the interpreter's lock that long
GONE = 10.0  # seconds without progress on the GPU, if a rank has left torch.distributed
SETTLED = 3  # consecutive checks that must agree before a running rank is blamed
RANKS_PER_SECOND = 64  # limits how many heartbeats each rank reads per second: the store is one process


class Monitor:
    """What one rank has seen of the others."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.heard: dict[int, tuple[int, float]] = {}  # by rank: its heartbeat count, and when that last changed
        # By group: times, and how many exchanges this rank had begun then
        self.times: dict[str, deque[tuple[float, int]]] = {}
        self.stuck: dict[str, float] = {}  # by group: since when this rank's queued work makes no progress
        self.suspected: dict[str, tuple[str, int]] = {}  # by group: what was found, and how often in a row
        self.next_look = 0.0

    def look(self, groups: Mapping[str, GroupState]) -> None:
        """Once a second: find a rank that this one waits for in vain."""
        now = time.monotonic()
        active = self._active_groups(groups, now)
        if not active or now < self.next_look:
            return
        ranks = sorted({rank for state in active for rank in state.ranks})
        self.next_look = now + len(ranks) / RANKS_PER_SECOND
        beats = look(self.store, ranks)
        for rank, beat in beats.items():
            if rank not in self.heard or self.heard[rank][0] != beat["beats"]:
                self.heard[rank] = beat["beats"], now
        for state in active:
            note = note_of(state.name)
            if self.store.check([note]):  # another rank has given up the group
                self._fail(state, self.store.get(note).decode(), is_waiting=state.is_captured or state.is_busy())
            elif found := self._find(state, beats, now):
                self._fail(state, found)

    def look_alone(self, groups: Mapping[str, GroupState], error: BaseException) -> None:
        """For when the store is lost: fails a group whose exchange makes no progress."""
        now = time.monotonic()
        for state in self._active_groups(groups, now):
            if self._stuck_for(state, now) > min(SILENCE, _limit(state)):
                self._fail(state, store_lost(error))

    def _stuck_for(self, state: GroupState, now: float) -> float:
        """Seconds since the caller's stream was first seen to make no progress; 0 while it makes progress."""
        if state.is_busy():
            return now - self.stuck.setdefault(state.name, now)
        self.stuck.pop(state.name, None)
        return 0.0

    def _active_groups(self, groups: Mapping[str, GroupState], now: float) -> list[GroupState]:
        found = [state for state in list(groups.values()) if state.is_nccl and state.begun and not state.failed]
        for state in found:
            times = self.times.setdefault(state.name, deque())
            if not times or times[-1][1] != state.begun:
                times.append((now, state.begun))
        return found

    def _find(self, state: GroupState, beats: Beats, now: float) -> str:
        limit = _limit(state)
        patience = min(SILENCE, limit)
        begun = {rank: beat["begun"].get(state.name, 0) for rank, beat in beats.items() if rank in state.ranks}
        gone = [rank for rank in begun if beats[rank]["gone"]]
        silent = {rank: now - self.heard[rank][1] for rank in begun if rank not in gone}
        is_doubtful = gone or max(silent.values(), default=0.0) > patience / 2
        if not is_doubtful:
            self.stuck.pop(state.name, None)
            state.probe = None
        stuck = self._stuck_for(state, now) if is_doubtful else 0.0
        still = [rank for rank, seconds in silent.items() if seconds > patience]
        if still and (state.is_captured or stuck > INTERVAL):
            return describe_culprits(beats, state, still, [])
        if gone and stuck > min(GONE, limit):
            return describe_culprits(beats, state, gone, [])
        times = self.times[state.name]
        due = max((count for since, count in times if now - since > limit), default=0)
        while len(times) > 1 and times[0][1] <= min(begun.values(), default=0):
            times.popleft()
        late = [rank for rank, count in begun.items() if count < due]
        if late:
            return describe_culprits(beats, state, [], late)
        elsewhere = [rank for rank in begun if begun[rank] < state.begun and state.name in beats[rank]["pending_call"]]
        found = describe_culprits(beats, state, [], elsewhere) if elsewhere else ""
        before, count = self.suspected.get(state.name, ("", 0))
        self.suspected[state.name] = found, count + 1 if found == before else 1
        return found if found and self.suspected[state.name][1] >= SETTLED else ""

    def _fail(self, state: GroupState, found: str, *, is_waiting: bool = True) -> None:
        """``is_waiting``: the caller waits for something that never comes; otherwise its next exchange raises."""
        message = (
            f"{state.call} on rank {state.rank}: {found} (the NCCL communicator of group {state.name} is aborted: end this process, "
            "or make a new group)"
        )
        if is_waiting:  # before the waiting kernels are aborted, because their results are invalid
            interrupt(message, state.is_raised.set)
        state.failed = message
        print(f"flashmoe: DistributedError: {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            self.store.set(note_of(state.name), found)
        with contextlib.suppress(Exception):
            group: Any = state.group()
            group._get_backend(torch.device("cuda")).abort()
        if is_waiting and not state.is_raised.wait(_margin(state)) and dist.is_initialized():
            print("flashmoe: the caller does not return; ending the process", file=sys.stderr, flush=True)
            os.abort()


def _margin(state: GroupState) -> float:
    """Seconds before the group's timeout at which a rank that is behind counts as stuck."""
    return min(10.0, 0.4 * state.timeout.total_seconds()) if state.timeout else 10.0


def _limit(state: GroupState) -> float:
    return (state.timeout.total_seconds() if state.timeout else 600.0) - _margin(state)
