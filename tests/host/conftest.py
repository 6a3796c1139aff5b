"""The kernel selector, compiled by itself with the real table, so that its choices for every GPU are tested without one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from flashmoe_build.compile.codegen import PlacedBinary, kernel_table_source  # noqa: E402
from flashmoe_build.compile.toolchain import find_toolchain  # noqa: E402
from flashmoe_tools.tables import load_tables  # noqa: E402

HARNESS = """
#include <cstdio>
#include <cstring>
#include <exception>

#include "attention/host/select.h"

extern "C" const unsigned char flashmoe_binaries[1] = {0};
extern "C" const char flashmoe_index[1] = {0};

using namespace flashmoe;

// Writes "symbol target splits" of the choice, or the error's text, to `answer`; returns 0 or 1.
extern "C" int choose(int capability, int multiprocessors, const char* forced, int is_bf16, int is_causal, int head_dim,
                      const long long* sizes, char* answer, int length) {
  const host::KernelRequest request{capability, multiprocessors, "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  const attention::SelectorInput input{request, is_causal ? attention::Mask::kCausal : attention::Mask::kFull, head_dim,
                                       sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], /*has_window=*/false,
                                       sizes[5] != 0};
  try {
    const attention::Choice choice = attention::select_forward(input);
    std::snprintf(answer, length, "%s %s %d", choice.forward->symbol,
                  host::kernel_table().binaries[choice.forward->binary].target, choice.num_splits);
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(answer, length, "%s", error.what());
    return 1;
  }
}

// Whether the same problem, which a kernel serves, is left to the ragged kernels; sizes as above.
extern "C" int prefers_folded(int capability, int multiprocessors, const char* forced, int is_bf16, int is_causal, int head_dim,
                              const long long* sizes) {
  const host::KernelRequest request{capability, multiprocessors, "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  const attention::SelectorInput input{request, is_causal ? attention::Mask::kCausal : attention::Mask::kFull, head_dim,
                                       sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], /*has_window=*/false,
                                       sizes[5] != 0};
  return attention::prefers_folded_rows(input, attention::select_forward(input)) ? 1 : 0;
}

// Writes "symbol target" of the kernel for ragged, paged and banded attention, or the error's text; returns 0 or 1; where it divides keys, those of
// the kernel that adds up, and the number of splits, too. sizes: rows
// and keys of the longest sequence, heads, batch, rows_total, whether the call is consistent, whether it has slopes of ALiBi, head_dim_v, key heads,
// rows of a key head, whether num_splits is 1.
extern "C" int choose_varlen(int capability, const char* forced, int is_bf16, int head_dim, int page_size,
                             const long long* sizes, int has_score_functions, char* answer, int length) {
  const host::KernelRequest request{capability, 132, "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  try {
    const attention::VarlenSelectorInput input{request, head_dim, static_cast<int>(sizes[7]), page_size, sizes[0], sizes[1],
        sizes[2], sizes[3], sizes[4], has_score_functions != 0, sizes[6] != 0, sizes[5] != 0, sizes[8], sizes[9],
        sizes[10] != 0};
    const host::Kernel* kernel = attention::select_varlen_forward(input);
    const attention::Division division = attention::divide_keys(input, *kernel);
    const auto target = [](const host::Kernel* of) { return host::kernel_table().binaries[of->binary].target; };
    const int used = std::snprintf(answer, length, "%s %s", kernel->symbol, target(kernel));
    if (division.combine != nullptr) {
      std::snprintf(answer + used, length - used, " %s %s %d", division.combine->symbol, target(division.combine),
                    division.num_splits);
    }
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(answer, length, "%s", error.what());
    return 1;
  }
}

