// What the host passes to every forward attention kernel. Plain C types only: the same header is read by the host
// compiler (which fills it), by NVRTC (whose kernels read it) and by the emulation build.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
#else
#include <cstdint>
#endif

namespace flashmoe::attention {

// Element strides of a [batch, head, row, head_dim] tensor whose last dimension is contiguous.
struct Strides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

// Which keys a query sees.
//   kFull     all of them
//   kCausal   aligned bottom-right: key j when j <= i + (keys - rows)
//   kRuntime  as in ScoreOptions, for a Batch of sequences: windows, softcap, sinks, masks, ragged and paged sequences
enum class MaskKind { kFull, kCausal, kRuntime };

// The layout of the sequences of a batch, for kernels of MaskKind::kRuntime. All null: dense, as for the other kernels.
//
// Ragged rows: q, out are [rows_total, heads_q, ...]; sequence b has the rows cu_seqlens_q[b] to
// cu_seqlens_q[b + 1] - 1. Ragged keys: the same with k, v and cu_seqlens_k. Paged keys: k, v are
// [num_pages, page_size, heads_kv, ...] (Strides::batch is the page's stride, Strides::row the key's), and key j of
// sequence b is key j % page_size of page block_table[b, j / page_size]. These arrays are device memory that the host
// never reads. Kernels clamp rows to [0, seq_q], keys to [0, seq_k] and both to the tensors' bounds, and read a page
// number outside [0, num_pages) as page 0 (with TMA: as zeros), so that wrong numbers cannot cause accesses outside the
// tensors.
struct Batch {
  const int32_t* cu_seqlens_q;  // [batch + 1]
  const int32_t* cu_seqlens_k;  // [batch + 1]; null where there are pages
  const int32_t* seqused_k;     // [batch]: keys of each sequence; null: all it has room for
  const int32_t* block_table;   // [batch, pages]; rows block_table_stride apart; null: no pages
  int64_t block_table_stride;
  int32_t page_size;   // 0 without pages
  int32_t num_pages;   // that k and v hold
  int32_t rows_total;  // of q, if cu_seqlens_q is not null; 0 otherwise
  int32_t keys_total;  // of k, if cu_seqlens_k is not null; 0 otherwise
};

// kAlibi: slopes instead of a tensor as large as the scores; key j gets -slope * |i + (keys - rows) - j| in row i.
enum class MaskTensor : int32_t { kNone, kBool, kAdditive, kAlibi };

// Which keys a row sees and how its scores are modified, for kernels of MaskKind::kRuntime:
//   score = (score_factor > 0 ? tanh(score_factor * q k^T) : q k^T) + mask_factor * additive mask,
// and ForwardParams::scale_log2 * score is the exponent to base 2. Without softcap score_factor is 0, mask_factor
// 1 / scale and scale_log2 = scale * log2(e); with softcap score_factor is scale / softcap, mask_factor 1 / softcap,
// and scale_log2 softcap * log2(e). A finite mask value stays finite: its product is clamped to the range of float.
struct ScoreOptions {
  int32_t left;   // query i sees keys from i + (keys - rows) - left; kUnbounded: from the first
  int32_t right;  // up to i + (keys - rows) + right; kUnbounded: to the last. Causal: 0
  float score_factor;
  float mask_factor;
  const float* sinks;  // [heads_q]: one more term exp(sink) in each row's sum, with no value; null: none
  // [batch, heads_q, rows, keys], of element type or bool (a byte, 0 hides a key); null: none. kAlibi: float32
  // [batch, heads_q], strides of row and key 0 (with folded heads the row's is the head's).
  const void* mask;
  int64_t mask_stride_batch;  // elements; 0 if broadcast
  int64_t mask_stride_head;
  int64_t mask_stride_row;
  int64_t mask_stride_key;
  MaskTensor mask_type;
  // Folding makes the query heads that share a key head the rows of one query position: then seq_q is their number,
  // heads_q = heads_kv, and every row sees what that position sees; row r of head h is head h * folded_heads + r of the
  // tensor. 1: no folding. Decoding kernels: heads_q / heads_kv, or 1 for rows of one head; seq_q and heads_q are those
  // of the tensor, and the kernel folds the heads itself.
  int32_t folded_heads;
};

constexpr int32_t kUnbounded = 1 << 30;

struct ForwardParams {
  const void* q;          // [batch, heads_q,  seq_q, head_dim]
  const void* k;          // [batch, heads_kv, seq_k, head_dim]
  const void* v;          // [batch, heads_kv, seq_k, head_dim]
  void* out;              // [batch, heads_q,  seq_q, head_dim]
  float* lse;             // [batch, heads_q,  seq_q], contiguous, natural logarithm; -inf for a fully masked row.
                          // CUDA kernels: null if not requested
  float* out_partial;     // [num_splits, batch, heads_q, seq_q, head_dim] fp32, contiguous; null when num_splits == 1
  float* lse_partial;     // [num_splits, batch, heads_q, seq_q] fp32, contiguous; null when num_splits == 1
  int32_t* tile_counter;  // one zeroed counter for persistent schedules; null for the others
  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides out_stride;
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;  // divides heads_q; query head h reads key head h / (heads_q / heads_kv)
  int32_t seq_q;
  int32_t seq_k;
  int32_t head_dim;  // the tensors' head dim, a multiple of 8, at most the kernel's kHeadDim; columns past it are zero
  // The key/value blocks of a tile are divided over this many thread blocks. If two kernels share a batch of ragged
  // rows: -n for the kernel that skips sequences of up to n rows, and -1 for the decoding kernel, which skips those of
  // more than seq_q.
  int32_t num_splits;
  float scale;       // multiplies q k^T before the softmax
  float scale_log2;  // scale * log2(e); with a softcap, see ScoreOptions
  // Only for kernels of MaskKind::kRuntime. For these seq_q and seq_k are the most rows and keys of any sequence, batch
  // is the number of sequences, and rows of lse and of partial results are numbered by Sequence::result_row.
  int32_t head_dim_v;  // of v and out; the other kernels use head_dim
  // 1: a row's bits depend only on its query, its visible keys and its options. The host has chosen the kernel
  // accordingly; the softcap is then always computed by the same formula.
  int32_t is_consistent;
  // Hints, on which no result depends. Decoding of large batches: how many key tiles a block reads without a cache hint
  // before it reads evict_first; 0: evict_normal throughout. Chunks: chunk_words.h.
  int32_t hints;
  Batch sequences;
  ScoreOptions score_options;
};

}  // namespace flashmoe::attention
