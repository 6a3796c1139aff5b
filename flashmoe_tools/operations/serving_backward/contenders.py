"""The backward pass only of attention over ragged batches with score options: what autograd runs for an output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from flashmoe_tools.bench.contenders import Contender, Prepared, flashmoe_available, setting
from flashmoe_tools.bench.sampling import capture_stream
from flashmoe_tools.operations.serving import contenders as serving
from flashmoe_tools.operations.serving.reference import Inputs
from flashmoe_tools.operations.serving_backward.reference import BackwardInputs


def _recorded(prepare: Callable[[Inputs], Prepared], *, both: bool) -> Callable[[BackwardInputs], Prepared]:
    """The gradients of a forward contender, of its own problem if that is another one; ``both``: after its forward pass."""

    def prepare_gradients(inputs: BackwardInputs) -> Prepared:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs.leaves]
        is_learned = inputs.problem.mask == "learned"
        sinks = leaves[3] if len(leaves) > 3 and not is_learned else None
        mask = leaves[3] if is_learned else inputs.mask
        with _on_capture_stream() if both and inputs.q.is_cuda else nullcontext():
            prepared = prepare(replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2], sinks=sinks, mask=mask))
            # Kept with both too: autograd state of the leaves belongs to this stream while it lives
            out = prepared.call()
        needed = leaves if prepared.own is None else leaves[:3]  # without sinks or a mask
        dout = inputs.dout
        if out.dim() == 4:  # [B, Hq, Sq, D] from a dense call
            dout = dout.view(inputs.problem.batch, -1, *dout.shape[1:]).transpose(1, 2)

        def call() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(prepared.call() if both else out, needed, dout, retain_graph=not both)

        if prepared.own is not None and prepared.own.keep is not None:
            return Prepared(call, own=replace(inputs, keep=prepared.own.keep))
        return Prepared(call, own=prepared.own and inputs.plain)

    return prepare_gradients


@contextmanager
def _on_capture_stream() -> Iterator[None]:
    """Uses the graph's stream: a captured backward pass must not meet another one.

    Views and leaves of the autograd graph remember the stream that they were created on.
    """
    torch.cuda.synchronize()
    with torch.cuda.stream(capture_stream()):
        yield
    torch.cuda.synchronize()


def contenders(*, both: bool = False) -> tuple[Contender, ...]:
    """The forward pass's contenders under the same names, and our split form."""
    forward = {one.name: replace(one, prepare=_recorded(one.prepare, both=both)) for one in serving.contenders()}
    split = setting("FLASHMOE_SPLIT_BACKWARD", "1")
    ours = forward["flashmoe"].prepare
    return (
        *forward.values(),
        # For comparison: the time of the dq kernel plus the dk and dv kernel where the fused form would run.
        Contender("flashmoe-split", "flashmoe, split form", ("cuda",), flashmoe_available, ours, split),
    )
