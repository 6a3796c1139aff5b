// One head's tensors. Include after a vector_*.h. Internal linkage.
#pragma once

#include <cstdint>

#include "attention/cpu/kernel.h"

namespace flashmoe::cpu {
namespace {

// One head's tensors of a task, with their element type.
template <class T>
struct Operands {
  const T* q;  // row 0 of the head
  const T* k;
  const T* v;
  T* out;
  float* lse;  // row 0, or null if not needed

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
    lse = params.lse == nullptr ? nullptr : params.lse + (batch * params.heads_q + head_q) * task.lse_stride;
  }
};

// Sets rows[i] to the address of key + i of a head's K or V, which may be paged. `first`: the head's key 0, or that of
// page 0.
template <class T>
inline void find_rows(const T* first, const attention::Strides& stride, const attention::Batch& sequences, int32_t key,
                      int32_t keys, const T** rows) {
  if (sequences.block_table == nullptr) {
    for (int32_t i = 0; i < keys; ++i) rows[i] = first + (int64_t{key} + i) * stride.row;
    return;
  }
  int32_t page_index = key / sequences.page_size, in_page = key % sequences.page_size;
  for (int32_t i = 0; i < keys; ++page_index, in_page = 0) {
    const int32_t page = sequences.block_table[page_index];
    const T* row = first + (page >= 0 && page < sequences.num_pages ? page : 0) * stride.batch + in_page * stride.row;
    for (; i < keys && in_page < sequences.page_size; ++in_page, ++i, row += stride.row) rows[i] = row;
  }
}

}  // namespace
}  // namespace flashmoe::cpu
