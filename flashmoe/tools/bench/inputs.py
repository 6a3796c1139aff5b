"""Fresh random inputs of a case, on a device."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from flashmoe.tools.bench.case import Case

TORCH_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """q [B, Hq, Sq, D], k and v [B, Hkv, Sk, D] of one dtype on one device; never zeros, which hide errors."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.case.head_dim**-0.5)


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Standard normal values; the seed depends on the run's seed and the case alone."""
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {case.key}".encode()))  # the CPU generator reads 32 bits

    def tensor(heads: int, length: int) -> torch.Tensor:
        """[batch, heads, length, head_dim], stored in the case's layout."""
        bshd = case.layout == "bshd"
        shape = (case.batch, length, heads, case.head_dim) if bshd else (case.batch, heads, length, case.head_dim)
        values = torch.randn(shape, generator=generator, device=device, dtype=TORCH_DTYPES[case.dtype])
        return values.transpose(1, 2) if bshd else values

    return Inputs(
        case,
        tensor(case.heads_q, case.seq_q),
        tensor(case.heads_kv, case.seq_k),
        tensor(case.heads_kv, case.seq_k),
    )
