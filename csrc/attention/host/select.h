// Which of attention's kernels serves a problem on a GPU. Pure: numbers in, a choice or an explained refusal out.
#pragma once

#include <string>

#include "attention/host/axes.h"
#include "host/find_kernels.h"

namespace flashmoe::attention {

using host::Dtype;
using host::Kernel;

constexpr int64_t kMaxHeadDim = 512;
// Of dense kernels, and of every GPU kernel but attention_varlen_forward.
constexpr int64_t kMaxDenseHeadDim = 256;
constexpr int64_t kMaxDecodingRows = 16;  // of a sequence
constexpr int32_t kMeasuredCapability = 90;

struct SelectorInput {
  host::KernelRequest request;
  Mask mask;
  int32_t head_dim;  // the tensor's, 1 to kMaxDenseHeadDim
  int64_t batch;
  int64_t heads_q;
  int64_t heads_kv;
  int64_t seq_q;
  int64_t seq_k;
  bool has_window = false;  // seq_k is then what a row sees of more keys
  bool is_consistent = false;
};

// Few rows of a consistent call, whose keys are divided for their scores alone: two kernels that leave the bits of the ragged one. Nulls where that
// is as fast, or nothing else serves the call.
struct OrderedDecoding {
  const Kernel* scores = nullptr;
  const Kernel* values = nullptr;
};

struct Choice {
  const Kernel* forward = nullptr;
  const Kernel* combine = nullptr;  // adds up the partial results when num_splits > 1
  int32_t num_splits = 1;
  OrderedDecoding ordered{};  // forward is then its second kernel
};

// The kernels of one family: the first gives dq and row_dot, the second dk and dv from row_dot. Or, where a family has them, one
// gives all three, between one that prepares its sums and one that converts them.
struct BackwardKernels {
  const Kernel* dq = nullptr;
  const Kernel* dkv = nullptr;
  const Kernel* fused = nullptr;
  const Kernel* prepare = nullptr;
  const Kernel* convert = nullptr;
};

// Of ragged, paged and banded attention. What no host knows, the lengths of the sequences, plays no part.
struct VarlenSelectorInput {
  host::KernelRequest request;
  int32_t head_dim;    // the larger of the two
  int32_t head_dim_v;  // of values
  int32_t page_size;   // 0 without pages
  int64_t rows;        // of the longest sequence and a head, heads that share keys counted as rows where they are
  int64_t keys;        // of the longest sequence
  int64_t heads;       // those that are not rows
  int64_t batch;
  int64_t rows_total;        // of ragged rows; otherwise 0
  bool has_score_functions;  // a softcap or a mask tensor
  bool has_alibi = false;
  bool is_consistent = false;
  int64_t heads_kv = 1;
  int64_t rows_of_key_head = 1;     // of the longest sequence, those of all query heads that share it
  bool is_batch_invariant = false;  // num_splits of 1: the kernel must not depend on how many sequences there are
  int64_t heads_q = 1;
  int64_t longest_rows = 1;  // of the longest sequence: positions
  int64_t seen_keys = 0;     // that a row sees at most
  int64_t num_splits = 0;    // above 1: the most shares of a sequence's keys
  bool is_causal = false;    // the right bound is the diagonal
};

// Consistent calls: a row's bits depend on its query, its visible keys and its options alone. All forward kernels take a row's keys from the first on
// and rescale by its own scores, so what is left is the width of a key block, which is the ragged kernel's of the GPU's first family, and that no
// keys are divided: such a call has no decoding and no split kernels.

// The width of a consistent call: of the GPU's first family with ragged kernels, whichever family is forced; of the variant `wanted` where that has one.
// 0 where there is none.
int32_t consistent_block_n(const host::KernelRequest& request, int32_t head_dim, const char* wanted);
// The variant for values narrower than keys, or none; it has head dim 192.
const char* values_variant(int32_t head_dim, int32_t head_dim_v);

// Row blocks of a head, at most: of each sequence the last one may be broken.
int64_t most_row_blocks(int64_t rows, int64_t batch, int64_t rows_total, int64_t block_m);

// Few rows are a decoding kernel's, whatever the family.
// Values of at most 128 columns beside keys of 129 to 192 have kernels of their own, without score functions: the variant "v128".
const Kernel* select_varlen_forward(const VarlenSelectorInput& input);

// Of a kernel of wgmma for head dims above kMaxDenseHeadDim, true for any other: whether it serves the call. It has no score functions, and its sums are not
// in the order of the other family's, which loads any page and divides keys.
bool serves_wide(const VarlenSelectorInput& input, const Kernel& kernel);
// Tiles that such a kernel makes of one: each computes a part of the output's columns.
int64_t value_parts(const Kernel& kernel);

// Of a kernel that divides a query tile's keys: over how many blocks, and what adds up their partial results.
struct Division {
  int32_t num_splits = 1;
  const Kernel* combine = nullptr;  // null: `kernel` divides nothing
};
Division divide_keys(const VarlenSelectorInput& input, const Kernel& kernel);

// The kernel of `operation` in the variant "split" that is as wide as `standard`, where few dense rows meet many keys; otherwise null.
const Kernel* find_divided(const VarlenSelectorInput& input, const Kernel& standard, const host::KernelList& loadable);

// host::refuse; a head dim above kMaxDenseHeadDim, which `what` has on no GPU, is named as the reason.
[[noreturn]] void refuse_head_dim(const host::KernelRequest& request, const std::string& what, int64_t head_dim);

// The best family's kernel of an operation that needs no further choice.
const Kernel& select_by_head_dim(const host::KernelRequest& request, const char* operation, const char* variant,
                                 int32_t head_dim, const char* what);
// Of an operation without axes, which every family computes alike.
const Kernel& select_first(const host::KernelRequest& request, const char* operation, const char* what);

// A kernel for few rows over many keys in place of `otherwise`, which select_varlen_forward has chosen, where it is faster; a null otherwise.
Choice select_chunk(const VarlenSelectorInput& input, const Kernel& otherwise);
// Whether a dense problem of few rows is faster as a ragged one, whose kernels have the query heads that share keys as rows of one tile, than by
// `chosen`, which select_forward gave for it. That kernel serves it then, too.
bool prefers_folded_rows(const SelectorInput& dense, const Choice& chosen);
// Time of a dense kernel on a GPU that runs sm90's, in microseconds of an H100, by the cost that its row states; infinite without.
double forward_microseconds(const SelectorInput& input, const Kernel& kernel, int64_t splits);

// The second pass of split attention. Partial results look alike in all families, so one combine kernel serves them all: the
// table has it under the family sm80 alone, and a GPU whose list names that family runs it behind the split kernels of every
// other family of its list. Null where there is none.
const Kernel* find_combine(const host::KernelRequest& request, int32_t head_dim);

// A copy engine's box of a page has as many rows as the greatest power of two that divides the page, and at least eight.
bool can_load_pages(const Kernel& kernel, int32_t page_size);

OrderedDecoding select_ordered_decoding(const VarlenSelectorInput& input);
// Of the scores between the two kernels, for all sequences: the floats. rows: of a key head, those of all query heads that share it.
int64_t count_scores(const Kernel& values, int64_t batch, int64_t heads_kv, int64_t rows, int64_t keys);

// Of dropout, dense or ragged: the first family that has it. has_score_mod: a softcap or a mask tensor, without ALiBi, which the sm90 kernels do
// not have. Throws as host::refuse() says where none has.
const Kernel& select_dropout_forward(const host::KernelRequest& request, int32_t head_dim, bool has_score_mod,
                                     bool has_alibi);

// Of a dense problem with one query position, whose heads are rows: the decoding kernel; null where another one is faster, or there is none.
const Kernel* select_decoding(const SelectorInput& input);

// Throws as host::refuse() says where no kernel serves the problem.
Choice select_forward(const SelectorInput& input);

// The best family with both kernels; none where this GPU, or the forced family, has no backward kernels.
BackwardKernels select_backward(const host::KernelRequest& request, Mask mask, int32_t head_dim);

// Whether the fused kernel is there and faster, where all three gradients are needed. Never where $FLASHMOE_SPLIT_BACKWARD is 1. is_split_slow:
// of dropout, where the split form is another family's, and of masks.
bool prefers_fused(const BackwardKernels& kernels, const SelectorInput& problem, bool is_split_slow = false);

// The same of ragged and banded attention. Throws as host::refuse() says where there are none.
// head_dim: the larger of the two. has_score_mod: a softcap, or a mask tensor; some families have kernels of their own for that. All have them for ALiBi, which is none.
// streams_mask: the one score modification is a mask tensor that a copy engine can load.
BackwardKernels select_varlen_backward(const host::KernelRequest& request, int32_t head_dim, int32_t head_dim_v,
                                       bool has_score_mod, bool has_alibi, bool streams_mask = false);
// And of dropout, with or without either.
BackwardKernels select_dropout_backward(const host::KernelRequest& request, int32_t head_dim, bool has_score_mod,
                                        bool has_alibi);
// The forward kernel that streams a mask in place of `otherwise`, which select_varlen_forward has chosen; null where there is none of its family.
constexpr const char* kMaskForward = "attention_mask_forward";
const Kernel* find_mask_forward(const VarlenSelectorInput& input, const Kernel& otherwise);
// Of the gradient of an additive mask. Throws likewise.
// folds: the mask has one row, or one key.
const Kernel& select_bias_gradient(const host::KernelRequest& request, int32_t head_dim, bool has_dropout, bool folds);

// The batch of equal sequences that a ragged one is judged by, as no host knows its lengths: as many tokens, in sequences as long as the longest, whose
// rows see at most visible_keys.
SelectorInput as_equal_sequences(const SelectorInput& longest, int64_t rows_total, int64_t keys_total,
                                 int64_t visible_keys);

// row_dot alone: the first that this GPU has, whichever family is forced.
const Kernel& select_row_dot(const host::KernelRequest& request);
// The kernel of a streamed mask that stores its gradient, in place of the one that does not.
const Kernel& select_storing(const host::KernelRequest& request, const Kernel& fused);
const Kernel& select_scores_sum(const host::KernelRequest& request);

// Of a cache of 8-bit floats, which one kernel reads for any number of rows. Throws as host::refuse() says where there is none.
const Kernel& select_e4m3(const host::KernelRequest& request, int32_t head_dim);
// The kernel over codes of a chunk that is so served over elements; none where there is no such kernel.
Choice select_coded_chunk(const host::KernelRequest& request, const Choice& chunk);
// Of q, k and v of 8-bit floats: a kernel, and the one in front of it.
struct Fp8Kernels {
  const Kernel* forward = nullptr;
  const Kernel* transpose = nullptr;
};
// Throws as host::refuse() says where there are none. mask: of dense tensors; the kernels of ragged ones have every mask.
Fp8Kernels select_fp8(const host::KernelRequest& request, Mask mask, int32_t head_dim, bool has_block_scales);
Fp8Kernels select_fp8_varlen(const host::KernelRequest& request, int32_t head_dim);
const Kernel& select_e4m3_append(const host::KernelRequest& request);
const Kernel& select_dequantize(const host::KernelRequest& request);

// Copies of rows, which every family does alike: the first that this GPU has, whichever is forced.
const Kernel& select_append(const host::KernelRequest& request);

}  // namespace flashmoe::attention
