"""The same bits in rollout and training: a token's log-probability from a paged cache, one row at a time, and from the full sequence."""

from functools import partial

import torch
from torch import nn

import flashmoe

HEADS, HEADS_KV, DIM, PAGE = 8, 2, 64, 16
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Policy(nn.Module):
    """One attention layer and a head; its linear layers become flashmoe's below."""

    def __init__(self, vocabulary: int = 1024, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.qkv = nn.Linear(width, (HEADS + 2 * HEADS_KV) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, attend):  # [B, S]: log-probabilities [B, S, vocabulary]
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2).split((HEADS, HEADS_KV, HEADS_KV), dim=1)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return torch.log_softmax(self.head(x), dim=-1, dtype=torch.float32)


def from_cache(q, k, v, lengths):
    return flashmoe.attention_with_kvcache(q, *pages, k, v, cache_seqlens=lengths, block_table=table, **options)


policy = Policy().to(device, torch.bfloat16)
flashmoe.patch_linear(policy)
tokens = torch.randint(0, 1024, (4, 100), device=device)
pages = [torch.zeros(4 * 8, PAGE, HEADS_KV, DIM, device=device, dtype=torch.bfloat16) for _ in "kv"]
options = {"causal": True, "consistent": True}  # or FLASHMOE_CONSISTENT=1
table = torch.randperm(4 * 8, device=device).int().view(4, 8)
rollout = []
with torch.no_grad():
    for at in range(100):  # decoding: one token per step, from the cache
        lengths = torch.full((4,), at, dtype=torch.int32, device=device)
        rollout.append(policy(tokens[:, at, None], partial(from_cache, lengths=lengths)))
training = policy(tokens, lambda q, k, v: flashmoe.attention(q, k, v, **options))
different = (torch.cat(rollout, dim=1) != training).sum().item()
print(f"{different} of {training.numel()} log-probabilities differ")
training.mean().backward()
assert different == 0
