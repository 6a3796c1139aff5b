"""The dense attention kernels on the emulated machine."""

from flashmoe_tools.operations.attention.emulation import combine, e4m3, forward, merge

RUNNERS = {
    "attention_forward": forward.RUNNER,
    "attention_combine": combine.RUNNER,
    "attention_merge": merge.RUNNER,
    "attention_forward_e4m3": e4m3.RUNNER,
    "attention_transpose_e4m3": e4m3.TRANSPOSE_RUNNER,
}
