// Chooses the attention kernel for a problem on a GPU. Pure: numbers in, a plan or an explained refusal out.
#pragma once

#include <string>

#include "attention/host/axes.h"
#include "host/find_kernels.h"

namespace flashmoe::attention {

using host::Dtype;
using host::Kernel;

constexpr int64_t kMaxHeadDim = 512;
// For dense kernels and every GPU kernel except attention_varlen_forward.
constexpr int64_t kMaxDenseHeadDim = 256;
constexpr int64_t kMaxDecodingRows = 16;  // per sequence
constexpr int32_t kMeasuredCapability = 90;

struct SelectorInput {
  host::KernelRequest request;
  Mask mask;
  int32_t head_dim;  // of the tensor, 1 to kMaxDenseHeadDim
  int64_t batch;
  int64_t heads_q;
  int64_t heads_kv;
  int64_t seq_q;
  int64_t seq_k;
  bool has_window = false;  // seq_k is then the number of keys that a row sees, of more
  bool is_consistent = false;
};

// Few rows of a consistent call: two kernels that give the same bits as the ragged kernel. The keys are split only for
// the scores. Null if the ragged kernel is as fast, or if no other kernel can run the call.
struct OrderedDecoding {
  const Kernel* scores = nullptr;
  const Kernel* values = nullptr;
};

struct KernelPlan {
  const Kernel* forward = nullptr;
  const Kernel* combine = nullptr;  // reduces the partial results if num_splits > 1
  int32_t num_splits = 1;
  OrderedDecoding ordered{};  // then forward is its second kernel
};

// Kernels of one family: dq also computes row_dot, and dkv computes dk and dv from row_dot. If the family has them,
// `fused` computes all three gradients: `prepare` runs before it, and `convert` after it turns its fp32 sums into dq.
struct BackwardKernels {
  const Kernel* dq = nullptr;
  const Kernel* dkv = nullptr;
  const Kernel* fused = nullptr;
  const Kernel* prepare = nullptr;
  const Kernel* convert = nullptr;
};

// For ragged, paged and windowed attention. The lengths of the sequences play no part: the host does not know them.
struct VarlenSelectorInput {
  host::KernelRequest request;
  int32_t head_dim;    // the larger of the two
  int32_t head_dim_v;  // of v
  int32_t page_size;   // 0 without pages
  int64_t rows;        // per head of the longest sequence; if query heads are folded, their rows count too
  int64_t keys;        // of the longest sequence
  int64_t heads;       // not counting heads that are folded into rows
  int64_t batch;
  int64_t rows_total;        // of ragged rows; 0 otherwise
  bool has_score_functions;  // a softcap or a mask tensor
  bool has_alibi = false;
  bool is_consistent = false;
  int64_t heads_kv = 1;
  int64_t rows_of_key_head = 1;     // of the longest sequence, summed over the query heads that share a key head
  bool is_batch_invariant = false;  // num_splits of 1: the kernel must not depend on the number of sequences
  int64_t heads_q = 1;
  int64_t longest_rows = 1;  // query positions of the longest sequence
  int64_t seen_keys = 0;     // the most keys that a row sees
  int64_t num_splits = 0;    // above 1: the most splits of a sequence's keys
  bool is_causal = false;    // the right bound is the diagonal
};

// Consistent calls: a row's bits depend only on its query, its visible keys and its options. All forward kernels read a
// row's keys from the first on and rescale by the row's own scores. So it is enough to fix the width of a key block, to
// that of the ragged kernel of the GPU's first family, and not to split the keys: a consistent call never runs a
// decoding or a split kernel.

// Whether $FLASHMOE_KERNEL names the family, or none.
bool is_allowed(const host::KernelRequest& request, const char* family);

// Key block width of a consistent call: that of the GPU's first family with ragged kernels, whichever family is forced,
// and of its variant `wanted` if it has one. 0 if there is none.
int32_t consistent_block_n(const host::KernelRequest& request, int32_t head_dim, const char* wanted);
// The variant for values narrower than keys, which has head dim 192; "" if it does not apply.
const char* values_variant(int32_t head_dim, int32_t head_dim_v);

// The most row blocks per head: the last block of each sequence may be partial.
int64_t most_row_blocks(int64_t rows, int64_t batch, int64_t rows_total, int64_t block_m);

// Few rows run on a decoding kernel, whatever the family. Values of at most 128 columns with keys of 129 to 192 columns
// have the variant "v128", unless there are score functions.
const Kernel* select_varlen_forward(const VarlenSelectorInput& input);

// Returns whether a wgmma kernel for head dims above kMaxDenseHeadDim can run the call; true for any other kernel. Such
// a kernel has no score functions, and it does not sum in the order of the other family, which loads any page and
// splits keys.
bool supports_wide(const VarlenSelectorInput& input, const Kernel& kernel);
// The number of tiles that such a kernel makes of one: each computes some of the output's columns.
int64_t num_value_slices(const Kernel& kernel);

// For a kernel that splits a query tile's keys: the number of splits, and the kernel that reduces their partial
// results.
struct SplitPlan {
  int32_t num_splits = 1;
  const Kernel* combine = nullptr;  // null: `kernel` splits nothing
};
SplitPlan plan_split(const VarlenSelectorInput& input, const Kernel& kernel);

// The "split" variant of `operation` with the same width as `standard`, for few dense rows over many keys; null
// otherwise.
const Kernel* find_split_kernel(const VarlenSelectorInput& input, const Kernel& standard,
                                const host::KernelList& loadable);

// host::refuse. No GPU has `what` for head dims above kMaxDenseHeadDim; the message then names that as the reason.
[[noreturn]] void refuse_head_dim(const host::KernelRequest& request, const std::string& what, int64_t head_dim);

// The best family's kernel for an operation that needs no further choice.
const Kernel& select_by_head_dim(const host::KernelRequest& request, const char* operation, const char* variant,
                                 int32_t head_dim, const char* what);
// For an operation without axes, which every family computes alike.
const Kernel& select_first(const host::KernelRequest& request, const char* operation, const char* what);

// A kernel for few rows over many keys to use instead of `otherwise`, the choice of select_varlen_forward, if it is
// faster; an empty plan otherwise.
KernelPlan select_chunk(const VarlenSelectorInput& input, const Kernel& otherwise);
// Returns whether a dense problem with few rows is faster on the ragged kernels, which fold the query heads that share
// keys into the rows of one tile, than on `plan`, the plan of select_forward. If true, the ragged kernels can run
// it.
bool prefers_folded_rows(const SelectorInput& dense, const KernelPlan& plan);
// Estimated time of a dense kernel in microseconds on an H100, from the cost in its table row, for GPUs that run the
// sm90 kernels; infinite if the row has no cost.
double forward_microseconds(const SelectorInput& input, const Kernel& kernel, int64_t splits);

// The second pass of split attention. All families write partial results in the same layout, so one combine kernel
// reads them all: the table lists it only under the family sm80, and a GPU whose list names that family runs it after
// the split kernels of every other family. Null if there is none.
const Kernel* find_combine(const host::KernelRequest& request, int32_t head_dim);

// A TMA box of a page has as many rows as the largest power of two that divides the page size, and at least eight.
bool can_load_pages(const Kernel& kernel, int32_t page_size);

OrderedDecoding select_ordered_decoding(const VarlenSelectorInput& input);
// The number of floats for the scores passed between the two kernels, for all sequences. rows: per key head, over all
// query heads that share it.
int64_t count_scores(const Kernel& values, int64_t batch, int64_t heads_kv, int64_t rows, int64_t keys);

// For dropout, dense or ragged: the first family that has it. has_score_mod: a softcap or a mask tensor, not ALiBi; the
// sm90 kernels do not support these. Throws host::refuse() if no kernel has it.
const Kernel& select_dropout_forward(const host::KernelRequest& request, int32_t head_dim, bool has_score_mod,
                                     bool has_alibi);

// For a dense problem with one query position, whose heads are folded into rows: the decoding kernel; null if another
// kernel is faster or there is none.
const Kernel* select_decoding(const SelectorInput& input);

// Throws host::refuse() if no kernel can run the problem.
KernelPlan select_forward(const SelectorInput& input);

// The best family with both kernels; empty if this GPU or the forced family has no backward kernels.
BackwardKernels select_backward(const host::KernelRequest& request, Mask mask, int32_t head_dim);

// Returns whether the fused kernel exists and is faster, when all three gradients are needed. Always false if
// $FLASHMOE_SPLIT_BACKWARD is 1. is_split_slow: for dropout, whose split kernels are another family's, and for masks.
bool prefers_fused(const BackwardKernels& kernels, const SelectorInput& problem, bool is_split_slow = false);

// The same for ragged and windowed attention. Throws host::refuse() if there are none.
// head_dim: the larger of the two. has_score_mod: a softcap or a mask tensor; some families have separate kernels for
// these. ALiBi does not count as one: all families have separate kernels for it. streams_mask: the only score
// modification is a mask tensor that TMA can load.
BackwardKernels select_varlen_backward(const host::KernelRequest& request, int32_t head_dim, int32_t head_dim_v,
                                       bool has_score_mod, bool has_alibi, bool streams_mask = false);
// The same for dropout, with or without a score modification or ALiBi.
BackwardKernels select_dropout_backward(const host::KernelRequest& request, int32_t head_dim, bool has_score_mod,
                                        bool has_alibi);
// The forward kernel that streams a mask, of the family of `otherwise`, which select_varlen_forward chose; null if
// there is none.
constexpr const char* kMaskForward = "attention_mask_forward";
const Kernel* find_mask_forward(const VarlenSelectorInput& input, const Kernel& otherwise);
// For the gradient of an additive mask. Throws host::refuse() if there is none. folds: the mask has one row or one key.
const Kernel& select_bias_gradient(const host::KernelRequest& request, int32_t head_dim, bool has_dropout, bool folds);

// The batch of equal sequences that stands for a ragged one in the choice of kernels, since the host does not know the
// lengths: the same number of tokens, in sequences as long as the longest, whose rows see at most visible_keys.
SelectorInput as_equal_sequences(const SelectorInput& longest, int64_t rows_total, int64_t keys_total,
                                 int64_t visible_keys);

// Only row_dot: the first kernel that this GPU has, whichever family is forced.
const Kernel& select_row_dot(const host::KernelRequest& request);
// The streamed-mask kernel that stores the gradient of the scores, in place of `fused`, which does not.
const Kernel& select_storing(const host::KernelRequest& request, const Kernel& fused);
const Kernel& select_scores_sum(const host::KernelRequest& request);
// The kernels that prepare a bool mask to be streamed.
const Kernel& select_bool_mask(const host::KernelRequest& request);
const Kernel& select_bool_mask_tiles(const host::KernelRequest& request);

// For a float8_e4m3fn cache: one kernel for any number of rows. Throws host::refuse() if there is none.
const Kernel& select_e4m3(const host::KernelRequest& request, int32_t head_dim);
// The chunk kernel for codes that matches `chunk`, a plan for 16-bit elements; empty if there is none.
KernelPlan select_coded_chunk(const host::KernelRequest& request, const KernelPlan& chunk);
// For q, k and v in float8_e4m3fn: the kernel, and the one that runs before it.
struct Fp8Kernels {
  const Kernel* forward = nullptr;
  const Kernel* transpose = nullptr;
};
// Throws host::refuse() if there are none. mask: for dense tensors; the kernels for ragged ones support every mask.
Fp8Kernels select_fp8(const host::KernelRequest& request, Mask mask, int32_t head_dim, bool has_block_scales);
Fp8Kernels select_fp8_varlen(const host::KernelRequest& request, int32_t head_dim);
const Kernel& select_e4m3_append(const host::KernelRequest& request);
const Kernel& select_dequantize(const host::KernelRequest& request);

// Copies rows, which every family does alike: the first kernel that this GPU has, whichever family is forced.
const Kernel& select_append(const host::KernelRequest& request);

}  // namespace flashmoe::attention
