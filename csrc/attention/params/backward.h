// What the host passes to every backward attention kernel. Plain C types only: the same header is read by the host
// compiler (which fills it), by NVRTC (whose kernels read it) and by the emulation build.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

// Number of rows from one sequence of a dense batch to the next: stride.batch / stride.row. 0 if rows or keys are
// ragged. For kernels of MaskKind::kRuntime that load with tensor maps.
struct SequenceRows {
  int32_t q;
  int32_t k;
  int32_t v;
  int32_t dout;
  int32_t dq;
  int32_t dk;
  int32_t dv;
};

// For grids in which every sequence has as many slots as the longest one: the number of additional slots per head,
// before all others, whose blocks clear what belongs to no sequence.
constexpr int32_t kClearingSlots = 4;

struct BackwardParams {
  const void* q;      // [batch, heads_q,  seq_q, head_dim]
  const void* k;      // [batch, heads_kv, seq_k, head_dim]
  const void* v;      // [batch, heads_kv, seq_k, head_dim]
  const void* out;    // [batch, heads_q,  seq_q, head_dim], of the forward pass
  const void* dout;   // [batch, heads_q,  seq_q, head_dim], gradient of out
  const float* lse;   // [batch, heads_q,  seq_q], contiguous, of the forward pass; -inf for a row without visible keys
  const float* dlse;  // the same, gradient of lse; null if there is none
  void* dq;           // [batch, heads_q,  seq_q, head_dim]
  void* dk;           // [batch, heads_kv, seq_k, head_dim]
  void* dv;           // [batch, heads_kv, seq_k, head_dim]
  float* row_dot;     // [batch, heads_q,  seq_q] fp32 workspace: sum over a row of dout * out, minus dlse. Written by
                      // the dq kernel, read by the dk and dv kernel
  // One zeroed counter for persistent schedules, and zero again at the end; null: a static schedule.
  int32_t* tile_counter;
  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides out_stride;
  Strides dout_stride;
  Strides dq_stride;
  Strides dk_stride;
  Strides dv_stride;
  int32_t batch;
  int32_t heads_q;
  int32_t heads_kv;  // divides heads_q; query head h reads key head h / (heads_q / heads_kv)
  int32_t seq_q;
  int32_t seq_k;
  int32_t head_dim;  // the tensors' head dim, a multiple of 8, at most the kernel's kHeadDim; columns past it are zero
  float scale;       // multiplies q k^T before the softmax
  float scale_log2;  // scale * log2(e); with a softcap, see ScoreOptions
  // Only for kernels of MaskKind::kRuntime, as in ForwardParams. No pages, no folded heads; lse, dlse and row_dot are
  // [batch, heads_q, seq_q], or [heads_q, rows_total] if rows are ragged. lse includes the sink.
  int32_t head_dim_v;  // of v, out, dout and dv
  Batch sequences;
  ScoreOptions score_options;
  SequenceRows sequence_rows;
};

// With P = exp(scale * q k^T - lse):
//   dv = P^T dout,   dS = P * (dout v^T - row_dot),   dq = scale * dS k,   dk = scale * dS^T q.
// With a softcap dS is multiplied by 1 - tanh^2, which is 1 - score^2 of ScoreOptions before the mask is added.

}  // namespace flashmoe::attention
