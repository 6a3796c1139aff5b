// Turns the arguments of ragged, paged and windowed attention into kernel launches.
#pragma once

#include "attention/host/select.h"
#include "attention/host/varlen_arguments.h"
#include "attention/params/e4m3.h"
#include "host/driver.h"
#include "host/workspace.h"

namespace flashmoe::attention {

// Returns whether every sequence is known to have one row: the host knows that only for dense rows.
bool has_one_row_each(const VarlenArguments& arguments);

// Without any key the output is zero, and the log-sum-exp is the sink, or -inf.
void fill_without_keys(const ForwardOutputs& outputs, const Tensor& sinks, const host::Device& gpu);

// For a dense problem that the ragged kernels run: a head dim above kMaxDenseHeadDim, or few rows
// (prefers_folded_rows).
void forward_as_ragged(const ForwardArguments& arguments, const ForwardOutputs& outputs);

// For one row per sequence: the query heads that share a key head become the rows of that position
// (ScoreOptions::folded_heads), so that their keys are read once.
void fold_heads(ForwardParams& params);

// The params that a decoding kernel reads and the dense kernels do not: a window that hides nothing, all sequences of
// equal length.
void describe_as_varlen(ForwardParams& params);
// Memory for params.num_splits partial results of `rows` rows of `columns` columns, which a second pass reduces.
host::Workspace allocate_partials(ForwardParams& params, int64_t rows, int64_t columns, const host::CudaCall& call);

// A decoding kernel splits all key tiles evenly over its blocks, and itself combines the items that several blocks
// share (csrc/attention/decode/). num_splits: 0: the kernel chooses; 1: nothing is shared, and a row's result is the
// same in any batch. `launched`: the kernel's parameter block if `params` is part of a larger one; null: params.
void run_decoding(ForwardParams& params, const Kernel& kernel, int64_t num_splits, const host::CudaCall& call,
                  const void* launched = nullptr);

// The same for a consistent call: the scores kernel, then the values kernel, with a workspace between them.
void run_ordered_decoding(ForwardParams& params, const OrderedDecoding& kernels, const host::CudaCall& call);

// The kernels that run a call: two, or one.
struct VarlenPlan {
  OrderedDecoding ordered;
  const Kernel* kernel;  // its requirements on tensors are those of the call
  bool is_decoding;
  SplitPlan split_plan{};
  KernelPlan chunk{};  // its first kernel is then `kernel`
  // For a batch whose bits must not depend on its longest sequence: the decoding kernel for the short sequences, which
  // on their own would be decoded.
  const Kernel* short_seq_kernel = nullptr;
  bool skips_short_seqs = false;  // run_tiles skips the short ones: short_seq_kernel or the caller computes them
};
// Depends only on sizes and options; the contents of q, k and v are not read.
VarlenPlan choose_varlen(const VarlenArguments& arguments, const host::Device& gpu);
// Needs at least one key, and any layout that has the sizes that `plan` was made for.
void run_varlen(const VarlenArguments& arguments, const ForwardOutputs& outputs, const VarlenPlan& plan,
                const host::Device& gpu);

// Launches a chunk kernel. `codes`: the parameter block that `params` is part of, if the cache holds codes; null:
// elements.
void run_chunk(ForwardParams& params, const KernelPlan& plan, const host::CudaCall& call,
               const E4m3ForwardParams* codes);

// The most row blocks of all sequences together, per head; the lengths are in device memory.
int64_t most_row_blocks(const ForwardParams& params, int64_t block_m);

}  // namespace flashmoe::attention
