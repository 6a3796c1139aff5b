"""Ranks that call a function together must agree on its arguments: a difference is found before any data is sent.

A rank that calls with new arguments announces them in the group's store and waits for the others' announcements. Repeated calls
cost a comparison of Python values, no message and no synchronisation with the GPU.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from flashmoe.distributed import watch
from flashmoe.distributed.heartbeat import GroupState
from flashmoe.errors import DistributedError

SLICE = 1.0  # seconds
_agreed: dict[tuple[str, str], dict[str, Any]] = {}
_announcements: defaultdict[tuple[str, str], int] = defaultdict(int)


def ranks_of(group: ProcessGroup | None) -> tuple[ProcessGroup, int, int]:
    """(group, this rank in it, its size); None is the default group.

    Raises DistributedError if torch.distributed is not initialised or this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        msg = "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        raise DistributedError(msg)
    found = dist.distributed_c10d._get_default_group() if group is None else group
    rank = dist.get_rank(found)
    if rank < 0:
        msg = "this process is not in the group; call only from the group's ranks"
        raise DistributedError(msg)
    return found, rank, dist.get_world_size(found)


def agree(group: ProcessGroup, call: str, arguments: Mapping[str, Any], timeout: timedelta) -> None:
    """Raise DistributedError on every rank, naming the rank and the value, if the ranks of a group differ in ``arguments``."""
    state = watch.start(group)
    key = (group.group_name, call)
    stated = dict(arguments)
    if _agreed.get(key) == stated:
        state.pending_call = ""
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    number = _announcements[key]
    _announcements[key] += 1
    store = dist.distributed_c10d._get_default_store()
    if state.timeout is not None:
        timeout = min(timeout, state.timeout)
    state.pending_call = f"{call} with {_shown(stated)}"  # until the others have joined
    prefix = f"flashmoe/{group.group_name}/{call}/{number}"
    store.set(f"{prefix}/{rank}", json.dumps(stated))
    for other in range(size):
        name = f"{prefix}/{other}"
        try:
            _wait(store, name, state, time.monotonic() + timeout.total_seconds())
        except DistributedError:
            raise
        except (RuntimeError, ValueError) as error:
            _announcements[key] = number  # a late rank finds no trace of this call, and the next call announces again
            with suppress(RuntimeError):
                store.delete_key(f"{prefix}/{rank}")
            found = watch.find_absent(group, is_final=False) or f"rank {other} is running and repeats an earlier call"
            msg = (
                f"rank {other} did not join {call} within {timeout.total_seconds():g} s, where rank {rank} calls it with "
                f"{_shown(stated)}; {found}"
            )
            raise DistributedError(msg) from error
        theirs = json.loads(store.get(name))
        if theirs != json.loads(json.dumps(stated)):
            fields = [field for field in stated if theirs.get(field) != json.loads(json.dumps(stated[field]))]
            state.pending_call = ""
            differences = "; ".join(
                f"{f} is {stated[f]} on rank {rank} and {theirs.get(f)} on rank {other}" for f in fields
            )
            msg = f"the ranks of {call} disagree: {differences}; call it with the same arguments on all of the group's {size} ranks"
            raise DistributedError(msg)
    state.pending_call = ""
    _agreed[key] = stated


def _wait(store: Any, name: str, state: GroupState, end: float) -> None:
    """Wait until ``name`` is in the store, or until the monitor finds a rank that failed."""
    while True:
        begun = time.monotonic()
        slice_ = max(0.001, min(SLICE, end - begun))
        try:
            store.wait([name], timedelta(seconds=slice_))
        except (RuntimeError, ValueError):
            state.raise_if_failed()
            now = time.monotonic()
            if now >= end or now - begun < slice_ / 2:  # it failed too early for a timeout
                raise
        else:
            return


def _shown(stated: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in stated.items())


@contextmanager
def explained(call: str, group: ProcessGroup) -> Iterator[None]:
    """Wraps an exchange: if torch.distributed raises, raises a DistributedError that names the rank and the cause."""
    state = watch.state_of(group)
    state.begin(call)
    try:
        yield
    except DistributedError:
        raise
    except RuntimeError as error:
        state.raise_if_failed()
        rank, cause = dist.get_rank(), str(error).splitlines()[0]
        found = watch.find_absent(group) or "all other ranks are there: see their own errors"
        msg = f"{call} on rank {rank}: {found} (the exchange failed: {cause})"
        raise DistributedError(msg) from error
