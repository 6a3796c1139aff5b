// A ragged, paged or windowed batch as the kernels see it: each sequence is a batch of one, with its own parameters.
// For the dispatchers, which are compiled once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/params/forward.h"
#include "cpu/scalar_types.h"

namespace flashmoe::cpu {

inline size_t element_size(ScalarType type) { return type == ScalarType::kFloat32 ? 4 : 2; }

struct Extent {
  int64_t first;
  int32_t length;
};

inline Extent extent_of(const int32_t* cu_seqlens, int32_t sequence, int32_t total, int32_t most) {
  const int32_t first = std::clamp(cu_seqlens[sequence], 0, total);
  const int32_t end = std::clamp(cu_seqlens[sequence + 1], first, total);
  return {first, std::min(end - first, most)};
}

// Params: ForwardParams or BackwardParams.
template <class Params>
Extent row_extent(const Params& params, int32_t sequence) {
  const attention::Batch& sequences = params.sequences;
  if (sequences.cu_seqlens_q == nullptr) return {0, params.seq_q};
  return extent_of(sequences.cu_seqlens_q, sequence, sequences.rows_total, params.seq_q);
}

template <class Params>
Extent key_extent(const Params& params, int32_t sequence) {
  const attention::Batch& sequences = params.sequences;
  Extent keys{0, params.seq_k};
  if (sequences.cu_seqlens_k != nullptr) {
    keys = extent_of(sequences.cu_seqlens_k, sequence, sequences.keys_total, params.seq_k);
  }
  if (sequences.seqused_k != nullptr) keys.length = std::clamp(sequences.seqused_k[sequence], 0, keys.length);
  return keys;
}

// Stride between heads of the log-sum-exp and tensors like it.
template <class Params>
int64_t statistic_stride(const Params& params) {
  return params.sequences.cu_seqlens_q == nullptr ? params.seq_q : params.sequences.rows_total;
}

// Whether the kernels for a full or a causal mask would give a different result.
template <class Params>
bool needs_options(const Params& params) {
  const attention::ScoreOptions& options = params.score_options;
  const bool has_window =
      options.left < attention::kUnbounded || (options.right != 0 && options.right < attention::kUnbounded);
  return has_window || options.score_factor > 0.0f || options.sinks != nullptr ||
         options.mask_type != attention::MaskTensor::kNone || params.sequences.block_table != nullptr;
}

// Moves pointers to the first row, or key, of a sequence.
class SequenceOffset {
 public:
  template <class Params>
  SequenceOffset(const Params& params, ScalarType type, int32_t sequence)
      : size_(static_cast<int64_t>(element_size(type))),
        sequence_(sequence),
        has_ragged_rows_(params.sequences.cu_seqlens_q != nullptr),
        has_pages_(params.sequences.block_table != nullptr),
        rows_(row_extent(params, sequence)),
        keys_(key_extent(params, sequence)),
        heads_q_(params.heads_q) {}

  Extent rows() const { return rows_; }
  Extent keys() const { return keys_; }

  // Ragged tensors have no batch dimension: their batch stride is 0. Pointers to pages are not moved.
  template <class Pointer>
  Pointer row(Pointer tensor, const attention::Strides& stride) const {
    return advance(tensor, (sequence_ * stride.batch + rows_.first * stride.row) * size_);
  }
  template <class Pointer>
  Pointer key(Pointer tensor, const attention::Strides& stride) const {
    return has_pages_ ? tensor : advance(tensor, (sequence_ * stride.batch + keys_.first * stride.row) * size_);
  }
  template <class Pointer>
  Pointer statistic(Pointer tensor, int64_t stride) const {
    if (tensor == nullptr) return nullptr;
    return tensor + (has_ragged_rows_ ? rows_.first : sequence_ * heads_q_ * stride);
  }
  attention::ScoreOptions options(attention::ScoreOptions options) const {
    const int64_t size = options.mask_type == attention::MaskTensor::kBool    ? 1
                         : options.mask_type == attention::MaskTensor::kAlibi ? 4
                                                                              : size_;
    if (options.mask != nullptr) options.mask = advance(options.mask, sequence_ * options.mask_stride_batch * size);
    return options;
  }

 private:
  static const void* advance(const void* tensor, int64_t bytes) {
    return tensor == nullptr ? nullptr : static_cast<const char*>(tensor) + bytes;
  }
  static void* advance(void* tensor, int64_t bytes) {
    return tensor == nullptr ? nullptr : static_cast<char*>(tensor) + bytes;
  }

  const int64_t size_;
  const int64_t sequence_;
  const bool has_ragged_rows_;
  const bool has_pages_;
  const Extent rows_;
  const Extent keys_;
  const int64_t heads_q_;
};

}  // namespace flashmoe::cpu
