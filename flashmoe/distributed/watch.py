"""Which rank is gone, or behind: told when an exchange fails, by a heartbeat of every rank in the group's store.

From its first call on, a rank writes once a second how often its heart has beaten and how many exchanges it has begun in each group.
Where an exchange fails, a rank looks at the others' twice: whose heart has stopped has ended or is stopped; who runs and has begun
fewer exchanges is stuck elsewhere. Who looks first leaves a note, so that those who fail later, maybe because of the first one's end,
name the same rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

INTERVAL = 1.0  # seconds
PATIENCE = 2.5  # between two looks: more than two intervals
_counts: defaultdict[str, int] = defaultdict(int)
_heart: _Heart | None = None


class _Heart(threading.Thread):
    """Beats until the process ends or the store is gone."""

    def __init__(self, store: Any) -> None:
        super().__init__(name="flashmoe-heartbeat", daemon=True)
        self.watched = store
        # Its own connection: who waits in a store must not be taken for dead.
        self.store = store.clone() if hasattr(store, "clone") else store
        self.rank, self.ended = dist.get_rank(), threading.Event()

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the store ends with the process that holds it
            beats = 0
            while not self.ended.is_set():
                self.store.set(_key(self.rank), json.dumps({"beats": beats, "begun": dict(_counts)}))
                beats += 1
                self.ended.wait(INTERVAL)


def _key(rank: int) -> str:
    return f"flashmoe/heartbeat/{rank}"


def start() -> None:
    """Begin to beat, once for each initialisation of torch.distributed."""
    global _heart
    store = dist.distributed_c10d._get_default_store()
    if _heart is not None and _heart.watched is store and _heart.is_alive():
        return
    stop()
    _counts.clear()
    _heart = _Heart(store)
    _heart.start()


def stop() -> None:
    if _heart is not None:
        _heart.ended.set()
        _heart.join(1.0)


atexit.register(stop)


def begin(group: ProcessGroup) -> None:
    """This rank begins an exchange; all ranks of a group begin the same ones in the same order."""
    _counts[group.group_name] += 1


def _look(store: Any, ranks: list[int]) -> dict[int, dict[str, Any]]:
    return {rank: json.loads(store.get(_key(rank))) for rank in ranks if store.check([_key(rank)])}


def find_absent(group: ProcessGroup, *, is_final: bool = True) -> str:
    """Who is to blame for an exchange of ``group`` that failed, in words; "" where all ranks are there. Takes seconds.

    ``is_final``: the group cannot be used any more, and others will ask the same.
    """
    try:
        return _find_absent(group, is_final)
    except Exception as error:
        return f"the store that the ranks share does not answer ({_line(error)}): the process that holds it has ended"


def _find_absent(group: ProcessGroup, is_final: bool) -> str:
    store = dist.distributed_c10d._get_default_store()
    note, name = f"flashmoe/blame/{group.group_name}", group.group_name
    ranks = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    if store.check([note]):
        return store.get(note).decode()
    before = _look(store, ranks)
    time.sleep(PATIENCE)
    if store.check([note]):
        return store.get(note).decode()
    after = _look(store, ranks)
    silent = [rank for rank in ranks if rank not in after]
    still = [rank for rank in after if rank in before and after[rank]["beats"] == before[rank]["beats"]]
    behind = [rank for rank in after if rank not in still and after[rank]["begun"].get(name, 0) < _counts[name]]
    said = [f"rank {rank} has ended or is stopped: it gives no sign of life" for rank in still]
    said += [f"rank {rank} has not called yet" for rank in silent]
    said += [
        f"rank {rank} is stuck elsewhere: it runs, but has begun {after[rank]['begun'].get(name, 0)} exchanges where rank "
        f"{dist.get_rank()} has begun {_counts[name]}"
        for rank in behind
        if not still
    ]
    found = "; ".join(said)
    if found and is_final:
        store.set(note, found)
    return found


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
