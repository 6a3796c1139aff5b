"""The kernels of ragged and paged attention with score options on the emulated machine.

problem.py (what a problem is), tensors.py (its memory), reference.py (fp64), cases.py (the problems of a forward
kernel), and a module for each operation.
"""

from flashmoe_tools.operations.serving.emulation import append, bool_mask, decode, e4m3, forward, fp8, ordered

RUNNERS = {
    "attention_varlen_forward": forward.RUNNER,
    "attention_dropout_forward": forward.RUNNER,
    "attention_mask_forward": forward.RUNNER,
    bool_mask.OPERATION: bool_mask.RUNNER,
    bool_mask.TILES: bool_mask.TILES_RUNNER,
    "attention_chunk_forward": forward.CHUNK_RUNNER,
    "attention_decode": decode.RUNNER,
    "attention_decode_scores": ordered.SCORES,
    "attention_decode_values": ordered.VALUES,
    "attention_append": append.RUNNER,
    "attention_decode_e4m3": e4m3.RUNNER,
    "attention_chunk_forward_e4m3": e4m3.CHUNK_RUNNER,
    "attention_append_e4m3": e4m3.APPEND_RUNNER,
    "attention_dequantize_e4m3": e4m3.DEQUANTIZE_RUNNER,
    "attention_varlen_forward_e4m3": fp8.RUNNER,
}