// Writes "symbol splits second-kernel" of a kernel for chunks in place of the ragged batch's own one, or nothing. sizes: rows and keys of the longest
// sequence, key heads, query heads of each, batch, rows_total, page size, num_splits, multiprocessors, keys that a row sees.
extern "C" void choose_chunk(int capability, const char* forced, int is_bf16, int head_dim, int head_dim_v, const long long* sizes,
                             int has_score_functions, int is_consistent, char* answer, int length) {
  const host::KernelRequest request{capability, static_cast<int>(sizes[8]), "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  const long long group = sizes[3];
  attention::VarlenSelectorInput input{
      request, head_dim, head_dim_v, static_cast<int>(sizes[6]), sizes[0], sizes[1], sizes[2] * group, sizes[4], sizes[5],
      has_score_functions != 0, /*has_alibi=*/false, is_consistent != 0, sizes[2], sizes[0] * group, sizes[7] == 1};
  input.heads_q = sizes[2] * group;
  input.longest_rows = sizes[0];
  input.num_splits = sizes[7];
  input.seen_keys = sizes[9];
  input.is_causal = true;
  answer[0] = 0;
  try {
    const attention::Choice found = attention::select_chunk(input, *attention::select_varlen_forward(input));
    if (found.forward == nullptr) return;
    std::snprintf(answer, length, "%s %d %s", found.forward->symbol, found.num_splits,
                  found.combine == nullptr ? "" : found.combine->symbol);
  } catch (const std::exception&) {  // nothing serves the call: choose_varlen says why
  }
}

// Writes the symbols of the two kernels that decode with the bits of a prefill, or nothing; sizes as above, and multiprocessors.
extern "C" void choose_ordered(int capability, const char* forced, int is_bf16, int head_dim, const long long* sizes,
                               int has_score_functions, char* answer, int length) {
  const host::KernelRequest request{capability, static_cast<int>(sizes[8]), "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  const attention::OrderedDecoding found = attention::select_ordered_decoding(
      {request, head_dim, static_cast<int>(sizes[7]), 0, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
       has_score_functions != 0, sizes[6] != 0, sizes[5] != 0, sizes[2], sizes[0]});
  answer[0] = 0;
  if (found.values != nullptr) std::snprintf(answer, length, "%s %s", found.scores->symbol, found.values->symbol);
}

// Writes the symbols of the append kernel, of row_dot's, of the backward kernels for ragged and banded attention, of dropout's, of a
// mask's gradient and of e4m3, each before its target.
extern "C" void choose_more(int capability, const char* forced, int is_bf16, int head_dim, int head_dim_v, char* answer,
                            int length) {
  const host::KernelRequest request{capability, 132, "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  int used = 0;
  const auto add = [&](const host::Kernel& kernel) {
    const char* target = host::kernel_table().binaries[kernel.binary].target;
    used += std::snprintf(answer + used, length - used, " %s %s", kernel.symbol, target);
  };
  answer[0] = 0;
  try {
    add(attention::select_append(request));
    add(attention::select_row_dot(request));
    for (const int options : {0, 1, 2}) {  // none, a softcap or mask tensor, ALiBi
      const attention::BackwardKernels both =
          attention::select_varlen_backward(request, head_dim, head_dim_v, options == 1, options == 2);
      for (const host::Kernel* kernel : {both.dq, both.dkv, both.fused, both.prepare, both.convert}) {
        if (kernel == nullptr || (both.fused == nullptr && kernel != both.dq && kernel != both.dkv)) continue;
        add(*kernel);
      }
    }
    add(attention::select_e4m3_append(request));
    add(attention::select_dequantize(request));
    add(attention::select_e4m3(request, head_dim));  // which Turing has not
  } catch (const std::exception&) {  // what there is stands in the answer
  }
  try {
    enum { kPlain, kScoreMod, kAlibi };
    for (const int scores : {kPlain, kScoreMod, kAlibi}) {
      const bool has_score_mod = scores == kScoreMod, has_alibi = scores == kAlibi;
      add(attention::select_dropout_forward(request, head_dim, has_score_mod, has_alibi));
    }
    for (const int scores : {kPlain, kScoreMod, kAlibi}) {
      const bool has_score_mod = scores == kScoreMod, has_alibi = scores == kAlibi;
      const attention::BackwardKernels all =
          attention::select_dropout_backward(request, head_dim, has_score_mod, has_alibi);
      const host::Kernel& bias = attention::select_bias_gradient(request, head_dim, /*has_dropout=*/has_alibi, /*folds=*/has_score_mod);
      for (const host::Kernel* kernel : {all.dq, all.dkv, all.fused, &bias}) {
        if (kernel == nullptr) continue;
        add(*kernel);
      }
    }
  } catch (const std::exception&) {
  }
  try {
    for (const int which : {0, 1, 2, 3}) {
      const attention::Mask mask = which % 2 == 0 ? attention::Mask::kFull : attention::Mask::kCausal;
      const attention::Fp8Kernels fp8 = attention::select_fp8(request, mask, head_dim, /*has_block_scales=*/which >= 2);
      add(*fp8.forward);
      add(*fp8.transpose);
    }
    add(*attention::select_fp8_varlen(request, head_dim).forward);
  } catch (const std::exception&) {
  }
}

// What a choice, by its place in the test's list, says where nothing serves it. flags: ALiBi (1), consistent, or a mask of one row (2).
extern "C" void refusal(int which, const char* forced, int head_dim, int page_size, int flags, char* answer, int length) {
  const host::KernelRequest request{80, 132, "a GPU", forced, host::Dtype::kFloat16};
  const bool has_alibi = (flags & 1) != 0, is_consistent = (flags & 2) != 0;
  const attention::VarlenSelectorInput varlen{request, head_dim, head_dim, page_size, 64, 4096, 8, 4, 0, false, has_alibi, is_consistent};
  const attention::SelectorInput dense{request, attention::Mask::kFull, head_dim, 4, 8, 8, 64, 64, false, is_consistent};
  answer[0] = 0;
  try {
    switch (which) {
      case 0: attention::select_forward(dense); break;
      case 1: attention::select_varlen_forward(varlen); break;
      case 2: attention::select_varlen_backward(request, head_dim, head_dim, false, false); break;
      case 3: attention::select_bias_gradient(request, head_dim, false, /*folds=*/is_consistent); break;
      case 4: attention::select_e4m3(request, head_dim); break;
      case 5: attention::select_fp8(request, attention::Mask::kFull, head_dim, false); break;
      case 6: attention::select_dropout_forward(request, head_dim, false, false); break;
      case 7: attention::select_dropout_forward(request, head_dim, true, false); break;
      case 8: attention::select_dropout_backward(request, head_dim, false, false); break;
      case 9: attention::select_row_dot(request); break;
      case 10: attention::select_append(request); break;
      default: attention::select_e4m3_append(request);
    }
  } catch (const std::exception& error) {
    std::snprintf(answer, length, "%s", error.what());
  }
}

// Whether a GPU of 132 multiprocessors runs the fused backward kernel; -1 where that is refused. sizes: batch, heads_kv, seq_q, seq_k.
extern "C" int prefers_fused(int capability, int head_dim, int is_causal, const long long* sizes) {
  const attention::Mask mask = is_causal ? attention::Mask::kCausal : attention::Mask::kFull;
  const host::KernelRequest request{capability, 132, "a GPU", nullptr, host::Dtype::kBFloat16};
  try {
    return attention::prefers_fused(
        attention::select_backward(request, mask, head_dim),
        {request, mask, head_dim, sizes[0], sizes[1], sizes[1], sizes[2], sizes[3]});
  } catch (const std::exception&) {
    return -1;
  }
}

// The same of a ragged batch. sizes: heads_kv, longest_q, longest_k, rows_total, keys_total, visible_keys.
extern "C" int prefers_varlen_fused(int head_dim, int is_causal, int has_score_mod, const long long* sizes) {
  const attention::Mask mask = is_causal ? attention::Mask::kCausal : attention::Mask::kFull;
  const host::KernelRequest request{90, 132, "a GPU", nullptr, host::Dtype::kBFloat16};
  const attention::SelectorInput longest{request, mask, head_dim, 1, sizes[0], sizes[0], sizes[1], sizes[2]};
  return attention::prefers_fused(attention::select_varlen_backward(request, head_dim, head_dim, has_score_mod != 0, /*has_alibi=*/false),
                                  attention::as_equal_sequences(longest, sizes[3], sizes[4], sizes[5]));
}

// Writes the symbols of the backward kernels and their target, or nothing, to `answer`.
extern "C" void choose_backward(int capability, const char* forced, int is_bf16, int is_causal, int head_dim,
                                char* answer, int length) {
  const host::KernelRequest request{capability, 132, "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  const attention::BackwardKernels kernels = attention::select_backward(
      request, is_causal ? attention::Mask::kCausal : attention::Mask::kFull, head_dim);
  answer[0] = 0;
  if (kernels.dq == nullptr) return;
  const bool has_fused = kernels.fused != nullptr;
  std::snprintf(answer, length, "%s %s %s %s %s %s", kernels.dq->symbol, kernels.dkv->symbol,
                has_fused ? kernels.fused->symbol : "", has_fused ? kernels.prepare->symbol : "",
                has_fused ? kernels.convert->symbol : "", host::kernel_table().binaries[kernels.dq->binary].target);
}
"""


@dataclass(frozen=True)
class Choice:
    symbol: str
    target: str
    splits: int


class RefusedError(Exception):
    """The selector's error, by its text."""


Chooser = Callable[..., Choice]


def prefers_folded(
    loaded: ctypes.CDLL,
    capability: int,
    *,
    rows: int,
    keys: int,
    head_dim: int = 128,
    batch: int = 1,
    heads_kv: int = 8,
    group: int = 4,
    forced: str | None = None,
    multiprocessors: int = 132,
    consistent: bool = False,
    causal: bool = True,
) -> bool:
    sizes = (ctypes.c_longlong * 6)(batch, heads_kv * group, heads_kv, rows, keys, consistent)
    name = forced.encode() if forced is not None else None
    return bool(loaded.prefers_folded(capability, multiprocessors, name, True, causal, head_dim, sizes))


def _refusal(
    loaded: ctypes.CDLL, which: int, head_dim: int = 64, page_size: int = 0, flags: int = 0, forced: str | None = None
) -> str:
    answer = ctypes.create_string_buffer(4096)
    name = forced.encode() if forced is not None else None
    loaded.refusal(which, name, head_dim, page_size, flags, answer, len(answer))
    return answer.value.decode()


def compile_chooser(folder: Path, targets: tuple[str, ...] | None) -> Chooser:
    tables = load_tables()
    placed = [PlacedBinary(unit, 0, 0, "") for unit in tables.units(targets)]
    (folder / "table.cpp").write_text(kernel_table_source(tables, placed))
    (folder / "harness.cpp").write_text(HARNESS)
    library = folder / "select.so"
    sources = [
        str(folder / "table.cpp"),
        str(folder / "harness.cpp"),
        *map(str, sorted((ROOT / "csrc" / "attention" / "host").glob("select*.cpp"))),
        str(ROOT / "csrc" / "host" / "find_kernels.cpp"),
    ]
    flags = [
        "-std=c++17",
        "-O0",
        "-shared",
        "-fPIC",
        "-Wl,--exclude-libs,ALL",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{ROOT / 'csrc'}",
    ]
    subprocess.run([find_toolchain().cxx, *flags, *sources, "-o", str(library)], check=True, timeout=120)
    loaded = ctypes.CDLL(str(library))
    function = loaded.choose

    def choose(
        capability: int,
        *,
        head_dim: int = 128,
        batch: int = 4,
        heads: int = 32,
        kv_heads: int | None = None,
        seq_q: int = 4096,
        seq_k: int = 4096,
        causal: bool = False,
        bf16: bool = False,
        forced: str | None = None,
        multiprocessors: int = 132,
        consistent: bool = False,
    ) -> Choice:
        sizes = (ctypes.c_longlong * 6)(batch, heads, kv_heads or heads, seq_q, seq_k, consistent)
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        status = function(capability, multiprocessors, name, bf16, causal, head_dim, sizes, answer, len(answer))
        text = answer.value.decode()
        if status != 0:
            raise RefusedError(text)
        symbol, target, splits = text.split()
        return Choice(symbol, target, int(splits))

    def choose_backward(
        capability: int, head_dim: int, *, causal: bool = False, bf16: bool = False, forced: str | None = None
    ) -> tuple[str, ...]:
        """Symbols of dq's and dkv's kernels, of the fused one and its two helpers where there are some, and their target; empty where
        there are none."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        loaded.choose_backward(capability, name, bf16, causal, head_dim, answer, len(answer))
        return tuple(answer.value.decode().split())

    def choose_more(
        capability: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        bf16: bool = False,
        forced: str | None = None,
    ) -> set[tuple[str, str]]:
        """(symbol, target) of the append kernel, of row_dot's, of the backward kernels for ragged and banded attention, of dropout's, and of a mask's
        gradient."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        loaded.choose_more(capability, name, bf16, head_dim, head_dim_v or head_dim, answer, len(answer))
        words = answer.value.decode().split()
        return set(zip(words[::2], words[1::2], strict=True))

    def choose_varlen(
        capability: int,
        head_dim: int,
        *,
        rows: int,
        keys: int = 4096,
        heads: int = 32,
        batch: int = 64,
        rows_total: int = 0,
        page_size: int = 0,
        has_score_functions: bool = False,
        bf16: bool = False,
        forced: str | None = None,
        consistent: bool = False,
        alibi: bool = False,
        head_dim_v: int | None = None,
        heads_kv: int = 1,
        group: int = 1,
        batch_invariant: bool = False,
    ) -> tuple[str, ...]:
        """Symbol and target, where keys are divided also those of the kernel that adds up and the number of splits; empty where none serves.
        group: the query heads of a key head."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        lengths = (rows, keys, heads, batch, rows_total, consistent, alibi, head_dim_v or head_dim)
        lengths += (heads_kv, rows * group, batch_invariant)
        sizes = (ctypes.c_longlong * len(lengths))(*lengths)
        status = loaded.choose_varlen(
            capability, name, bf16, head_dim, page_size, sizes, has_score_functions, answer, len(answer)
        )
        return tuple(answer.value.decode().split()) if status == 0 else ()

    def choose_ordered(
        capability: int,
        head_dim: int,
        *,
        rows: int = 4,
        keys: int = 4096,
        heads: int = 8,
        batch: int = 1,
        has_score_functions: bool = False,
        bf16: bool = True,
        forced: str | None = None,
        consistent: bool = True,
        alibi: bool = False,
        head_dim_v: int | None = None,
        multiprocessors: int = 132,
    ) -> tuple[str, ...]:
        """Symbols of the two kernels; empty where another one serves."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        lengths = (rows, keys, heads, batch, 0, consistent, alibi, head_dim_v or head_dim, multiprocessors)
        sizes = (ctypes.c_longlong * len(lengths))(*lengths)
        loaded.choose_ordered(capability, name, bf16, head_dim, sizes, has_score_functions, answer, len(answer))
        return tuple(answer.value.decode().split())

    def choose_chunk(
        capability: int,
        head_dim: int,
        *,
        rows: int,
        keys: int,
        heads_kv: int = 8,
        group: int = 4,
        batch: int = 1,
        rows_total: int = 0,
        page_size: int = 0,
        num_splits: int = 0,
        multiprocessors: int = 132,
        seen: int | None = None,
        has_score_functions: bool = False,
        bf16: bool = True,
        forced: str | None = None,
        consistent: bool = False,
        head_dim_v: int | None = None,
    ) -> tuple[str, int]:
        """Symbol and shares of the keys; none of either where the ragged kernel stays, or the decoding one."""
        answer = ctypes.create_string_buffer(4096)
        name = forced.encode() if forced is not None else None
        lengths = (rows, keys, heads_kv, group, batch, rows_total, page_size, num_splits, multiprocessors, seen or keys)
        sizes = (ctypes.c_longlong * len(lengths))(*lengths)
        given = (bf16, head_dim, head_dim_v or head_dim, sizes, has_score_functions, consistent)
        loaded.choose_chunk(capability, name, *given, answer, len(answer))
        words = answer.value.decode().split()
        if not words:
            return "", 0
        assert (len(words) == 3) == (int(words[1]) > 1)  # shares have a second kernel
        return words[0], int(words[1])

    def prefers_fused(capability: int, head_dim: int, causal: bool, *sizes: int) -> bool:
        """sizes: batch, key heads, rows, keys."""
        found = loaded.prefers_fused(capability, head_dim, causal, (ctypes.c_longlong * 4)(*sizes))
        if found < 0:
            raise RuntimeError("refused")
        return bool(found)

    def prefers_varlen_fused(
        head_dim: int,
        heads: int,
        longest: int,
        total: int,
        *,
        causal: bool = True,
        bends: bool = False,
        window: int = 1 << 31,
    ) -> bool:
        """Of a ragged batch whose rows are its keys."""
        sizes = (ctypes.c_longlong * 6)(heads, longest, longest, total, total, window)
        return bool(loaded.prefers_varlen_fused(head_dim, causal, bends, sizes))

    choose.refusal = partial(_refusal, loaded)  # type: ignore[attr-defined]
    choose.ordered = choose_ordered  # type: ignore[attr-defined]
    choose.chunk = choose_chunk  # type: ignore[attr-defined]
    choose.folds = partial(prefers_folded, loaded)  # type: ignore[attr-defined]
    choose.fused = prefers_fused  # type: ignore[attr-defined]
    choose.varlen_fused = prefers_varlen_fused  # type: ignore[attr-defined]
    choose.backward = choose_backward  # type: ignore[attr-defined]
    choose.varlen = choose_varlen  # type: ignore[attr-defined]
    choose.more = choose_more  # type: ignore[attr-defined]
    return choose


@pytest.fixture(scope="session")
def choose(tmp_path_factory: pytest.TempPathFactory) -> Chooser:
    """With every target of the table."""
    return compile_chooser(tmp_path_factory.mktemp("select"), None)


@pytest.fixture(scope="session")
def choose_of_hopper_build(tmp_path_factory: pytest.TempPathFactory) -> Chooser:
    """With the targets of FLASHMOE_ARCHS=90a."""
    return compile_chooser(tmp_path_factory.mktemp("select90"), ("sm_90a",))


@pytest.fixture(scope="session")
def choose_of_cpu_build(tmp_path_factory: pytest.TempPathFactory) -> Chooser:
    """With FLASHMOE_ARCHS=none."""
    return compile_chooser(tmp_path_factory.mktemp("select0"), ())
