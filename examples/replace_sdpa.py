"""flashmoe's attention in a model that calls torch's: replace the function, check that it is used, compare the results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashmoe


class Block(nn.Module):
    """A typical attention block. It does not know about flashmoe."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
torch.manual_seed(0)
model = Block(256, 4).to(device, dtype)
x = torch.randn(2, 300, 256, device=device, dtype=dtype)
before = model(x)

# flashmoe's function has the same signature and meaning, so one assignment changes every model that calls F.scaled_dot_product_attention.
F.scaled_dot_product_attention = flashmoe.scaled_dot_product_attention
after = model(x)
after.sum().backward()

# The path that a call takes, without running it. FLASHMOE_FALLBACK=warn (or error) reports the calls of a program that go to torch.
q = torch.randn(2, 4, 300, 64, device=device, dtype=dtype)
print("causal:", flashmoe.explain(q, q, q, is_causal=True))
print("dropout:", flashmoe.explain(q, q, q, dropout_p=0.1))
print(f"largest difference from torch's attention: {(after - before).abs().max().item():.1e}")
assert torch.allclose(after, before, atol=2e-3)
