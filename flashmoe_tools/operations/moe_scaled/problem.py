"""The layer with e4m3 weights and block scales as a problem: the forward problem's sizes, weights of 8 bits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from flashmoe.errors import ArgumentError
from flashmoe_tools.operations import DTYPE_BYTES, fields
from flashmoe_tools.operations.moe.problem import MoeProblem

if TYPE_CHECKING:  # torch: reading and comparing reports needs none
    from flashmoe_tools.operations.moe_scaled.reference import ScaledInputs, ScaledReference

DTYPE, BLOCK = "e4m3", 128


@dataclass(frozen=True)
class MoeScaledProblem(MoeProblem):
    """w13 and w2 in e4m3 with a float32 scale for each 128 by 128, x and the result in bfloat16; swiglu."""

    operation: ClassVar[str] = "moe_scaled"
    heaviest_kernel: ClassVar[str] = "grouped_gemm_gated_scaled"

    @property
    def bytes_moved(self) -> int:
        """The weights of the active experts, their scales and x read once, the result written once."""
        weights = 3 * self.active_experts * self.hidden * self.intermediate
        return weights + weights // BLOCK**2 * DTYPE_BYTES["f32"] + 2 * self.tokens * self.hidden * DTYPE_BYTES["bf16"]

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> MoeScaledProblem:
        return cls(**asdict(MoeProblem.from_json(row)))

    @classmethod
    def from_key(cls, key: str) -> MoeScaledProblem:
        """Such as e4m3-e128k8-h2048i768-t512."""
        if not key.startswith(f"{DTYPE}-"):
            msg = f"{key!r} names no case of {cls.operation}; one is written as {cls.smallest().key}"
            raise ArgumentError(msg)
        found = MoeProblem.from_key(key.replace(DTYPE, "bf16", 1))
        return cls(**{**asdict(found), "dtype": DTYPE})

    @classmethod
    def smallest(cls) -> MoeScaledProblem:
        return cls(dtype=DTYPE, experts=4, top_k=2, hidden=256, intermediate=128, tokens=16)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[MoeScaledProblem]:
        """The fields of ``moe`` without ``dtype``, which is e4m3; sizes are multiples of a block."""
        fields.known(row, {"experts", "top_k", "hidden", "intermediate", "tokens", "routing"}, where)
        for name in ("hidden", "intermediate"):
            for size in fields.counts(row, where, name):
                fields.divide(size, BLOCK, where, name, "a block")
        for found in MoeProblem.expand(row, where):
            yield cls(**{**asdict(found), "dtype": DTYPE})

    def fit(self, dtypes: Collection[str], max_tokens: int) -> MoeScaledProblem:
        del dtypes
        return replace(self, tokens=min(self.tokens, max_tokens))

    def make_inputs(self, device: str, seed: int) -> ScaledInputs:  # type: ignore[override]  # further tensors
        from flashmoe_tools.operations.moe_scaled.reference import make_inputs

        return make_inputs(self, device, seed)

    def make_reference(self, inputs: ScaledInputs) -> ScaledReference:  # type: ignore[override]
        from flashmoe_tools.operations.moe_scaled.reference import make_reference

        return make_reference(inputs)


PROBLEM = MoeScaledProblem
