// Checks of the arguments of ragged, paged and windowed attention, and the parameter blocks made from them. arguments.h
// does the same for the dense operators.
//
// Layouts. Rows (q, out) are dense, [batch, heads_q, rows, head_dim], or ragged, [rows_total, heads_q, head_dim] with
// cu_seqlens_q. Keys (k, v) are dense, ragged with cu_seqlens_k, or pages, [num_pages, page_size, heads_kv, head_dim]
// with block_table and seqused_k. Any row layout may be combined with any key layout. lse and tensors like it are
// [batch, heads_q, rows], or [heads_q, rows_total].
#pragma once

#include "attention/host/arguments.h"
#include "attention/params/append.h"
#include "attention/params/backward.h"
#include "attention/params/dropout.h"
#include "host/find_kernels.h"

namespace flashmoe::attention {

// As num_splits: a row's bits depend only on its query, its visible keys and its options (select.h).
constexpr int64_t kConsistent = -1;

// A tensor that was not given has a null handle: see has(). v's head_dim may differ from that of q and k.
struct VarlenArguments : QueryKeyValue {
  Tensor cu_seqlens_q;  // [batch + 1] int32, contiguous
  Tensor cu_seqlens_k;  // [batch + 1] int32, contiguous
  Tensor seqused_k;     // [batch] int32, contiguous
  Tensor block_table;   // [batch, pages] int32, last dimension contiguous
  Tensor sinks;         // [heads_q] float32, contiguous
  Tensor
      mask;  // [batch, heads_q, max_seqlen_q, max_seqlen_k], 1 in place of any: bool or q's type, any strides; or ALiBi
             // slopes, see has_alibi
  int64_t max_seqlen_q = 0;  // of the longest sequence; set by the check if rows or keys are dense
  int64_t max_seqlen_k = 0;
  double scale = 0.0;        // above zero after make_scale_positive, which runs before any backend
  double softcap = 0.0;      // 0: none
  int64_t window_left = -1;  // -1: unbounded
  int64_t window_right = -1;
  int64_t num_splits = 0;         // 0: the kernels choose; 1: each row's result is the same in any batch; kConsistent
  bool has_codes = false;         // k and v hold float8_e4m3fn
  bool has_code_queries = false;  // q too; dtype is then the output's
  double dropout_p = 0.0;
  Tensor rng_state;  // [2] int64: seed and offset; given if there is dropout

  static bool has(const Tensor& tensor) { return tensor.is_given(); }
  bool has_ragged_rows() const { return has(cu_seqlens_q); }
  bool has_ragged_keys() const { return has(cu_seqlens_k); }
  bool has_pages() const { return has(block_table); }
  bool has_dropout() const { return has(rng_state); }
  bool is_consistent() const { return num_splits == kConsistent || host::wants_consistency(); }
  // Sizes, in any layout. Valid after the ranks are checked.
  int64_t batch() const { return has_ragged_rows() ? cu_seqlens_q.sizes()[0] - 1 : q.sizes()[0]; }
  int64_t heads_q() const { return q.sizes()[1]; }
  int64_t heads_kv() const { return k.sizes()[has_pages() ? 2 : 1]; }
  int64_t head_dim() const { return q.sizes()[q.dim() - 1]; }
  int64_t head_dim_v() const { return v.sizes()[v.dim() - 1]; }
  int64_t rows_total() const { return has_ragged_rows() ? q.sizes()[0] : q.sizes()[0] * q.sizes()[2]; }
};

struct VarlenBackwardArguments : BackwardTensors {
  VarlenArguments forward;  // no pages; scale above zero
};

// Throws for the first rule that the arguments break. Values in device memory are always checked for CPU tensors, and
// for GPU tensors if $FLASHMOE_CHECK_VALUES is 1, which costs a synchronisation.
void check_varlen_arguments(VarlenArguments& arguments);

// For checked arguments: checks the output tensor that the caller passed. Any order of dimensions, without gaps.
void check_out(const VarlenArguments& arguments, const Tensor& out);

void check_varlen_backward_arguments(VarlenBackwardArguments& arguments);

// The same call with q, k and v in other memory.
VarlenArguments with_operands(const VarlenArguments& arguments, Tensor q, Tensor k, Tensor v);

// Kernels find a row's maximum before they scale, and take a softcap's factor as given, so a scale of zero or less is
// moved into a copy of q. The result is the same, with or without softcap.
void make_scale_positive(VarlenArguments& arguments);

// A softcap that would change no score in float32 counts as none.
bool has_softcap(const VarlenArguments& arguments);
// True if mask is float32 with two dimensions: [batch, heads_q].
bool has_alibi(const VarlenArguments& arguments);
// The most keys that a sequence can have: max_seqlen_k, or the keys that fit the tensors.
int32_t most_keys(const VarlenArguments& arguments);

// All parameters except workspace, tile_counter, num_splits (1) and folded_heads (1). Outputs may be empty.
ForwardParams make_varlen_params(const VarlenArguments& arguments, const ForwardOutputs& outputs);
// For arguments that have dropout.
Dropout make_dropout(const VarlenArguments& arguments);

// k_new [batch, heads_kv, new keys, head_dim] and v_new are written after the first cache_seqlens[b] keys of sequence
// b. Keys beyond the cache's capacity, and keys of pages outside the table or the cache, are dropped.
struct AppendArguments {
  bool has_codes = false;  // the caches hold float8_e4m3fn, the new rows 16 bits
  Tensor k_cache;          // [batch, heads_kv, keys, head_dim], or pages [num_pages, page_size, heads_kv, head_dim]
  Tensor v_cache;          // its head_dim may differ from that of k_cache
  Tensor k_new;            // any strides with a contiguous last dimension
  Tensor v_new;
  Tensor cache_seqlens;  // [batch] int32, contiguous
  Tensor block_table;    // [batch, pages] int32, last dimension contiguous; null handle: dense caches
  Dtype dtype = Dtype::kFloat32;
  int32_t torch_dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;

  bool has_pages() const { return block_table.is_given(); }
};

void check_append_arguments(AppendArguments& arguments);

// is_aligned: for rows of 16-bit elements.
AppendParams make_append_params(const AppendArguments& arguments);

}  // namespace flashmoe::attention
