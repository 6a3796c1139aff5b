"""Attention and experts over several GPUs, on torch.distributed (NCCL; gloo on the CPU).

context_parallel_attention   one sequence length, split over the ranks of a group; ..._varlen, a ragged batch
ExpertParallel               a layer's experts, split over the ranks of a group
register_dtensor_rules       flashmoe's operators on DTensors
AttentionParallel            how parallelize_module shards flashmoe.Attention; MoEParallel, flashmoe.MoE
"""

from __future__ import annotations

from flashmoe.distributed.context_parallel import context_parallel_attention, shard_sequence, unshard_sequence
from flashmoe.distributed.dtensor import AttentionParallel, MoEParallel, register_dtensor_rules
from flashmoe.distributed.expert_parallel import ExpertParallel
from flashmoe.distributed.ragged import context_parallel_attention_varlen, shard_ragged, unshard_ragged

__all__ = [
    "AttentionParallel",
    "ExpertParallel",
    "MoEParallel",
    "context_parallel_attention",
    "context_parallel_attention_varlen",
    "register_dtensor_rules",
    "shard_ragged",
    "shard_sequence",
    "unshard_ragged",
    "unshard_sequence",
]
