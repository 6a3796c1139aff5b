"""Measures calls that all ranks of a group make together: their time, the bytes that leave a rank, their profile."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_tools.bench.distributed.overlap import Overlap, measure_overlap

Call = Callable[[], Any]
SUSTAINED, MOST_CALLS = 400.0, 500  # ms of back-to-back calls, and the most calls in that time
LONG = 500.0  # ms: a longer call keeps the host ahead by itself


class Ranks:
    """This process among all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        self.is_gpu = device.type == "cuda"

    def wait(self) -> None:
        dist.barrier()
        if self.is_gpu:
            torch.cuda.synchronize()

    def milliseconds(self, call: Call) -> float:
        self.wait()
        if not self.is_gpu:
            begun = time.perf_counter()
            call()
            return (time.perf_counter() - begun) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))

    def interleaved(self, calls: Mapping[str, Call], repeats: int) -> dict[str, list[float]]:
        """Milliseconds of each call on the slowest rank, in rounds of one call each, all at the same clocks and heat."""
        for call in calls.values():
            call()
        samples = torch.tensor(
            [[self.milliseconds(call) for call in calls.values()] for _ in range(repeats)], device=self.device
        )
        dist.all_reduce(samples, dist.ReduceOp.MAX)
        return dict(zip(calls, samples.t().tolist(), strict=True))

    def sustained(self, calls: Mapping[str, Call], expected: Mapping[str, float]) -> dict[str, float]:
        """Milliseconds per call on the slowest rank, back to back for about SUSTAINED ms.

        The host is ahead of the GPU, as in training.
        """
        found = []
        for name, call in calls.items():
            count = 1 if expected[name] > LONG else max(2, min(MOST_CALLS, round(SUSTAINED / expected[name])))

            def repeatedly(call: Call = call, count: int = count) -> None:
                for _ in range(count):
                    call()

            found.append(self.milliseconds(repeatedly) / count)
        times = torch.tensor(found, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return dict(zip(calls, times.tolist(), strict=True))

    def everywhere(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def overlap(self, call: Call) -> list[dict[str, float]]:
        """The overlap of one call on every rank; empty if there is no GPU to profile."""
        if not self.is_gpu:
            return []
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]):
            call()  # starting a profiler takes as long as the call, so the first one is discarded
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            self.wait()
            call()
            torch.cuda.synchronize()
        kernels = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if str(event.device_type).endswith("CUDA") and not event.name.startswith(("nccl:", "gpu_"))
        ]
        return [found.to_json() for found in self.everywhere(_after_barrier(kernels))]


def _after_barrier(kernels: list[tuple[str, float, float]]) -> Overlap:
    """The overlap without the barrier's own kernel, which is the first one."""
    kernels.sort(key=lambda kernel: kernel[1])
    return measure_overlap(kernels[1:] if kernels and "nccl" in kernels[0][0].lower() else kernels)


def median(samples: list[float]) -> float:
    return statistics.median(samples)


class Bytes:
    """Bytes that left this rank."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank, self.sent = size, rank, 0

    def add(self, tensor: torch.Tensor, share: float = 1.0) -> None:
        self.sent += round(tensor.numel() * tensor.element_size() * share)


@contextmanager
def counted(ranks: Ranks) -> Iterator[Bytes]:
    """Counts the bytes of the exchanges that flashmoe.distributed starts inside the context."""
    found = Bytes(ranks.size, ranks.rank)
    others = (ranks.size - 1) / ranks.size
    names = ("batch_isend_irecv", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    together = "allgather_into_tensor_coalesced"
    real = {name: getattr(dist, name) for name in names} | {together: getattr(dist.ProcessGroup, together)}

    def batch(operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op is dist.isend:
                found.add(operation.tensor)
        return real["batch_isend_irecv"](operations)

    def all_to_all(output: Any, tensor: Any, incoming: Any = None, outgoing: Any = None, **options: Any) -> Any:
        if outgoing is None:
            found.add(tensor, others)
        else:
            rows = sum(outgoing) - outgoing[ranks.rank]
            found.add(tensor, rows / max(1, tensor.shape[0]))
        return real["all_to_all_single"](output, tensor, incoming, outgoing, **options)

    def all_gather(output: Any, tensor: Any, **options: Any) -> Any:
        found.add(tensor, ranks.size - 1)
        return real["all_gather_into_tensor"](output, tensor, **options)

    def reduce_scatter(output: Any, tensor: Any, **options: Any) -> Any:
        found.add(tensor, others)
        return real["reduce_scatter_tensor"](output, tensor, **options)

    def all_gather_together(group: Any, outputs: Any, tensors: Any, *options: Any) -> Any:
        for tensor in tensors:
            found.add(tensor, ranks.size - 1)
        return real[together](group, outputs, tensors, *options)

    def put(functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            setattr(dist.ProcessGroup if name == together else dist, name, function)

    put(dict(zip(real, (batch, all_to_all, all_gather, reduce_scatter, all_gather_together), strict=True)))
    try:
        yield found
    finally:
        put(real)


def link_rates(ranks: Ranks) -> dict[str, float]:
    """GB/s in each direction of a message to the next rank, and of an all-to-all exchange (what leaves a rank)."""
    count = (1 << 28) if ranks.is_gpu else 1 << 20
    sent = torch.empty(count, device=ranks.device, dtype=torch.uint8)
    received = torch.empty_like(sent)

    def message() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (ranks.rank + 1) % ranks.size),
            dist.P2POp(dist.irecv, received, (ranks.rank - 1) % ranks.size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    calls = {"message": message, "all_to_all": lambda: dist.all_to_all_single(received, sent)}
    times = ranks.interleaved(calls, 7)
    leaving = {"message": count, "all_to_all": count * (ranks.size - 1) / ranks.size}
    return {name: leaving[name] / median(samples) / 1e6 for name, samples in times.items()}
