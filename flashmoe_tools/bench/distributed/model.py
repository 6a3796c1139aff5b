"""Predicts the cost of attention and experts on many GPUs from rates measured on few:

    python -m flashmoe_tools.bench.distributed.model

Ring attention: in each of W steps a rank computes 1 / W^2 of the whole problem's products while the keys and values of
one shard travel; the longer of the two counts. Merging partial results and adding up gradients is traffic in the GPU's
own memory. Experts: the layer's own time for the tokens that arrive, plus sending the rows there and back.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

ELEMENT = 2  # bytes of bfloat16


@dataclass(frozen=True)
class Rates:
    """Measured rates: TFLOP/s of one GPU, GB/s of the links. The defaults are from two H100s in one host."""

    attention: float = 559.0  # forward and backward together, causal, D = 128, S = 65536
    experts: float = 560.0  # Qwen3's layer, T = 16384, forward
    memory: float = 3000.0
    merging: float = 1200.0  # GB/s of the kernels that merge partial results and add up gradients, from a profile
    link: float = 240.0  # per direction, GPU to GPU within a host
    host: float = 1.5  # ms of launches that nothing hides, forward and backward, two ranks; fitted to S = 16384
    network: float = 50.0  # per direction and GPU, between hosts: 400 Gbit/s
    gpus_per_host: int = 8

    def between(self, size: int) -> float:
        """GB/s of the slowest hop of a ring of ``size`` ranks, or of an all-to-all exchange."""
        return self.link if size <= self.gpus_per_host else self.network


@dataclass(frozen=True)
class Attention:
    """Causal attention over one sequence or a ragged batch."""

    length: int
    heads: int
    heads_kv: int
    head_dim: int = 128
    squares: int = 0  # ragged batch: the sum of its squared lengths; ``length`` is the sum of its lengths

    def products(self) -> float:
        """Floating-point operations of forward (2 products) and backward (5); half of the scores are visible."""
        return 3.5 * 4 * self.heads * (self.squares or self.length**2) * self.head_dim / 2


@dataclass(frozen=True)
class Prediction:
    """Milliseconds on one GPU and on several; efficiency is the speedup divided by the number of GPUs."""

    alone: float
    together: float
    exposed: float  # part of ``together`` spent waiting for messages

    def efficiency(self, size: int) -> float:
        return self.alone / (size * self.together)


def context_parallel(problem: Attention, size: int, rates: Rates) -> Prediction:
    """The ring of flashmoe.distributed.context_parallel_attention, forward and backward."""
    alone = problem.products() / rates.attention / 1e9
    if size == 1:
        return Prediction(alone, alone, 0.0)
    rows = problem.length / size * problem.heads * problem.head_dim
    keys = 2 * problem.length / size * problem.heads_kv * problem.head_dim  # K and V
    link = rates.between(size) * 1e6  # bytes per millisecond
    compute = alone / size**2
    forward, backward = compute * 2 / 7, compute * 5 / 7
    sums = ELEMENT if size == 2 else 4  # bytes per element of the sums
    message, first, later = (keys * count / link for count in (ELEMENT, ELEMENT, 4))
    waiting = (size - 1) * max(0.0, message - forward)
    # In the backward pass the first keys arrive behind half of a rank's own computation, and the last gradients leave
    # behind the other half.
    waiting += max(0.0, message - backward / 2)
    waiting += (size - 2) * max(0.0, message + later - backward)
    waiting += max(0.0, (first if size == 2 else later) - backward / 2)
    # Each merge reads and writes the sum and a float32 product; gradients are added in place.
    merges = (size - 1) * (ELEMENT + 4 + 4 + ELEMENT + sums) + (0 if size == 2 else 2 * sums + 2 * ELEMENT)
    added = sums + (size + 1) * (2 * sums + ELEMENT)
    home = 2 * sums + ELEMENT + (size - 2) * (ELEMENT + 4 + 2 * 4 + ELEMENT)
    traffic = rows * (merges + added) + keys * home
    host = rates.host * (2 * size + 1) / 5  # kernel calls: one per step forward, and one more backward
    return Prediction(alone, compute * size + waiting + traffic / (rates.merging * 1e6) + host, waiting)


def expert_parallel(tokens: int, hidden: int, inner: int, top_k: int, size: int, rates: Rates) -> Prediction:
    """The forward pass of flashmoe.distributed.ExpertParallel; ``tokens`` per rank, experts chosen uniformly.

    Counts GPU time only, as in a CUDA graph or with calls queued before and after. The layer's kernels fill the GPU, so
    messages are not hidden behind them.
    """
    alone = 6 * tokens * top_k * hidden * inner / rates.experts / 1e9
    sent = (size - 1) * (1 - (1 - 1 / size) ** top_k) * tokens  # to each rank that has one of a token's experts
    travel = sent * hidden * ELEMENT / (rates.between(size) * 1e6)
    waiting = 2 * travel
    copies = (4 * sent + 6 * tokens) * hidden * ELEMENT / (rates.memory * 1e6)
    return Prediction(alone, alone + waiting + copies, waiting)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_tools.bench.distributed.model", description=__doc__.split(":")[0]
    )
    for name, value in vars(Rates()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    rates = Rates(**vars(parser.parse_args(argv)))
    print("context parallel, causal, D = 128, forward and backward")
    print(f"{'S':>9} {'heads':>7} {'GPUs':>5} {'ms':>9} {'waiting':>8} {'efficiency':>10}")
    for length, heads, heads_kv in ((65536, 16, 16), (65536, 32, 8), (1 << 20, 32, 8)):
        for size in (2, 8, 64, 1024):
            problem = Attention(length, heads, heads_kv)
            found = context_parallel(problem, size, rates)
            row = f"{length:>9} {heads:>4}/{heads_kv:<2} {size:>5} {found.together:>9.2f} {found.exposed:>8.2f}"
            print(f"{row} {found.efficiency(size):>10.2f}")
    print("expert parallel, Qwen3-30B's layer (H 2048, I 768, k 8), 16384 tokens per GPU, forward")
    print(f"{'GPUs':>5} {'ms':>9} {'waiting':>8} {'of compute':>10}")
    for size in (2, 8, 64):
        found = expert_parallel(16384, 2048, 768, 8, size, rates)
        print(f"{size:>5} {found.together:>9.2f} {found.exposed:>8.2f} {found.alone / found.together:>10.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
