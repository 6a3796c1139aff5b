"""Training with windows, softcaps, sinks and masks as a problem: the forward pass, then the gradients."""

from dataclasses import dataclass
from typing import ClassVar

from flashmoe_tools.operations.serving_backward.problem import ServingBackwardProblem


@dataclass(frozen=True)
class ServingTrainingProblem(ServingBackwardProblem):
    """The backward problem preceded by the forward pass, whose smaller number of bytes is not counted."""

    operation: ClassVar[str] = "serving_training"
    word: ClassVar[str] = "training"
    products: ClassVar[int] = 7


PROBLEM = ServingTrainingProblem
