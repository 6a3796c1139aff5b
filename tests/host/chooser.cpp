// C functions through which the tests call the kernel selector, by ctypes.

#include <cstdio>
#include <cstring>
#include <exception>

#include "attention/host/select.h"

extern "C" const unsigned char flashmoe_binaries[1] = {0};
extern "C" const char flashmoe_index[1] = {0};

using namespace flashmoe;

static attention::SelectorInput dense_input(int capability, int multiprocessors, const char* forced, int is_bf16,
                                            int is_causal, int head_dim, const long long* sizes) {
  const host::KernelRequest request{capability, multiprocessors, "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  return {request,
          is_causal ? attention::Mask::kCausal : attention::Mask::kFull,
          head_dim,
          sizes[0],
          sizes[1],
          sizes[2],
          sizes[3],
          sizes[4],
          /*has_window=*/false,
          sizes[5] != 0};
}

// Writes "symbol target splits" of the choice, or the error's text, to `answer`; returns 0 or 1.
extern "C" int choose(int capability, int multiprocessors, const char* forced, int is_bf16, int is_causal, int head_dim,
                      const long long* sizes, char* answer, int length) {
  const attention::SelectorInput input =
      dense_input(capability, multiprocessors, forced, is_bf16, is_causal, head_dim, sizes);
  try {
    const attention::KernelPlan plan = attention::select_forward(input);
    std::snprintf(answer, length, "%s %s %d", plan.forward->symbol,
                  host::kernel_table().binaries[plan.forward->binary].target, plan.num_splits);
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(answer, length, "%s", error.what());
    return 1;
  }
}

// Whether the same problem, which a dense kernel can run, is left to the ragged kernels; sizes as above.
extern "C" int prefers_folded(int capability, int multiprocessors, const char* forced, int is_bf16, int is_causal,
                              int head_dim, const long long* sizes) {
  const attention::SelectorInput input =
      dense_input(capability, multiprocessors, forced, is_bf16, is_causal, head_dim, sizes);
  return attention::prefers_folded_rows(input, attention::select_forward(input)) ? 1 : 0;
}

// Writes "symbol target" of the kernel for ragged, paged and windowed attention, or the error's text; returns 0 or 1.
// If it divides keys, also those of the combine kernel and the number of splits. sizes: rows and keys of the longest
// sequence, heads, batch, rows_total, whether the call is consistent, whether it has ALiBi slopes, head_dim_v, key
// heads, rows per key head, whether num_splits is 1.
extern "C" int choose_varlen(int capability, const char* forced, int is_bf16, int head_dim, int page_size,
                             const long long* sizes, int has_score_functions, char* answer, int length) {
  const host::KernelRequest request{capability, 132, "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  try {
    const attention::VarlenSelectorInput input{
        request,       head_dim, static_cast<int>(sizes[7]), page_size,     sizes[0],      sizes[1], sizes[2],
        sizes[3],      sizes[4], has_score_functions != 0,   sizes[6] != 0, sizes[5] != 0, sizes[8], sizes[9],
        sizes[10] != 0};
    const host::Kernel* kernel = attention::select_varlen_forward(input);
    const attention::SplitPlan split_plan = attention::plan_split(input, *kernel);
    const auto target = [](const host::Kernel* of) { return host::kernel_table().binaries[of->binary].target; };
    const int used = std::snprintf(answer, length, "%s %s", kernel->symbol, target(kernel));
    if (split_plan.combine != nullptr) {
      std::snprintf(answer + used, length - used, " %s %s %d", split_plan.combine->symbol, target(split_plan.combine),
                    split_plan.num_splits);
    }
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(answer, length, "%s", error.what());
    return 1;
  }
}

