"""The layer with e4m3 weights and block scales as a problem: the forward problem's sizes, 8-bit weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from flashmoe.errors import ArgumentError
from flashmoe_tools.operations import DTYPE_BYTES, fields
from flashmoe_tools.operations.moe.problem import MoeProblem

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK = 128


@dataclass(frozen=True)
class MoeScaledProblem(MoeProblem):
    """w13 and w2 in e4m3 with a float32 scale per 128 by 128, x and the result in bfloat16; swiglu.

    Layers with other quantised weights are subclasses.
    """

    operation: ClassVar[str] = "moe_scaled"
    heaviest_kernel: ClassVar[str] = "grouped_gemm_gated_scaled"
    weight_dtype: ClassVar[str] = "e4m3"
    block: ClassVar[int] = BLOCK  # sizes are multiples of it
    least: ClassVar[tuple[int, int]] = (256, 128)  # smallest (hidden, intermediate)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the active experts' weights, with their scales."""
        weights = 3 * self.active_experts * self.hidden * self.intermediate
        return weights + weights // BLOCK**2 * DTYPE_BYTES["f32"]

    @property
    def bytes_moved(self) -> int:
        """The weights of the active experts, their scales and x read once, the result written once."""
        return self.weight_bytes + 2 * self.tokens * self.hidden * DTYPE_BYTES["bf16"]

    @classmethod
    def from_key(cls, key: str) -> Self:
        """The problem with this key, such as e4m3-e128k8-h2048i768-t512."""
        if not key.startswith(f"{cls.weight_dtype}-"):
            msg = f"{key!r} is not a case key of {cls.operation}; example: {cls.smallest().key}"
            raise ArgumentError(msg)
        return cls._of(MoeProblem.from_key(key.replace(cls.weight_dtype, "bf16", 1)))

    @classmethod
    def smallest(cls) -> Self:
        hidden, intermediate = cls.least
        return cls(dtype=cls.weight_dtype, experts=4, top_k=2, hidden=hidden, intermediate=intermediate, tokens=16)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[Self]:
        """The fields of ``moe`` except ``dtype``; sizes are multiples of a block."""
        fields.known(row, {"experts", "top_k", "hidden", "intermediate", "tokens", "routing"}, where)
        for name in ("hidden", "intermediate"):
            for size in fields.counts(row, where, name):
                fields.divide(size, cls.block, where, name, "a block")
        for found in MoeProblem.expand(row, where):
            yield cls._of(found)

    @classmethod
    def _of(cls, found: MoeProblem) -> Self:
        return cls(**{**asdict(found), "dtype": cls.weight_dtype})

    def fit(self, dtypes: Collection[str], max_tokens: int) -> Self:
        del dtypes
        return replace(self, tokens=min(self.tokens, max_tokens))


PROBLEM = MoeScaledProblem
