"""The choice of kernels for a mixture-of-experts layer, compiled separately with the real table, so without a GPU.

Every kernel is chosen for some problem on some GPU: one that never is only costs build time and bytes."""

import ctypes
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from flashmoe_tools.tables import Unit, load_tables
from tests.host.conftest import compile_with_table

ROOT = Path(__file__).resolve().parents[2]
TABLES = load_tables()
UNITS = [unit for unit in TABLES.units() if unit.row.operation.startswith(("moe_", "grouped_gemm"))]
BEYOND_THE_TABLE = 130  # the capability of a later GPU, which loads the PTX
CAPABILITIES = {10 * gpu.compute_capability[0] + gpu.compute_capability[1]: gpu for gpu in TABLES.gpus}
PRODUCTS = ("grouped_gemm", "grouped_gemm_gated", "grouped_gemm_gated_backward", "grouped_gemm_weight_gradient")
SCALED = ("grouped_gemm_scaled", "grouped_gemm_gated_scaled")  # for compute capability 9.0; gated only as bf16
MXFP4 = ("grouped_gemm_mxfp4", "grouped_gemm_gated_mxfp4")  # from compute capability 8.0 on, bf16
PACKED = ("grouped_gemm_mxfp4_packed", "grouped_gemm_gated_mxfp4_packed")  # for compute capability 9.0, bf16
TRAINED = ("grouped_gemm_weight_gradient_scaled", "grouped_gemm_gated_scaled_kept")  # for compute capability 9.0, bf16
MEMORIES = ("nk", "kn", "kn_pairs")
STEPS, QUANTIZE = 8, (8, 9)  # the latter for compute capability 9.0
TRAINING_STEPS = range(10, 14)  # for compute capability 9.0, bf16
SHORT, LONG = 2048, 4096  # k
SIZES = ((SHORT, SHORT), (SHORT, LONG), (2880, 2880))  # (n, k)
EXPERTS = 128
ROWS = (0.0625, 1, 4, 8, 16, 32, 64, 128, 512, 2048, 1 << 20)  # per expert

HARNESS = """
#include <cstdio>
#include <exception>

#include "moe/host/select.h"

extern "C" const unsigned char flashmoe_binaries[1] = {0};
extern "C" const char flashmoe_index[1] = {0};

using namespace flashmoe;

namespace {

template <class Choose>
int answer_with(char* answer, int length, const Choose& choose) {
  try {
    const host::Kernel& kernel = choose();
    std::snprintf(answer, length, "%s %s", kernel.symbol, host::kernel_table().binaries[kernel.binary].target);
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(answer, length, "%s", error.what());
    return 1;
  }
}

host::KernelRequest request(int capability, const char* forced, int is_bf16) {
  return {capability, 132, "a GPU", forced, is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
}

}  // namespace

// Writes "symbol target" of the choice, or the error's text, to `answer`; returns 0 or 1.
extern "C" int choose_product(int capability, const char* forced, int is_bf16, int product, int memory, long long slots,
                              long long experts, long long n, long long k, char* answer, int length) {
  return answer_with(answer, length, [&]() -> const host::Kernel& {
    return moe::select_product({request(capability, forced, is_bf16), static_cast<moe::Product>(product),
                                static_cast<moe::WeightLayout>(memory), slots, experts, n, k});
  });
}
extern "C" int choose_step(int capability, const char* forced, int is_bf16, int step, char* answer, int length) {
  return answer_with(answer, length, [&]() -> const host::Kernel& {
    return moe::select_op(request(capability, forced, is_bf16), static_cast<moe::Op>(step));
  });
}
"""


class RefusedError(Exception):
    """The selector's error text."""


