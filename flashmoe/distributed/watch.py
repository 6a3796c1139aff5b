"""Finds which rank is gone or behind, from heartbeats that every rank writes to the store.

From its first call on, a rank writes once a second a count of its heartbeats, how many exchanges it has begun in each group, and what
it calls that the others have not called yet. When an exchange fails (gloo), a rank checks the others' heartbeats twice: a rank whose
count does not change has ended or is stopped; one that runs but has begun fewer exchanges is stuck elsewhere. Over NCCL an exchange does
not fail by itself, so there the heartbeat thread also checks the others' heartbeats (monitor.py). The rank that finds the culprit first
leaves a note in the store, so that ranks that fail later, perhaps because the first one ended, name the same rank.

torch's own means do not say who failed: gloo's error names an address and is raised only on the neighbours of the fault,
monitored_barrier finds the connections closed after it, and NCCL's watchdog ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from flashmoe.distributed.heartbeat import INTERVAL, GroupState, describe_culprits, key_of, look, note_of, store_lost
from flashmoe.distributed.monitor import Monitor

PATIENCE = 2.5  # seconds between two checks: more than two intervals
_states: dict[str, GroupState] = {}
_heart: _Heart | None = None


class _Heart(threading.Thread):
    """Writes heartbeats until the process ends or leaves torch.distributed."""

    def __init__(self, store: Any) -> None:
        super().__init__(name="flashmoe-heartbeat", daemon=True)
        self.watched = store
        # A separate connection, so that a rank that waits in the store is not taken for dead.
        self.store = store.clone() if hasattr(store, "clone") else store
        self.rank, self.ended, self.beats = dist.get_rank(), threading.Event(), 0

    def run(self) -> None:
        monitor = Monitor(self.store)
        while not self.ended.is_set() and dist.is_initialized():
            try:
                self._beat()
                monitor.look(_states)
            except Exception as error:  # the store ends with the process that holds it
                monitor.look_alone(_states, error)
            self.ended.wait(INTERVAL)
        with contextlib.suppress(Exception):
            self._beat(is_gone=True)

    def _beat(self, *, is_gone: bool = False) -> None:
        groups = list(_states.values())
        progress = {
            "begun": {state.name: state.begun for state in groups},
            "pending_call": {u.name: u.pending_call for u in groups if u.pending_call},
        }
        self.store.set(key_of(self.rank), json.dumps({"beats": self.beats, "gone": is_gone, **progress}))
        self.beats += 1


def start(group: ProcessGroup) -> GroupState:
    """Start the heartbeat, once per initialisation of torch.distributed. Returns the state of ``group``."""
    global _heart
    store = dist.distributed_c10d._get_default_store()
    if _heart is None or _heart.watched is not store or not _heart.is_alive():
        stop()
        _states.clear()
        _heart = _Heart(store)
        _heart.start()
    found = _states.get(group.group_name)
    if found is None or found.group() is not group:
        found = _states[group.group_name] = GroupState(group)
    return found


def state_of(group: ProcessGroup) -> GroupState:
    """The state of a group; cheap."""
    found = _states.get(group.group_name)
    return found if found is not None and found.group() is group else start(group)


def stop() -> None:
    if _heart is not None:
        _heart.ended.set()
        _heart.join(1.0)


atexit.register(stop)


def find_absent(group: ProcessGroup, *, is_final: bool = True) -> str:
    """The ranks that made an exchange of ``group`` fail, as a message; "" if all ranks are there. Takes seconds.

    ``is_final``: the group cannot be state any more, and other ranks will call this too.
    """
    try:
        return _find_absent(start(group), is_final)
    except Exception as error:
        return store_lost(error)


def _find_absent(state: GroupState, is_final: bool) -> str:
    store, note = dist.distributed_c10d._get_default_store(), note_of(state.name)
    if store.check([note]):
        return store.get(note).decode()
    before = look(store, state.ranks)
    time.sleep(PATIENCE)
    if store.check([note]):
        return store.get(note).decode()
    after = look(store, state.ranks)
    still = [
        rank
        for rank, beat in after.items()
        if beat["gone"] or (rank in before and beat["beats"] == before[rank]["beats"])
    ]
    behind = [rank for rank in after if rank not in still and after[rank]["begun"].get(state.name, 0) < state.begun]
    missing = [f"rank {rank} has not called yet" for rank in state.ranks if rank not in after]
    found = "; ".join([one for one in (describe_culprits(after, state, still, behind),) if one] + missing)
    if found and is_final:
        store.set(note, found)
    return found
