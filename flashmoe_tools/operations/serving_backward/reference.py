"""The tensors of a ragged backward problem: the forward tensors and dout, the gradients by definition, a rule for each.

The reference is torch's derivative of attention by definition, in fp32 (fp64 on a CPU), one head at a time. Each of dq,
dk, dv and, if there are sinks or a learned mask, dsinks or dmask must satisfy the forward pass's rule
(attention/reference.py), with its own bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.reference import MAX_SCORES, Rule, attend, choose_pairs
from flashmoe_tools.operations.judging import Form, high_dtype, judge_gradients, max_abs
from flashmoe_tools.operations.serving import reference as forward
from flashmoe_tools.operations.serving.problem import ServingProblem

NAMES = ("dq", "dk", "dv")
MOST_PAIRS = 64  # checked (sequence, key head) pairs: each of their query heads needs two derivatives


@dataclass(frozen=True)
class BackwardInputs(forward.Inputs):
    """dout [tokens, Hq, D], the gradient of the output."""

    dout: torch.Tensor = field(kw_only=True)

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """The differentiated inputs: q, k, v and, if they exist, sinks or a learned mask."""
        return (self.q, self.k, self.v, *([] if self.shared is None else [self.shared]))

    @property
    def shared(self) -> torch.Tensor | None:
        """What all sequences share: sinks [Hq], or a learned mask [1, Hq, Sq, Sk]."""
        return self.mask if self.problem.mask == "learned" else self.sinks

    def poison(self) -> None:
        blocks = [torch.full_like(tensor, math.nan) for tensor in (self.q, self.k, self.v)]  # all three at once
        del blocks


def make_inputs(problem: ServingProblem, device: str, seed: int) -> BackwardInputs:
    """The forward inputs and a standard normal dout."""
    given = forward.make_inputs(problem, device, seed)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed + 1)
    shape, dtype = given.q.shape, given.q.dtype
    dout = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    return BackwardInputs(**vars(given), dout=dout)


@dataclass(frozen=True)
class Checked:
    """The expected value of one gradient of a checked (sequence, head): its tokens [first, end) of that head."""

    gradient: int
    first: int
    end: int
    head: int
    expected: torch.Tensor


@dataclass(frozen=True)
class GradientReference:
    """Expected gradients of the checked (sequence, key head) pairs with all their query heads, and the allowed errors."""

    names: tuple[str, ...]
    forms: tuple[Form, ...]  # of dq, dk, dv and, if they exist, dsinks or dmask
    checked: tuple[Checked, ...]
    # dsinks [Hq], or dmask; None if only some sequences are checked, because then the sum is unknown
    shared: torch.Tensor | None
    tolerances: tuple[float, ...]
    coverage: float

    @property
    def tolerance(self) -> float:
        return max(self.tolerances)

    def judge(self, result: Sequence[torch.Tensor], lse: torch.Tensor | None = None) -> Verification:
        """``result`` is (dq, dk, dv), plus dsinks or dmask; error and tolerance are the gradient's closest to its bound."""
        del lse
        return judge_gradients(
            self.names,
            result,
            self.forms,
            lambda index: self._error(index, result[index]),
            self.tolerances,
            self.coverage,
        )

    def _error(self, index: int, found: torch.Tensor) -> float:
        if self.shared is not None and index == len(NAMES):
            return max_abs(found.float() - self.shared)
        checked = (one for one in self.checked if one.gradient == index)
        return max(max_abs(found[one.first : one.end, one.head].float() - one.expected) for one in checked)


def make_reference(inputs: forward.Inputs) -> GradientReference:
    """Computed pair by pair: as many as the budget of scores allows, spread over sequences and key heads."""
    assert isinstance(inputs, BackwardInputs)
    problem, kind, high = inputs.problem, inputs.q.device.type, high_dtype(inputs.q.device)
    group = problem.heads_q // problem.heads_kv
    everything = problem.batch * problem.heads_kv
    budget = MAX_SCORES[kind] // 8
    per_pair = max(problem.seq_q * problem.seq_k * group, budget // MOST_PAIRS)
    pairs = choose_pairs(problem.batch, problem.heads_kv, per_pair, budget)
    rows, keys = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    checked: list[Checked] = []
    rules = [Rule(inputs.q.dtype) for _ in range(3)]
    shared_by_all = inputs.shared if len(pairs) == everything else None
    is_whole = shared_by_all is not None
    like = inputs.q[:0] if shared_by_all is None else shared_by_all
    exact_shared, plain_shared = (torch.zeros_like(like, dtype=high) for _ in range(2))
    for sequence, head in pairs:
        sums: list[list[torch.Tensor]] = [[], []]  # of dk and dv over the group's heads: exact, plain
        for query_head in range(head * group, (head + 1) * group):
            exact = _differentiate(inputs, sequence, query_head, high)
            plain = _differentiate(inputs, sequence, query_head, inputs.q.dtype)
            if is_whole:
                for whole, found in ((exact_shared, exact[3]), (plain_shared, plain[3])):
                    (whole[0] if whole.dim() == 4 else whole)[query_head] += found
            rules[0].add(exact[0], plain[0])
            checked.append(Checked(0, rows[sequence], rows[sequence + 1], query_head, exact[0].float()))
            for total, own in zip(sums, (exact, plain), strict=True):
                total[:] = [a + b for a, b in zip(total, own[1:3], strict=True)] if total else own[1:3]
        for index, (expected, own) in enumerate(zip(*sums, strict=True), 1):
            rules[index].add(expected, own)
            checked.append(Checked(index, keys[sequence], keys[sequence + 1], head, expected.float()))
    shared = None
    if is_whole:
        shared = exact_shared.float()
        if problem.mask == "learned":
            rules.append(Rule(inputs.q.dtype))
            rules[-1].add(exact_shared, plain_shared)
        else:  # float32 itself: no rounding to the problem's dtype is allowed for
            rules.append(Rule(inputs.q.dtype, max_abs(plain_shared - exact_shared), largest=max_abs(exact_shared)))
    forms = tuple((one.shape, one.dtype) for one in inputs.leaves)
    tolerances = tuple(rule.tolerance for rule in rules)
    names = (*NAMES, "dmask" if problem.mask == "learned" else "dsinks")[: len(forms)]
    return GradientReference(names, forms, tuple(checked), shared, tolerances, len(pairs) / everything)


def _differentiate(inputs: BackwardInputs, sequence: int, head: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """dq [Sq, D] of one head, its contribution to dk and dv [Sk, D], and to its sink's gradient [] or mask's [Sq, Sk]."""
    problem = inputs.problem
    key_head = head // (problem.heads_q // problem.heads_kv)
    first, end = inputs.cu_seqlens_q[sequence], inputs.cu_seqlens_q[sequence + 1]
    given = [inputs.q[first:end, head], *(inputs.keys_of(one, sequence)[:, key_head] for one in (inputs.k, inputs.v))]
    mask = inputs.bias_of(sequence, head)
    sinks = None if inputs.sinks is None else inputs.sinks[head]
    shared = mask if problem.mask == "learned" else sinks
    given += [] if shared is None else [shared]
    leaves = [one.detach().to(dtype, copy=True).requires_grad_() for one in given]
    if shared is not None:
        mask, sinks = (leaves[3], sinks) if shared is mask else (mask, leaves[3])
    q, k, v = leaves[:3]
    factors = inputs.factors_of(sequence, head)
    out, _ = attend(q, k, v, forward.score_options(problem), sinks=sinks, mask=mask, factors=factors)
    return list(torch.autograd.grad(out, leaves, inputs.dout[first:end, head].to(dtype)))
