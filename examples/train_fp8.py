"""Experts trained with e4m3 products beside bfloat16: a small language model on the text of Python's own documentation, several seeds of
each, and a picture of the losses.

    python train_fp8.py                                    a few steps, to see it run
    python train_fp8.py --steps 2000 --seeds 3             on a GPU: minutes; losses.svg, and losses.json with every step
    python train_fp8.py --steps 2000 --only fp8 --seed 1   one run of them, for several at once; then again without --only
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashmoe

PRECISIONS = ("bf16", "fp8")
device = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, BATCH, DIM, EXPERTS, LAYERS = (256, 32, 256, 16, 4) if device == "cuda" else (32, 4, 128, 4, 1)


class Block(nn.Module):
    def __init__(self, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(DIM), nn.RMSNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.experts = flashmoe.MoE(DIM, DIM, EXPERTS, 2, precision="fp8" if precision == "fp8" else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, DIM // 64, 64)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        y, balance = self.experts(self.norms[1](x).bfloat16(), return_loss=True)
        return x + y, balance


class Model(nn.Module):
    """Weights are float32; autocast decides the dtype of products."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block(precision) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 128, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).sum()


def train(precision: str, seed: int, steps: int) -> list[float]:
    """The language model's loss at every step."""
    torch.manual_seed(seed)
    model = Model(precision).to(device)
    text = (
        torch.frombuffer(bytearray("\n".join(topics.values()), "ascii", "replace"), dtype=torch.uint8).long().to(device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1)).to(device)
        batch = text[starts + torch.arange(LENGTH + 1, device=device)]
        with torch.autocast(device, torch.bfloat16):
            logits, balance = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def smoothed(losses: list[float]) -> list[float]:
    width = max(1, len(losses) // 40)
    return [mean(losses[at : at + width]) for at in range(0, len(losses) - width + 1, width)]


def draw(runs: dict[str, list[float]]) -> str:
    """An SVG: one line per run, grey bfloat16, red e4m3."""
    curves = {name: smoothed(losses)[1:] for name, losses in runs.items()}
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    lines = []
    for name, curve in curves.items():
        points = " ".join(
            f"{60 + 520 * at / max(1, len(curve) - 1):.1f},{20 + 260 * (high - loss) / (high - low):.1f}"
            for at, loss in enumerate(curve)
        )
        colour = "#c0392b" if name.startswith("fp8") else "#7f8c8d"
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
    steps = max(map(len, runs.values()))
    labels = [(8, 26, f"{high:.2f}"), (8, 284, f"{low:.2f}"), (60, 306, "0"), (540, 306, f"{steps} steps")]
    labels += [(420, 40, "grey: bfloat16, red: e4m3"), (8, 306, "loss")]
    text = [f'<text x="{x}" y="{y}" font-size="12" font-family="sans-serif">{word}</text>' for x, y, word in labels]
    page = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="600" height="320"><rect width="600" height="320" fill="#fff"/>'
    )
    return "\n".join([page, *lines, *text, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=PRECISIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    asked = [(given.only, given.seed)] if given.only else [(p, s) for p in PRECISIONS for s in range(given.seeds)]
    runs: dict[str, list[float]] = {}
    for precision, seed in asked:
        name = f"{precision}-{seed}"
        path = given.out / f"{name}.json" if given.out else None
        if path is not None and path.exists():
            runs[name] = json.loads(path.read_text(encoding="utf-8"))
        else:
            runs[name] = train(precision, seed, given.steps)
            if path is not None:
                path.write_text(json.dumps([round(loss, 5) for loss in runs[name]]), encoding="utf-8")
    for name, losses in runs.items():
        tenth = max(1, len(losses) // 10)
        print(f"{name}: first tenth {mean(losses[:tenth]):.4f}, last tenth {mean(losses[-tenth:]):.4f}")
    if given.out and not given.only:
        (given.out / "losses.svg").write_text(draw(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
