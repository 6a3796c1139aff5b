"""Attention in training as a problem: the forward pass, then dq, dk and dv from a gradient of its output."""

from dataclasses import dataclass
from typing import ClassVar

from flashmoe_tools.operations.attention_backward.problem import AttentionBackwardProblem


@dataclass(frozen=True)
class AttentionTrainingProblem(AttentionBackwardProblem):
    """The backward problem preceded by the forward pass, whose smaller number of bytes is not counted."""

    operation: ClassVar[str] = "attention_training"
    word: ClassVar[str] = "training"
    products: ClassVar[tuple[int, int]] = (4, 3)


PROBLEM = AttentionTrainingProblem
