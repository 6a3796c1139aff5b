"""Training with windows, softcaps, sinks and masks as a problem: the forward pass, then the gradients from one of its output."""

from dataclasses import dataclass
from typing import ClassVar

from flashmoe_tools.operations.serving_backward.problem import ServingBackwardProblem


@dataclass(frozen=True)
class ServingTrainingProblem(ServingBackwardProblem):
    """The backward problem with the forward pass before it, whose bytes are the lesser part and not counted."""

    operation: ClassVar[str] = "serving_training"
    word: ClassVar[str] = "training"
    products: ClassVar[int] = 7


PROBLEM = ServingTrainingProblem
