// From the arguments of ragged, paged and banded attention to what a kernel is launched with.
#pragma once

#include "attention/host/select.h"
#include "attention/host/varlen_arguments.h"
#include "attention/params/e4m3.h"
#include "host/driver.h"

namespace flashmoe::attention {

// Whether every entry is known to have one row: dense rows alone say that to the host.
bool has_one_row_each(const VarlenArguments& arguments);

// No key at all: the output is zero, and the log-sum-exp that of the sink alone.
void fill_without_keys(const ForwardOutputs& outputs, const Tensor& sinks, const host::Device& gpu);

// A dense problem that kernels of ragged batches serve: a head dim above kMaxDenseHeadDim, or few rows (prefers_folded_rows).
void forward_as_ragged(const ForwardArguments& arguments, const ForwardOutputs& outputs);

// One row for each entry: the query heads that share a key head become the rows of that one position (ScoreOptions::folded_heads), so that
// their keys are read once.
void fold_heads(ForwardParams& params);

// What a decoding kernel reads of a dense problem beside the other kernels' params: a band that hides nothing, all lengths alike.
void describe_as_band(ForwardParams& params);

// A decoding kernel divides all key tiles evenly over its blocks, and puts items that several blocks share together itself
// (csrc/attention/decode/). num_splits: 0 for the kernel's choice; 1: nothing is shared, and a row's result is the same in any batch.
// `launched`: the kernel's parameter block where `params` is a part of it; null: params.
void run_decoding(ForwardParams& params, const Kernel& kernel, int64_t num_splits, const host::CudaCall& call,
                  const void* launched = nullptr);

// The same for a consistent call: the scores, then the values, with a workspace between them.
void run_ordered_decoding(ForwardParams& params, const OrderedDecoding& kernels, const host::CudaCall& call);

// What serves a call: two kernels, or one.
struct Chosen {
  OrderedDecoding ordered;
  const Kernel* kernel;  // its tensors' rules are those of the call
  bool is_decoding;
  Division division{};
  Choice chunk{};  // its first kernel is then `kernel`
  // Of a batch whose bits may not depend on its longest sequence: the kernel of the short ones, which alone would be decoded.
  const Kernel* of_short = nullptr;
  bool leaves_short = false;  // the short ones are of_short's, or the caller's
};
// By sizes and options alone: q, k and v are not looked at otherwise.
Chosen choose_varlen(const VarlenArguments& arguments, const host::Device& gpu);
// With at least one key, whatever the layout is that `chosen` was chosen for.
void run_varlen(const VarlenArguments& arguments, const ForwardOutputs& outputs, const Chosen& chosen,
                const host::Device& gpu);

// The launch of a chunk's kernel. `codes`: the parameter block that `params` is a part of, where the cache holds codes; null: elements.
void run_chunk(ForwardParams& params, const Choice& choice, const host::CudaCall& call, const E4m3ForwardParams* codes);

// Row blocks that all entries have together, for one head, at most; the lengths are in device memory.
int64_t most_row_blocks(const ForwardParams& params, int64_t block_m);

}  // namespace flashmoe::attention
