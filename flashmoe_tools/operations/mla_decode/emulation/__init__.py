"""The kernels of multi-head latent attention on the emulated machine."""

from flashmoe_tools.operations.mla_decode.emulation import append, combine, decode

RUNNERS = {
    "mla_decode": decode.RUNNER,
    "mla_decode_few": decode.FEW_ROWS,
    "mla_combine": combine.RUNNER,
    "mla_append": append.RUNNER,
}