// Writes "symbol splits second-kernel" of a chunk kernel that replaces the ragged batch's kernel, or nothing. sizes:
// rows and keys of the longest sequence, key heads, query heads per key head, batch, rows_total, page size, num_splits,
// multiprocessors, keys that a row sees, whether it is causal.
extern "C" void choose_chunk(int capability, const char* forced, int is_bf16, int head_dim, int head_dim_v,
                             const long long* sizes, int has_score_functions, int is_consistent, char* answer,
                             int length) {
  const host::KernelRequest request{capability, static_cast<int>(sizes[8]), "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  const long long group = sizes[3];
  attention::VarlenSelectorInput input{request,
                                       head_dim,
                                       head_dim_v,
                                       static_cast<int>(sizes[6]),
                                       sizes[0],
                                       sizes[1],
                                       sizes[2] * group,
                                       sizes[4],
                                       sizes[5],
                                       has_score_functions != 0,
                                       /*has_alibi=*/false,
                                       is_consistent != 0,
                                       sizes[2],
                                       sizes[0] * group,
                                       sizes[7] == 1};
  input.heads_q = sizes[2] * group;
  input.longest_rows = sizes[0];
  input.num_splits = sizes[7];
  input.seen_keys = sizes[9];
  input.is_causal = sizes[10] != 0;
  answer[0] = 0;
  try {
    const attention::KernelPlan found = attention::select_chunk(input, *attention::select_varlen_forward(input));
    if (found.forward == nullptr) return;
    std::snprintf(answer, length, "%s %d %s", found.forward->symbol, found.num_splits,
                  found.combine == nullptr ? "" : found.combine->symbol);
  } catch (const std::exception&) {  // no kernel can run the call: choose_varlen says why
  }
}

// Writes the symbols of the two kernels that decode with the bits of a prefill, or nothing; sizes as for choose_varlen
// up to head_dim_v, then multiprocessors.
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

// Writes the symbols of the kernels for append, row_dot, the backward of ragged and windowed attention, dropout, a
// mask's gradient and e4m3, each before its target.
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
    add(attention::select_first(request, "attention_merge", "merging"));
    add(attention::select_row_dot(request));
    for (const int options : {0, 1, 2, 3}) {  // none, a softcap or mask tensor, ALiBi, a mask tensor that is streamed
      const attention::BackwardKernels both = attention::select_varlen_backward(
          request, head_dim, head_dim_v, options % 2 == 1, options == 2, options == 3);
      for (const host::Kernel* kernel : {both.dq, both.dkv, both.fused, both.prepare, both.convert}) {
        if (kernel == nullptr || (both.fused == nullptr && kernel != both.dq && kernel != both.dkv)) continue;
        add(*kernel);
      }
      if (options != 3 || both.fused == nullptr) continue;
      add(attention::select_storing(request, *both.fused));
      add(attention::select_scores_sum(request));
      add(attention::select_bool_mask(request));
      add(attention::select_bool_mask_tiles(request));
    }
    for (const int rows : {576, 4096}) {
      const attention::VarlenSelectorInput masked{request, head_dim, head_dim_v, 0, rows, 4096, 32, 8, 0, true};
      const host::Kernel* streaming = attention::find_mask_forward(masked, *attention::select_varlen_forward(masked));
      if (streaming != nullptr) add(*streaming);
    }
    add(attention::select_e4m3_append(request));
    add(attention::select_dequantize(request));
    add(attention::select_e4m3(request, head_dim));  // Turing has none
  } catch (const std::exception&) {                  // the answer holds what was found before
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
      const host::Kernel& bias =
          attention::select_bias_gradient(request, head_dim, /*has_dropout=*/has_alibi, /*folds=*/has_score_mod);
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
  for (const host::Kernel* kernel : host::loadable_kernels(request.capability)) {
    if (std::strcmp(kernel->operation, "attention_chunk_forward") != 0 || kernel->dtype != request.dtype) continue;
    const attention::KernelPlan coded = attention::select_coded_chunk(request, {kernel, nullptr, 1});
    if (coded.forward != nullptr) add(*coded.forward);
  }
}

// Writes the symbol of the kernel that streams a mask, or nothing. sizes: rows, keys, heads, batch, multiprocessors.
extern "C" void choose_mask_forward(int capability, const char* forced, int is_bf16, int head_dim,
                                    const long long* sizes, char* answer, int length) {
  const host::KernelRequest request{capability, static_cast<int>(sizes[4]), "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  const attention::VarlenSelectorInput masked{request,  head_dim, head_dim, 0, sizes[0],
                                              sizes[1], sizes[2], sizes[3], 0, true};
  answer[0] = 0;
  try {
    const host::Kernel* found = attention::find_mask_forward(masked, *attention::select_varlen_forward(masked));
    if (found != nullptr) std::snprintf(answer, length, "%s", found->symbol);
  } catch (const std::exception&) {  // a family that this GPU or dtype lacks
  }
}

