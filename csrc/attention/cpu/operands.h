// One head's tensors, and the factors of the scores. Include after a vector_*.h. Internal linkage.
#pragma once

#include <cstdint>

#include "attention/cpu/kernel.h"

namespace flashmoe {
namespace cpu {
namespace {

// One head's tensors of a task, as the element type.
template <class T>
struct Operands {
  const T* q;  // row 0 of the head
  const T* k;
  const T* v;
  T* out;
  float* lse;  // row 0, or null if nobody wants it

  float* lse_row(int64_t row) const { return lse == nullptr ? nullptr : lse + row; }

  explicit Operands(const Task& task) {
    const attention::ForwardParams& params = *task.params;
    const int64_t batch = task.batch;
    const int64_t head_q = task.head_q;
    const int64_t head_kv = head_q / (params.heads_q / params.heads_kv);
    q = static_cast<const T*>(params.q) + batch * params.q_stride.batch + head_q * params.q_stride.head;
    k = static_cast<const T*>(params.k) + batch * params.k_stride.batch + head_kv * params.k_stride.head;
    v = static_cast<const T*>(params.v) + batch * params.v_stride.batch + head_kv * params.v_stride.head;
    out = static_cast<T*>(params.out) + batch * params.out_stride.batch + head_q * params.out_stride.head;
    lse = params.lse == nullptr ? nullptr : params.lse + (batch * params.heads_q + head_q) * params.seq_q;
  }
};

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
