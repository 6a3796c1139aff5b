"""The backward kernels of ragged attention with score options on the emulated machine."""

from flashmoe_tools.operations.serving_backward.emulation import around_fused, backward, bias, scores_sum

RUNNERS = {
    bias.OPERATION: bias.RUNNER,
    scores_sum.OPERATION: scores_sum.RUNNER,
    **dict.fromkeys(backward.RESULTS, backward.RUNNER),
    "attention_varlen_backward_fused_prepare": around_fused.RUNNER,
    "attention_varlen_backward_fused_convert": around_fused.RUNNER,
}
