"""Attention and experts over several GPUs, on torch.distributed (NCCL; gloo on the CPU).

context_parallel_attention   one sequence divided among the ranks of a group
ExpertParallel               the experts of a layer divided among the ranks of a group
register_dtensor_rules       sharding rules of flashmoe's operators, for DTensor
"""

from __future__ import annotations

from flashmoe.distributed.context_parallel import context_parallel_attention, shard_sequence, unshard_sequence
from flashmoe.distributed.dtensor import register_dtensor_rules
from flashmoe.distributed.expert_parallel import ExpertParallel

__all__ = [
    "ExpertParallel",
    "context_parallel_attention",
    "register_dtensor_rules",
    "shard_sequence",
    "unshard_sequence",
]
