"""Training a small GPT on the text of this file: flashmoe.Attention, and a mixture of experts in place of the MLP."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashmoe

DIM, HEADS, KV_HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 4, 2, 2, 64, 8, 40
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32  # the dtype of the layers' products; weights stay float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(DIM), nn.RMSNorm(DIM)])
        self.attention = flashmoe.Attention(DIM, HEADS, KV_HEADS, causal=True)
        self.experts = flashmoe.MoE(DIM, 2 * DIM, experts=4, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.experts(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.blocks(x))


torch.manual_seed(0)
text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
losses = []
for step in range(STEPS):
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,)).tolist()
    batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    with torch.autocast(device, dtype, enabled=dtype is torch.float16):
        logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:3d}  loss {losses[-1]:.3f}")
assert losses[-1] < 0.7 * losses[0]
