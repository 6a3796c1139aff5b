// What the host passes to every forward attention kernel. Plain C types only: the same header is read by the host
// compiler (which fills it), by NVRTC (whose kernels read it) and by the emulation build.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
#else
#include <cstdint>
#endif

namespace flashmoe {
namespace attention {

// Element strides of a [batch, head, row, head_dim] tensor whose last dimension is contiguous.
struct Strides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

struct ForwardParams {
  const void* q;          // [batch, heads_q,  seq_q, head_dim]
  const void* k;          // [batch, heads_kv, seq_k, head_dim]
  const void* v;          // [batch, heads_kv, seq_k, head_dim]
  void* out;              // [batch, heads_q,  seq_q, head_dim]
  float* lse;             // [batch, heads_q,  seq_q], contiguous, natural logarithm; -inf for a fully masked row.
                          // CUDA kernels: null where nobody wants it
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
  int32_t head_dim;    // the tensor's own, a multiple of 8, at most the kernel's kHeadDim; columns past it are zero
  int32_t num_splits;  // key/value blocks of a tile are divided over this many thread blocks
  float scale;         // multiplies q k^T before the softmax
  float scale_log2;    // scale * log2(e)
};

// Causal masks are aligned bottom-right: key j is visible to query i when j <= i + (seq_k - seq_q).

}  // namespace attention
}  // namespace flashmoe