class Selector:
    """(symbol, target) of what is chosen."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def product(
        self,
        capability: int,
        name: str,
        rows: float = 64,
        *,
        memory: str = "nk",
        bf16: bool = False,
        forced: str | None = None,
        experts: int = EXPERTS,
        n: int = SHORT,
        k: int = SHORT,
    ) -> tuple[str, str]:
        numbers = (ctypes.c_longlong(number) for number in (round(rows * experts), experts, n, k))
        sizes = ((*PRODUCTS, *SCALED, *MXFP4, *PACKED, *TRAINED).index(name), MEMORIES.index(memory), *numbers)
        return self._ask(self._library.choose_product, capability, forced, bf16, *sizes)

    def step(self, capability: int, step: int, *, bf16: bool = False, forced: str | None = None) -> tuple[str, str]:
        return self._ask(self._library.choose_step, capability, forced, bf16, step)

    def _ask(
        self, function: Callable[..., int], capability: int, forced: str | None, bf16: bool, *values: object
    ) -> tuple[str, str]:
        answer = ctypes.create_string_buffer(4096)
        name = None if forced is None else forced.encode()
        status = function(capability, name, bf16, *values, answer, len(answer))
        text = answer.value.decode()
        if status != 0:
            raise RefusedError(text)
        symbol, target = text.split()
        return symbol, target


def compile_selector(folder: Path, targets: tuple[str, ...] | None) -> Selector:
    (folder / "harness.cpp").write_text(HARNESS)
    select = ROOT / "csrc" / "moe" / "host" / "select.cpp"
    return Selector(compile_with_table(folder, targets, folder / "harness.cpp", select))


@pytest.fixture(scope="module")
def select(tmp_path_factory: pytest.TempPathFactory) -> Selector:
    """With every target of the table."""
    return compile_selector(tmp_path_factory.mktemp("moe_select"), None)


def loads_best(unit: Unit) -> int:
    """The capability for which no other target is better."""
    major, minor = unit.target.capability
    return BEYOND_THE_TABLE if unit.target.is_ptx else 10 * major + minor


def families(capability: int) -> tuple[str, ...]:
    return CAPABILITIES[min(capability, max(CAPABILITIES))].families


def all_chosen(select: Selector) -> set[tuple[str, str]]:
    """What is chosen over a grid of problems, whether FLASHMOE_KERNEL names the family or not."""
    found = set()
    for capability in (*CAPABILITIES, BEYOND_THE_TABLE):
        for forced, bf16 in product((None, *families(capability)), (False, True)):
            if bf16 and (capability < 80 or forced == "sm75"):
                continue
            for name, memory, rows, (n, k) in product(PRODUCTS, MEMORIES, ROWS, SIZES):
                if memory != "kn_pairs" or name == "grouped_gemm_gated":
                    found.add(select.product(capability, name, rows, memory=memory, bf16=bf16, forced=forced, n=n, k=k))
            for step in range(STEPS):
                found.add(select.step(capability, step, bf16=bf16, forced=forced))
            if bf16 and (capability != 90 or forced is None):  # there sm80 has few rows, and sm90 the rest
                found |= {
                    select.product(capability, name, rows, bf16=True, forced=forced) for name in MXFP4 for rows in ROWS
                }
    for bf16 in (False, True):
        names = [name for name in SCALED if bf16 or "gated" not in name]
        of_tokens = product(names, (ROWS[0], 1 / 16, 1, ROWS[-1]), (256, SHORT, 7168))
        found |= {select.product(90, name, rows, bf16=bf16, k=k) for name, rows, k in of_tokens}
        found |= {select.step(90, step, bf16=bf16) for step in QUANTIZE}
    found |= {select.product(90, name, rows, bf16=True) for name in (*PACKED, *TRAINED) for rows in ROWS}
    found |= {select.product(90, name, 8, bf16=True, experts=32, n=2880) for name in PACKED}
    found |= {select.step(90, step, bf16=True) for step in TRAINING_STEPS}
    return found


def test_packed_weights_have_kernels_on_one_gpu(select: Selector) -> None:
    """Of one family: few rows run on another of its tiles, whichever family is named."""
    for name in PACKED:
        for forced in (None, "sm90"):
            assert select.product(90, name, 8, bf16=True, forced=forced)[0].endswith("_m16")
            assert select.product(90, name, 16, bf16=True, forced=forced)[0].endswith("_m32")
            assert select.product(90, name, 64, bf16=True, forced=forced)[0].endswith("_m128")
            assert select.product(90, name, 256, bf16=True, forced=forced)[0].endswith("_m256")
        for capability in (80, 89, 100, 120):
            with pytest.raises(RefusedError, match="no kernel"):
                select.product(capability, name, bf16=True)


@pytest.mark.parametrize(
    ("experts", "tokens", "gated", "plain"),
    [
        (32, 1, "m32", "m32"),
        (32, 2, "m16_wide", "m32"),
        (32, 4, "m16", "m16"),
        (32, 8, "m16", "m16"),
        (32, 32, "m16_wide", "m16_wide"),
        (32, 64, "m16_wide", "m16_wide"),
        (32, 128, "m32", "m32"),
        (128, 1, "m32", "m32"),
        (128, 2, "m16_wide", "m32"),
        (128, 4, "m16_wide", "m16_wide"),
        (128, 8, "m16", "m16"),
        (128, 32, "m16", "m16"),
        (128, 64, "m16_wide", "m16"),
    ],
)
def test_packed_tiles_of_gpt_oss_are_those_of_the_shorter_waves(
    select: Selector, experts: int, tokens: int, gated: str, plain: str
) -> None:
    """With 132 multiprocessors; four experts per token, 5760 and 2880 columns."""
    for name, n, tile in zip(PACKED, (2880, 5760), (plain, gated), strict=True):
        found = select.product(90, name, 4 * tokens / experts, bf16=True, experts=experts, n=n, k=2880)
        assert found[0].endswith(f"bf16_{tile}"), name


def test_scaled_products_are_refused_where_there_are_none(select: Selector) -> None:
    with pytest.raises(RefusedError, match="no kernel for a GPU"):
        select.product(80, "grouped_gemm_scaled")


def test_every_kernel_is_chosen(select: Selector) -> None:
    """Without being named, or by name. Kernels around the products exist only for the GPUs that have nothing better."""
    asked = all_chosen(select)
    never = [
        f"{entry.symbol} for {unit.target.name} ({unit.row.source})"
        for unit in UNITS
        if not unit.row.operation.startswith("moe_") or unit.row.family == families(loads_best(unit))[0]
        for entry in unit.entries
        if (entry.symbol, unit.target.name) not in asked
    ]
    assert never == [], "drop the row, or change what select.cpp or the row's cost says of it"


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_tiles_grow_with_the_rows_of_an_expert(select: Selector, capability: int) -> None:
    """A tile is used for one range of rows: once left, it does not come back."""
    for name in PRODUCTS:
        chosen = [select.product(capability, name, rows) for rows in ROWS]
        changes = [symbol for index, symbol in enumerate(chosen) if index == 0 or chosen[index - 1] != symbol]
        assert len(changes) == len(set(changes)), name


def test_few_rows_have_kernels_of_their_own(select: Selector) -> None:
    for name in ("grouped_gemm", "grouped_gemm_gated"):
        assert f"_{name}_few_rows_" in select.product(90, name, 1)[0]
        assert f"_{name}_sm90_" in select.product(90, name, 2048)[0]
        assert f"_{name}_sm90_" in select.product(90, name, 1, forced="sm90")[0], "the family holds one kernel"
    for name in SCALED:
        assert f"_{name}_few_rows_" in select.product(90, name, 0.5, bf16=True)[0]
        assert f"_{name}_sm90_" in select.product(90, name, 0.5, bf16=True, forced="sm90")[0]


def test_few_rows_end_where_a_large_tile_is_as_fast(select: Selector) -> None:
    """On an H100, as measured, at four rows per expert, whichever family computes the rest; on other GPUs at forty."""
    for name in ("grouped_gemm", "grouped_gemm_gated"):
        for forced, family in ((None, "sm90"), ("sm80", "sm80")):
            assert select.product(90, name, 4, forced=forced)[0].endswith("_m8_nk")
            assert f"_{name}_{family}_" in select.product(90, name, 4.125, forced=forced)[0]
        for capability in (80, 86, 89, 100, 120, BEYOND_THE_TABLE):
            assert "_few_rows_" in select.product(capability, name, 40)[0]
            assert f"_{name}_sm80_" in select.product(capability, name, 41)[0]


def test_few_long_rows_have_a_deeper_tile(select: Selector) -> None:
    for name in ("grouped_gemm", "grouped_gemm_gated"):
        assert select.product(90, name, 4, k=LONG)[0].endswith("_m8_deep_nk")
        assert select.product(90, name, 4, k=SHORT)[0].endswith("_m8_nk")
        assert f"_{name}_sm90_" in select.product(90, name, 4.125, k=LONG)[0]


def test_columns_that_a_tile_does_not_divide_have_one_that_does(select: Selector) -> None:
    """gpt-oss: 2880 columns are 15 tiles of 192, or 12 of 256, one of which is a quarter full."""
    for rows, n, k, tile in (
        (1024, 2880, 2880, "_n192_nk"),
        (1023, 2880, 2880, "_bf16_nk"),
        (1024, 2048, 768, "_bf16_nk"),
        (1024, 4096, 2880, "_bf16_nk"),
    ):
        assert select.product(90, "grouped_gemm", rows, bf16=True, n=n, k=k)[0].endswith(tile)
    for n, k, tile in ((2880, 2880, "_n192"), (5760, 2880, "_n192"), (2048, 768, "_bf16"), (14336, 4096, "_bf16")):
        for rows in (64, 4096):
            assert select.product(90, "grouped_gemm_weight_gradient", rows, bf16=True, n=n, k=k)[0].endswith(tile)


def test_rows_count_by_the_experts_of_the_layer(select: Selector) -> None:
    assert select.product(90, "grouped_gemm", 4, experts=8) == select.product(90, "grouped_gemm", 4, experts=128)


def test_refusals(select: Selector) -> None:
    with pytest.raises(
        RefusedError, match=r"flashmoe:dtype: BF16 needs compute capability 8.0; this is 7.5; use float16"
    ):
        select.product(75, "grouped_gemm", bf16=True)
    with pytest.raises(
        RefusedError, match=r"flashmoe:argument: FLASHMOE_KERNEL=sm91 is not a kernel family of this build"
    ):
        select.product(90, "grouped_gemm", forced="sm91")
    with pytest.raises(
        RefusedError, match=r"flashmoe:argument: FLASHMOE_KERNEL=sm90: .* a gated grouped matrix product on a GPU"
    ):
        select.product(80, "grouped_gemm_gated", forced="sm90")
    with pytest.raises(RefusedError, match=r"flashmoe:gpu: no kernel for a GPU"):
        select.product(70, "grouped_gemm")


def test_a_build_without_gpu_code_refuses(tmp_path: Path) -> None:
    selector = compile_selector(tmp_path, ())
    for ask in (lambda: selector.product(90, "grouped_gemm"), lambda: selector.step(90, 0)):
        with pytest.raises(RefusedError, match=r"flashmoe:gpu: .*\(a CPU-only build\)"):
            ask()


def test_one_target_serves_every_problem(tmp_path: Path) -> None:
    """The targets of FLASHMOE_ARCHS=90a."""
    selector = compile_selector(tmp_path, ("sm_90a",))
    for name, memory, rows, bf16 in product(PRODUCTS, MEMORIES[:2], ROWS, (False, True)):
        assert selector.product(90, name, rows, memory=memory, bf16=bf16)[1] == "sm_90a"
    for step, bf16 in product(range(STEPS), (False, True)):
        assert selector.step(90, step, bf16=bf16)[1] == "sm_90a"