// The error of a selector, by its index in the test's list, if no kernel fits. flags: ALiBi (1), consistent, or a mask
// of one row (2), softcap (4).
extern "C" void refusal(int which, const char* forced, int head_dim, int page_size, int flags, char* answer,
                        int length) {
  const bool has_alibi = (flags & 1) != 0, is_consistent = (flags & 2) != 0, has_softcap = (flags & 4) != 0;
  const host::KernelRequest request{has_softcap ? 90 : 80, 132, "a GPU", forced, host::Dtype::kFloat16};
  const attention::VarlenSelectorInput varlen{request, head_dim, head_dim, page_size,   64,        4096,
                                              8,       4,        0,        has_softcap, has_alibi, is_consistent};
  const attention::SelectorInput dense{request, attention::Mask::kFull, head_dim, 4, 8, 8, 64, 64,
                                       false,   is_consistent};
  answer[0] = 0;
  try {
    switch (which) {
      case 0:
        attention::select_forward(dense);
        break;
      case 1:
        attention::select_varlen_forward(varlen);
        break;
      case 2:
        attention::select_varlen_backward(request, head_dim, head_dim, false, false);
        break;
      case 3:
        attention::select_bias_gradient(request, head_dim, false, /*folds=*/is_consistent);
        break;
      case 4:
        attention::select_e4m3(request, head_dim);
        break;
      case 5:
        attention::select_fp8(request, attention::Mask::kFull, head_dim, false);
        break;
      case 6:
        attention::select_dropout_forward(request, head_dim, false, false);
        break;
      case 7:
        attention::select_dropout_forward(request, head_dim, true, false);
        break;
      case 8:
        attention::select_dropout_backward(request, head_dim, false, false);
        break;
      case 9:
        attention::select_row_dot(request);
        break;
      case 10:
        attention::select_append(request);
        break;
      default:
        attention::select_e4m3_append(request);
    }
  } catch (const std::exception& error) {
    std::snprintf(answer, length, "%s", error.what());
  }
}

// Whether a GPU with 132 multiprocessors runs the fused backward kernel; -1 if that is refused. sizes: batch, heads_kv,
// seq_q, seq_k, query heads per key head.
extern "C" int prefers_fused(int capability, int head_dim, int is_causal, const long long* sizes) {
  const attention::Mask mask = is_causal ? attention::Mask::kCausal : attention::Mask::kFull;
  const host::KernelRequest request{capability, 132, "a GPU", nullptr, host::Dtype::kBFloat16};
  try {
    return attention::prefers_fused(
        attention::select_backward(request, mask, head_dim),
        {request, mask, head_dim, sizes[0], sizes[1] * sizes[4], sizes[1], sizes[2], sizes[3]});
  } catch (const std::exception&) {
    return -1;
  }
}

// The same for a ragged batch. sizes: heads_kv, longest_q, longest_k, rows_total, keys_total, visible_keys.
extern "C" int prefers_varlen_fused(int head_dim, int is_causal, int has_score_mod, const long long* sizes) {
  const attention::Mask mask = is_causal ? attention::Mask::kCausal : attention::Mask::kFull;
  const host::KernelRequest request{90, 132, "a GPU", nullptr, host::Dtype::kBFloat16};
  const attention::SelectorInput longest{request, mask, head_dim, 1, sizes[0], sizes[0], sizes[1], sizes[2]};
  return attention::prefers_fused(
      attention::select_varlen_backward(request, head_dim, head_dim, has_score_mod != 0, /*has_alibi=*/false),
      attention::as_equal_sequences(longest, sizes[3], sizes[4], sizes[5]));
}

// Writes the symbols of the backward kernels and their target, or nothing, to `answer`.
extern "C" void choose_backward(int capability, const char* forced, int is_bf16, int is_causal, int head_dim,
                                char* answer, int length) {
  const host::KernelRequest request{capability, 132, "a GPU", forced,
                                    is_bf16 ? host::Dtype::kBFloat16 : host::Dtype::kFloat16};
  const attention::BackwardKernels kernels =
      attention::select_backward(request, is_causal ? attention::Mask::kCausal : attention::Mask::kFull, head_dim);
  answer[0] = 0;
  if (kernels.dq == nullptr) return;
  const bool has_fused = kernels.fused != nullptr;
  std::snprintf(answer, length, "%s %s %s %s %s %s", kernels.dq->symbol, kernels.dkv->symbol,
                has_fused ? kernels.fused->symbol : "", has_fused ? kernels.prepare->symbol : "",
                has_fused ? kernels.convert->symbol : "", host::kernel_table().binaries[kernels.dq->binary].target);
}
