"""What ranks share through the store: that they are alive, how many exchanges they have begun, which rank failed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flashmoe.errors import DistributedError

INTERVAL = 1.0  # seconds
Beats = dict[int, dict[str, Any]]


class GroupState:
    """A group in which this rank takes part in exchanges."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.name, self.rank = weakref.ref(group), group.group_name, dist.get_rank()
        self.ranks = [rank for rank in dist.get_process_group_ranks(group) if rank != self.rank]
        self.call, self.begun = "", 0
        self.pending_call = ""  # the call that this rank waits to agree on, until all others have made it too
        self.failed = ""  # why nothing can be exchanged any more
        self.is_raised = threading.Event()  # set once the caller has received the error
        device = "cuda" if torch.cuda.is_available() and dist.is_nccl_available() else "cpu"
        backend: Any = None
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device(device))
        options: Any = getattr(backend, "options", None)
        self.timeout: timedelta | None = getattr(options, "_timeout", None)
        self.is_nccl = type(backend).__name__ == "ProcessGroupNCCL"
        self.device = torch.cuda.current_device() if self.is_nccl else 0
        self.stream: int | None = None  # the stream that waits for the last exchange
        self.probe: torch.cuda.Event | None = None
        self.probed = 0  # the number of exchanges that had begun when the probe was recorded
        self.is_captured = False

    def begin(self, call: str) -> None:
        """Count an exchange that this rank begins; all ranks of a group begin the same exchanges in the same order."""
        self.raise_if_failed()
        self.call = call
        self.begun += 1
        if self.is_nccl:
            self.stream = torch._C._cuda_getCurrentRawStream(self.device)
            if torch.cuda.is_current_stream_capturing():
                self.is_captured = True

    def raise_if_failed(self) -> None:
        """Raise the error that the monitor has found, if any, and cancel the pending interrupt, so that it is raised once."""
        if self.failed:
            self.is_raised.set()
            interrupt("", None)
            raise DistributedError(self.failed)

    def is_busy(self) -> bool:
        """Whether the GPU has not finished what was queued at the first query or, once it has, what was queued since. Only call this
        when a rank is probably lost: querying the GPU could end another thread's capture of a graph."""
        if self.stream is None:
            return False
        if self.probe is None or (self.probed != self.begun and self.probe.query()):
            stream = (
                torch.cuda.ExternalStream(self.stream, device=self.device)
                if self.stream
                else torch.cuda.default_stream(self.device)
            )
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    return False
                self.probe, self.probed = torch.cuda.Event(), self.begun
                self.probe.record()
        return not self.probe.query()


def interrupt(message: str, on_raised: Callable[[], None] | None) -> None:
    """Raise DistributedError in the main thread when it next runs Python, and call ``on_raised`` there. None: cancel the pending interrupt."""

    def begin(error: DistributedError) -> None:
        DistributedError.__init__(error, message)
        if on_raised is not None:
            on_raised()

    # The interpreter takes a class and calls it without arguments.
    kind = type("DistributedError", (DistributedError,), {"__init__": begin, "__module__": DistributedError.__module__})
    raised = ctypes.py_object() if on_raised is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.main_thread().ident or 0), raised)


def key_of(rank: int) -> str:
    return f"flashmoe/heartbeat/{rank}"


def note_of(name: str) -> str:
    return f"flashmoe/blame/{name}"


def look(store: Any, ranks: list[int]) -> Beats:
    """The last heartbeats of those ``ranks`` that have written any."""
    keys = [key_of(rank) for rank in ranks]
    if not keys or store.check(keys):
        return {rank: json.loads(text) for rank, text in zip(ranks, store.multi_get(keys) if keys else [], strict=True)}
    return {rank: json.loads(store.get(key_of(rank))) for rank in ranks if store.check([key_of(rank)])}


def describe_culprits(beats: Beats, state: GroupState, still: list[int], behind: list[int]) -> str:
    """A message that names the ranks without heartbeats or, if there are none, the ranks that run but are behind. Of the ranks without
    heartbeats, only those that are also behind are named if there are any: the others may have stopped because of them."""
    name, rank = state.name, state.rank
    first = [one for one in still if beats[one]["begun"].get(name, 0) < state.begun]
    messages = [f"rank {one} has ended or is stopped: its heartbeat does not change" for one in first or still]
    for one in () if still else behind:
        pending_call, begun = beats[one]["pending_call"].get(name), beats[one]["begun"].get(name, 0)
        if pending_call:
            messages.append(f"rank {one} calls {pending_call}, but rank {rank} repeats an earlier call")
        else:
            messages.append(
                f"rank {one} is stuck elsewhere: it runs, but has begun {begun} exchanges where rank {rank} has begun {state.begun}"
            )
    return "; ".join(messages)


def store_lost(error: BaseException) -> str:
    holder = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"the store that the ranks share does not answer ({line}): {holder}, which holds it, has ended or is stopped"
