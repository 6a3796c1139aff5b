"""The dense backward kernels on the emulated machine."""

from flashmoe_tools.operations.attention_backward.emulation import backward, fused

RUNNERS = {
    **dict.fromkeys(backward.RESULTS, backward.RUNNER),
    "attention_row_dot": fused.ROW_DOT,
    "attention_backward_fused_prepare": fused.AROUND,
    "attention_backward_fused_convert": fused.AROUND,
}
