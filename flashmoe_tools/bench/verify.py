"""Applies the correctness rule of a problem (flashmoe_tools.operations), which a contender must pass before it is timed."""

from flashmoe_tools.bench.contenders import Prepared
from flashmoe_tools.operations import Inputs, Reference, Verification


def verify(prepared: Prepared, inputs: Inputs, reference: Reference) -> Verification:
    """Runs the contender once and judges its result. Errors propagate."""
    inputs.poison()
    result = prepared.call()
    return reference.judge(result, None if prepared.lse is None else prepared.lse())
