"""Jobs that the processes of a group compute and check: run by test_distributed.py, one process per rank.

    python jobs.py SIZE FOLDER DEVICE JOB...

Every job writes FOLDER/JOB-RANK.txt, empty if it passed, otherwise with the traceback. The last printed line contains the ranks' exit codes.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashmoe
from flashmoe.distributed import (
    ExpertParallel,
    context_parallel_attention,
    context_parallel_attention_varlen,
    shard_ragged,
    shard_sequence,
    unshard_ragged,
    unshard_sequence,
)
from flashmoe.errors import ArgumentError, DistributedError, ShapeError
from flashmoe.moe.scaled import dequantize_rows, quantize

sys.path.append(str(Path(__file__).resolve().parents[1]))  # after the installed packages
from distributed import dtensor_jobs


def _device() -> tuple[str, torch.dtype]:
    if dist.get_backend() == "nccl":
        return f"cuda:{dist.get_rank()}", torch.bfloat16
    return "cpu", torch.float32


def _tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 2e-2


def _attention(rank: int, size: int) -> None:
    device, dtype = _device()
    length = 24 * size
    torch.manual_seed(1)
    whole = [torch.randn(2, heads, length, 64).to(device, dtype).requires_grad_() for heads in (4, 2, 2)]
    upstream = torch.randn(2, 4, length, 64).to(device, dtype)
    for causal in (False, True):
        expected, lse = flashmoe.attention(*whole, causal=causal, return_lse=True)
        gradients = torch.autograd.grad(expected, whole, upstream)
        for method in ("ring", "all_gather"):
            first = None
            for _ in range(2):
                own = [shard_sequence(tensor.detach()).requires_grad_() for tensor in whole]
                out, own_lse = context_parallel_attention(
                    own[0], own[1], own[2], causal=causal, method=method, return_lse=True
                )
                found = torch.autograd.grad(out, own, shard_sequence(upstream))
                if first is not None:
                    assert all(torch.equal(a, b) for a, b in zip(first, (out, *found), strict=True)), (
                        "another run, other bits"
                    )
                first = (out, *found)
            limit = _tolerance(dtype)
            assert torch.allclose(unshard_sequence(out), expected, atol=limit)
            assert torch.allclose(unshard_sequence(own_lse), lse, atol=limit)
            for a, b in zip(found, gradients, strict=True):
                assert torch.allclose(unshard_sequence(a), b, atol=4 * limit), (causal, method)


def _ragged(rank: int, size: int) -> None:
    """Sequences of every kind: empty, shorter than the number of shards, not a multiple of it."""
    device, dtype = _device()
    ends = [0, 37, 37, 40, 41, 105]
    torch.manual_seed(8)
    whole: list[Any] = [torch.randn(105, heads, 64).to(device, dtype).requires_grad_() for heads in (4, 2, 2)]
    upstream = torch.randn(105, 4, 64).to(device, dtype)
    on_device = torch.tensor(ends, dtype=torch.int32, device=device)
    limit = _tolerance(dtype)
    for causal in (False, True):
        q, k, v = whole
        expected, lse = flashmoe.attention_varlen(q, k, v, on_device, on_device, 64, 64, causal=causal, return_lse=True)
        gradients = torch.autograd.grad(expected, whole, upstream)
        own = [shard_ragged(tensor.detach(), ends).requires_grad_() for tensor in whole]
        assert abs(own[0].shape[0] - 105 / size) < 2 * len(ends)
        results = []
        for _ in range(2):
            result: Any = context_parallel_attention_varlen(
                own[0], own[1], own[2], ends, causal=causal, return_lse=True
            )
            out, own_lse = result
            found = torch.autograd.grad(out, own, shard_ragged(upstream, ends))
            results.append((out, *found))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "another run, other bits"
        assert torch.allclose(unshard_ragged(out, ends), expected, atol=limit)
        assert torch.allclose(unshard_ragged(own_lse.mT.contiguous(), ends).mT, lse, atol=limit)
        for a, b in zip(found, gradients, strict=True):
            assert torch.allclose(unshard_ragged(a, on_device), b, atol=4 * limit), causal
    with pytest.raises(ShapeError, match="see shard_ragged"):
        context_parallel_attention_varlen(upstream, whole[1], whole[2], ends)
    with pytest.raises(ArgumentError, match="never decrease"):
        shard_ragged(upstream, [0, 5, 3])


def _torch_context(rank: int, size: int) -> None:
    """In torch's context_parallel, which shards the same way: our function, and on GPUs torch's attention on our kernels."""
    device, dtype = _device()
    torch.manual_seed(9)
    whole: list[Any] = [torch.randn(1, 4, 32 * size, 64).to(device, dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(1, 4, 32 * size, 64).to(device, dtype)
    expected = flashmoe.attention(*whole, causal=True)
    gradients = torch.autograd.grad(expected, whole, upstream)
    wanted = [shard_sequence(tensor) for tensor in (expected.detach(), *gradients)]
    mesh = init_device_mesh(torch.device(device).type, (size,))
    buffers = [tensor.detach().clone() for tensor in (*whole, upstream)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        own: list[Any] = [tensor.clone().requires_grad_() for tensor in buffers[:3]]
        out: Any = context_parallel_attention(own[0], own[1], own[2], mesh.get_group(), causal=True)
        results = [(out, *torch.autograd.grad(out, own, buffers[3]))]
        if dtype == torch.bfloat16:
            os.environ["FLASHMOE_FALLBACK"] = "error"  # torch's kernels must not run
            with flashmoe.activated(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(own[0], own[1], own[2], is_causal=True)
                results.append((out, *torch.autograd.grad(out, own, buffers[3])))
            del os.environ["FLASHMOE_FALLBACK"]
    for found in results:
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, atol=4 * _tolerance(dtype))


def _experts(rank: int, size: int) -> None:
    device, dtype = _device()
    torch.manual_seed(2)
    experts, hidden, inner, top_k, tokens = 4 * size, 32, 24, 3, 20
    w13 = (torch.randn(experts, 2 * inner, hidden) / 4).to(device, dtype).requires_grad_()
    w2 = (torch.randn(experts, hidden, inner) / 4).to(device, dtype).requires_grad_()
    x = torch.randn(size, tokens, hidden).to(device, dtype)
    ids = (
        torch.stack([torch.randperm(experts)[:top_k] for _ in range(size * tokens)])
        .view(size, tokens, top_k)
        .to(device)
    )
    ids[0, 0, 0] = -1
    ids[0, 1, 0] = experts
    weights = torch.rand(size, tokens, top_k, device=device)
    upstream = torch.randn(size, tokens, hidden).to(device, dtype)
    own = slice(4 * rank, 4 * rank + 4)
    mine = [tensor[rank].clone().requires_grad_() for tensor in (x, weights)]
    reference = [tensor.detach().clone().requires_grad_() for tensor in (x[rank], weights[rank])]
    expected = flashmoe.fused_moe(reference[0], w13, w2, reference[1], ids[rank], shared=reference[0] * 0.5)
    wanted = torch.autograd.grad(expected, reference, upstream[rank])
    all_out = flashmoe.fused_moe(x.flatten(0, 1), w13, w2, weights.flatten(0, 1), ids.flatten(0, 1))
    whole = torch.autograd.grad(all_out, (w13, w2), upstream.flatten(0, 1))
    for padded in (False, True):
        layer = ExpertParallel(padded=padded)
        part13, part2 = (w[own].detach().clone().requires_grad_() for w in (w13, w2))
        first = None
        for _ in range(2):
            out = layer(mine[0], part13, part2, mine[1], ids[rank], shared=lambda t: t * 0.5)
            found = torch.autograd.grad(out, (*mine, part13, part2), upstream[rank])
            assert first is None or all(torch.equal(a, b) for a, b in zip(first, (out, *found), strict=True))
            first = (out, *found)
        with torch.no_grad():  # without gradients own tokens are computed separately, while the others are sent
            apart = layer(mine[0], part13, part2, mine[1], ids[rank].long(), shared=mine[0] * 0.5)
            short = layer(mine[0].bfloat16(), part13.bfloat16(), part2.bfloat16(), mine[1], ids[rank])
        assert torch.equal(apart, out)
        limit = _tolerance(dtype)
        half = flashmoe.fused_moe(x[rank].bfloat16(), w13.bfloat16(), w2.bfloat16(), weights[rank], ids[rank])
        assert torch.allclose(short.float(), half.float(), atol=5e-2, rtol=5e-2)
        assert torch.allclose(out, expected, atol=limit, rtol=limit)
        for a, b in zip(found, (*wanted, whole[0][own], whole[1][own]), strict=True):
            assert torch.allclose(a.float(), b.float(), atol=10 * limit, rtol=limit)


def _experts_e4m3(rank: int, size: int) -> None:
    """Rows sent as e4m3 codes: the result of one process with other ranks' rows rounded to e4m3 and its own unrounded."""
    device, dtype = _device()
    torch.manual_seed(5)
    experts, hidden, inner, top_k, tokens = 4 * size, 256, 24, 3, 20
    w13 = (torch.randn(experts, 2 * inner, hidden) / 16).to(device, dtype)
    w2 = (torch.randn(experts, hidden, inner) / 4).to(device, dtype)
    x = torch.randn(size, tokens, hidden).to(device, dtype)[rank]
    x[0] *= 1000  # gives the row a different scale
    x[1, :128] = 0
    choices = [torch.randperm(experts)[:top_k] for _ in range(size * tokens)]
    ids = torch.stack(choices).view(size, tokens, top_k).to(device)[rank]
    weights = torch.rand(size, tokens, top_k, device=device)[rank]
    upstream = torch.randn(size, tokens, hidden).to(device, dtype)[rank]
    rounded = dequantize_rows(*quantize(x)).to(dtype)
    is_own = (ids >= 4 * rank) & (ids < 4 * rank + 4)
    own, others = (torch.where(kept, ids, -1) for kept in (is_own, ~is_own))
    reference = [t.clone().requires_grad_() for t in (x, rounded, weights)]
    exact = flashmoe.fused_moe(reference[0], w13, w2, reference[2], own)
    expected = exact + flashmoe.fused_moe(reference[1], w13, w2, reference[2], others)
    dx, dx_of_rounded, dweights = torch.autograd.grad(expected, reference, upstream)
    unrounded = flashmoe.fused_moe(x, w13, w2, weights, ids)
    limit = _tolerance(dtype)
    for padded in (False, True):
        layer = ExpertParallel(padded=padded, dispatch_dtype=torch.float8_e4m3fn)
        mine = [t.clone().requires_grad_() for t in (x, weights)]
        parts = [w[4 * rank : 4 * rank + 4].clone().requires_grad_(not padded) for w in (w13, w2)]
        results = []
        for _ in range(2):
            out = layer(mine[0], parts[0], parts[1], mine[1], ids)
            results.append((out, *torch.autograd.grad(out, mine, upstream)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "another run, other bits"
        with torch.no_grad():
            apart = layer(x, *parts, weights, ids)  # type: ignore[call-arg]
        wanted = dx + dx_of_rounded
        for a, b in ((out, expected), (apart, expected), (results[0][1], wanted)):
            off = (a - b).float().norm(dim=1) / b.float().norm(dim=1)  # per row, so independent of its scale
            assert off.max() < limit, off
        assert torch.allclose(results[0][2][1:], dweights[1:], atol=10 * limit, rtol=10 * limit)
        cost = (out - unrounded)[1:].float().norm() / unrounded[1:].float().norm()
        assert 1e-2 < cost < 4.5e-2, cost  # as the docstring says, minus rows that are not sent
    with pytest.raises(ShapeError, match="x has 32 columns"):
        layer(x[:, :32], w13[:4, :, :32], w2[:4, :32], weights, ids)


def _ring_flash_attention(rank: int, size: int) -> None:
    """The package ring-flash-attn on our functions under flash_attn's names, dense and ragged."""
    from flashmoe_tools.bench.distributed.ring_flash import load

    found = load()
    device, ends = _device()[0], [0, 16 * size, 48 * size]
    torch.manual_seed(10)
    whole = [torch.randn(48 * size, heads, 64).to(device, torch.bfloat16).requires_grad_() for heads in (4, 2, 2)]
    upstream = torch.randn(48 * size, 4, 64).to(device, torch.bfloat16)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    for is_ragged in (False, True):
        lengths = ends if is_ragged else [0, 48 * size]
        both = torch.tensor(lengths, dtype=torch.int32, device=device)
        q, k, v = whole
        expected = flashmoe.attention_varlen(q, k, v, both, both, 48 * size, 48 * size, causal=True)
        gradients = torch.autograd.grad(expected, whole, upstream)
        own: list[Any] = [shard_ragged(tensor.detach(), lengths).requires_grad_() for tensor in whole]
        if is_ragged:
            out = found.zigzag_ring_flash_attn_varlen_func(*own, cu_seqlens // size, 32, causal=True)
        else:
            out = found.zigzag_ring_flash_attn_func(*(tensor.unsqueeze(0) for tensor in own), causal=True)[0]
        results = (out, *torch.autograd.grad(out, own, shard_ragged(upstream, lengths)))
        for a, b in zip(results, (expected, *gradients), strict=True):
            assert torch.allclose(unshard_ragged(a, lengths), b, atol=8e-2, rtol=2e-2)


def _uneven_tokens(rank: int, size: int) -> None:
    device, dtype = _device()
    torch.manual_seed(3)
    w13, w2 = (torch.randn(size, *shape).to(device, dtype) for shape in ((16, 8), (8, 8)))
    tokens = 5 * rank  # none on the first rank
    x = torch.randn(tokens, 8).to(device, dtype)
    ids, weights = torch.zeros(tokens, 1, dtype=torch.int32, device=device), torch.ones(tokens, 1, device=device)
    out = ExpertParallel()(x, w13[rank : rank + 1], w2[rank : rank + 1], weights, ids)
    assert torch.allclose(
        out, flashmoe.fused_moe(x, w13, w2, weights, ids), atol=_tolerance(dtype), rtol=_tolerance(dtype)
    )


def _disagreement(rank: int, size: int) -> None:
    q = torch.randn(1, 2, 8 + 2 * rank, 64)
    with pytest.raises(DistributedError, match=r"disagree: q is .*rank"):
        context_parallel_attention(q, q, q)


def _absence(rank: int, size: int) -> None:
    q = torch.randn(1, 2, 8, 64)
    if rank == 0:
        with pytest.raises(DistributedError, match=r"rank 1 did not join"):
            context_parallel_attention(q, q, q, timeout=timedelta(seconds=2))
    dist.barrier()
    context_parallel_attention(q, q, q)  # no rank is excluded permanently


def _stalled(rank: int, size: int) -> None:
    """The last rank does something else, and arrives after the others have given up."""
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    q = torch.randn(1, 2, 8, 64)
    context_parallel_attention(q, q, q, group)
    if rank == size - 1:
        time.sleep(6)
        return
    begun = time.monotonic()
    with pytest.raises(
        DistributedError, match=rf"rank {size - 1} is stuck elsewhere: it runs, but has begun \d+ exchanges"
    ):
        context_parallel_attention(q, q, q, group)
    assert time.monotonic() - begun < 6


def _killed(rank: int, size: int) -> None:
    """A rank ends between forward and backward; in a ring of four, two ranks have no connection to it."""
    q = torch.randn(1, 2, 8, 64, requires_grad=True)
    out: Any = context_parallel_attention(q, q, q, dist.new_group(timeout=timedelta(seconds=20)))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(DistributedError, match=r"rank 1 has ended or is stopped: its heartbeat does not change"):
        out.sum().backward()
    assert time.monotonic() - begun < 24


def _suite(rank: int, size: int) -> None:
    """The benchmark suite on its smallest problems."""
    from flashmoe_tools.bench.distributed import session
    from flashmoe_tools.bench.distributed.measure import Ranks
    from flashmoe_tools.bench.suites import parse_suite
    from flashmoe_tools.report import Verdict

    attention = {"what": "attention", "length": 64, "heads": 4, "heads_kv": 2, "head_dim": 64}
    experts = {"what": "experts", "tokens": 8, "hidden": 128, "inner": 8, "experts": 4, "top_k": 2, "codes": True}
    parts = [attention, experts, {**attention, "length": 96, "sequences": 2}]
    table = {"schema": 1, "name": "mine", "kind": "distributed", "repeats": 2, "parts": parts}
    suite, ranks = parse_suite(table, "mine.toml"), Ranks(torch.device("cpu"))
    report, late = (session._measure(suite, ranks, (), budget) for budget in (None, 0.0))
    assert (report is None) == (rank > 0)
    if report is None or late is None:
        return
    assert [check.verdict for check in late.checks] == [Verdict.SKIP] * 3
    assert not late.data["parts"]
    assert report.verdict is Verdict.PASS, report.checks
    first, second, ragged = report.data["parts"]
    keys = 2 * 32 * 2 * 64 * 4  # bytes: a rank's keys and values, float32
    assert first["bytes_sent"] == 3 * keys  # forward, backward, and the gradients
    assert first["bytes_least"] == 1.5 * keys
    assert second["bytes_least"] < second["bytes_sent"] < 2 * second["bytes_least"]
    assert set(first["ms"]) == {"one", "ring", "all_gather"}
    text = session.as_text(report)
    assert "attention-s64-h4-2-d64" in text
    assert "without ring-flash-attn: needs GPUs" in text
    assert set(ragged["ms"]) == {"one", "ring"}
    assert {"experts, e4m3", "padded, e4m3"} < set(second["ms"])
    assert set(second["exchanges"]) == {"dispatch", "combine"}
    off = second["root_mean_squares"]
    assert off["padded"] < 1e-5 < 1e-3 < off["padded, e4m3"] < 0.04
    assert not any("e4m3" in check.found for check in report.checks if check.name.endswith("speed"))


JOBS: dict[str, Callable[[int, int], None]] = {
    "attention": _attention,
    "ragged": _ragged,
    "torch_context": _torch_context,
    "experts": _experts,
    "experts_e4m3": _experts_e4m3,
    "ring_flash_attention": _ring_flash_attention,
    "uneven_tokens": _uneven_tokens,
    "disagreement": _disagreement,
    "absence": _absence,
    "suite": _suite,
    "stalled": _stalled,
    "killed": _killed,
    **dtensor_jobs.JOBS,
}


def main(rank: int, size: int, folder: Path, device: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    for name in names:
        said = ""
        (folder / f"{name}-{rank}.txt").write_text(said, encoding="utf-8")  # the only output of a rank that is killed
        try:
            JOBS[name](rank, size)
        except BaseException:
            said = traceback.format_exc()
        (folder / f"{name}-{rank}.txt").write_text(said, encoding="utf-8")
    dist.destroy_process_group()


def start(size: int, folder: Path, device: str, names: list[str]) -> None:
    """One process per rank. torch is imported once and forked, except with GPUs, which a forked process cannot use."""
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    ranks = [context.Process(target=main, args=(rank, size, folder, device, names)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    print(json.dumps([rank.exitcode for rank in ranks]))


if __name__ == "__main__":
    start(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
