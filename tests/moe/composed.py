"""flashmoe.MoE with every kernel replaced by torch operators: all experts compute all tokens, and those not chosen get a weight of 0."""

import torch
import torch.nn.functional as F
from torch import Tensor

import flashmoe
from flashmoe.moe.module import load_balancing_loss
from tests.moe.reference import activate


class ComposedMoE(flashmoe.MoE):
    """The same parameters, from the same random numbers; any dtype. One group of experts."""

    def forward(self, x: Tensor, *, return_loss: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, self.dim)
        logits = self.router(tokens)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = wide.sigmoid() if self.scoring == "sigmoid" else wide.softmax(1)
        choice = scores if self.selection_bias is None else scores + self.selection_bias
        ids = choice.topk(self.top_k, 1).indices
        weights = wide.gather(1, ids).softmax(1) if self.scoring == "topk_softmax" else scores.gather(1, ids)
        if self.renormalize and self.scoring != "topk_softmax":
            weights = weights / weights.sum(1, keepdim=True)
        counts = torch.bincount(ids.flatten(), minlength=self.experts)
        out = self._experts(tokens, ids, weights * self.scale).reshape(x.shape).to(logits.dtype)
        return (out, load_balancing_loss(scores, counts, self.top_k)) if return_loss else out

    def _experts(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        w13, w2 = (self.w13.mT, self.w2.mT) if self.transposed else (self.w13, self.w2)
        spread = torch.zeros(len(ids), self.experts, dtype=weights.dtype, device=ids.device).scatter(1, ids, weights)
        x = tokens.expand(self.experts, -1, -1)
        if self.weights_on_input:
            x = x * spread.T.unsqueeze(2)
        z = torch.matmul(x, w13.mT) if self.b13 is None else torch.baddbmm(self.b13.unsqueeze(1), x, w13.mT)
        h = activate(z.flatten(0, 1), self.activation, self.layout).unflatten(0, z.shape[:2])
        y = torch.matmul(h, w2.mT) if self.b2 is None else torch.baddbmm(self.b2.unsqueeze(1), h, w2.mT)
        out = (y * (spread != 0 if self.weights_on_input else spread).T.unsqueeze(2)).sum(0)
        if self.shared_w13 is None or self.shared_w2 is None:
            return out
        return out + F.linear(activate(F.linear(tokens, self.shared_w13), self.activation, self.layout), self.shared_w2)
