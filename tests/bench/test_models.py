"""Whole models: which contender is ours, and what counts as the same training."""

from typing import Any

import pytest
import torch

from flashmoe_tools.bench import models
from flashmoe_tools.bench.models import OURS, TRAINING_LIMIT, Contender, check_training
from flashmoe_tools.report import Verdict


@pytest.mark.parametrize(
    ("contender", "is_ours"),
    [((OURS,), True), ((OURS, OURS), True), ((OURS, "eager"), False), (("sdpa",), False), (("sdpa", OURS), False)],
)
def test_ours_is_what_is_ours_alone(contender: tuple[str, ...], is_ours: bool) -> None:
    assert Contender(*contender).is_ours is is_ours


@pytest.mark.parametrize(
    ("loss", "norm"), [(1.0, 1.0), (1.0 + 2 * TRAINING_LIMIT, 1.0), (1.0, 1.0 - 2 * TRAINING_LIMIT)]
)
def test_training_may_differ_by_a_limit_in_loss_and_in_gradients(
    monkeypatch: pytest.MonkeyPatch, loss: float, norm: float
) -> None:
    used: list[str] = []
    ours, other = Contender(OURS), Contender("sdpa")
    monkeypatch.setattr(Contender, "use", lambda self, _: used.append(self.name))
    found: dict[str, tuple[float, float]] = {"sdpa": (1.0, 1.0), OURS: (loss, norm)}
    monkeypatch.setattr(models, "_gradients", lambda *_: found[used[-1]])
    model: Any = None
    (check,) = check_training(model, [ours], other, torch.zeros(1))
    assert check.verdict is (Verdict.PASS if (loss, norm) == (1.0, 1.0) else Verdict.FAIL)


def test_a_call_takes_what_the_clock_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((100.0, 100.5))
    monkeypatch.setattr(models.time, "perf_counter", lambda: next(ticks))
    assert models.seconds_of(lambda: None, "cpu") == 0.5


@pytest.mark.parametrize("contenders", [(Contender(OURS), Contender("sdpa")), (Contender("sdpa"), Contender("eager"))])
def test_others_are_compared_with_ours_and_with_nothing_else(
    monkeypatch: pytest.MonkeyPatch, contenders: tuple[Contender, ...]
) -> None:
    monkeypatch.setattr(models, "prepare", lambda *_: (lambda: None, 10))
    monkeypatch.setattr(Contender, "use", lambda *_: None)
    monkeypatch.setattr(models, "seconds_of", lambda *_: 0.5)
    rows = models.measure(None, "train", contenders, models.SIZES["tiny"], "cpu", 3, 60.0)
    assert [row["contender"] for row in rows if "ours_is_faster_by" in row] == [
        contender.name for contender in contenders if Contender(OURS) in contenders and not contender.is_ours
    ]
