"""The kernels of a mixture-of-experts layer on the emulated machine: small problems, checked against fp64."""

from flashmoe_build.emulation.runner import by_family
from flashmoe_tools.operations.moe.emulation import by_rows, combine, gemm, routing

PRODUCT = by_family(sm90=gemm.RUNNER, sm80=by_rows.MMA_SYNC, sm75=by_rows.MMA_SYNC)
RUNNERS = {
    "grouped_gemm": PRODUCT,
    "grouped_gemm_gated": PRODUCT,
    "grouped_gemm_few_rows": by_rows.FEW_ROWS,
    "grouped_gemm_gated_few_rows": by_rows.FEW_ROWS,
    **routing.RUNNERS,
    **combine.RUNNERS,
}
