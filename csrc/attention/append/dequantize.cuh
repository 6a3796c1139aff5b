// A cache of 8-bit floats (e4m3) as one of 16 bits: each sequence's keys and values behind each other, times their scales. Keys past a sequence's
// end, and those that no row's window reaches, stay unwritten. Grid: any; blocks of threads take units of kUnitKeys keys of a head, in turn, heads first.
#pragma once

#include "attention/append/append.cuh"
#include "attention/params/e4m3.h"
#include "device/math.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashmoe::attention {

template <typename Spec>
struct Dequantizer {
  using Element = typename Spec::Element;
  static constexpr int kUnitKeys = 32;
  static constexpr int kCodes = 8;   // of a thread at a time: what a warp stores is one range of 512 bytes
  static constexpr int kAtOnce = 4;  // that are on their way together

  const DequantizeParams& params;
  const int key_parts;  // of a row of K
  const int parts;      // and of V
  const int rows;       // that the threads take at a time
  const int row;
  int part;
  bool is_value;

  __device__ __forceinline__ explicit Dequantizer(const DequantizeParams& params_)
      : params(params_),
        key_parts(params_.head_dim / kCodes),
        parts(key_parts + params_.head_dim_v / kCodes),
        rows(Spec::kNumThreads / parts),
        row(ptx::thread_index() / parts),
        part(ptx::thread_index() - row * parts),
        is_value(part >= key_parts) {
    if (is_value) part -= key_parts;
  }

  struct KeyLocation {
    int page;  // or sequence
    int row;
    bool is_there;  // a window may have left its page behind: its keys are zeros, because a kernel reads whole blocks
  };
  __device__ __forceinline__ KeyLocation locate(int batch, int key) const {
    const Batch& sequences = params.sequences;
    if (sequences.block_table == nullptr) return KeyLocation{batch, key, true};
    const int index = key / sequences.page_size;
    const int page = load_length(sequences.block_table + batch * sequences.block_table_stride + index);
    const bool is_there = page >= 0 && page < sequences.num_pages;
    return KeyLocation{is_there ? page : 0, key - index * sequences.page_size, is_there};
  }

  // Keys from `first` on, as far as the unit and the sequence have any.
  __device__ __forceinline__ void convert(int batch, int head, int first, int keys) const {
    if (first >= keys || row >= rows) return;
    const Strides& stride = is_value ? params.v_stride : params.k_stride;
    const CacheScale& of = is_value ? params.v_scale : params.k_scale;
    const int columns = is_value ? params.head_dim_v : params.head_dim;
    const unsigned char* from_gmem =
        static_cast<const unsigned char*>(is_value ? params.v : params.k) + head * stride.head + part * kCodes;
    Element* to_gmem = static_cast<Element*>(is_value ? params.v_out : params.k_out) +
                       ((static_cast<int64_t>(batch) * params.heads_kv + head) * params.seq_k + first) * columns +
                       part * kCodes;
    const auto scale_at = [&](const KeyLocation& location) {
      if (!location.is_there) return 0.0f;
      if (of.values == nullptr) return of.factor;
      const int64_t index = of.is_of_pages ? location.page : batch;
      return of.factor * ptx::ld_global_float(of.values + index * of.stride + head * of.head_stride);
    };
    const auto store = [&](int of_unit, const uint32_t (&codes)[2], float scale) {
      uint32_t elements[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[4];
        ptx::widen_e4m3(values, codes[half]);
        elements[2 * half] = pack<Element>(values[0] * scale, values[1] * scale);
        elements[2 * half + 1] = pack<Element>(values[2] * scale, values[3] * scale);
      }
      ptx::st_global_128(to_gmem + of_unit * columns, elements);
    };
    const int end = minimum(kUnitKeys, keys - first);
    if (params.sequences.block_table != nullptr && params.sequences.page_size % kUnitKeys != 0) {
      for (int of_unit = row; of_unit < end; of_unit += rows) {
        const KeyLocation location = locate(batch, first + of_unit);
        uint32_t codes[2] = {0, 0};
        if (location.is_there)
          ptx::ld_global_64(codes, from_gmem + location.page * stride.batch + location.row * stride.row);
        store(of_unit, codes, scale_at(location));
      }
      return;
    }
    const KeyLocation start = locate(batch, first);
    const float scale = scale_at(start);
    from_gmem += start.page * stride.batch + start.row * stride.row;
    for (int next = row; next < end; next += kAtOnce * rows) {
      uint32_t codes[kAtOnce][2] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (next + i * rows < end && start.is_there)
          ptx::ld_global_64(codes[i], from_gmem + (next + i * rows) * stride.row);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (next + i * rows < end) store(next + i * rows, codes[i], scale);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int heads = params.batch * params.heads_kv;
    const int of_sequence = ceil_div(params.read_keys, kUnitKeys) + (params.read_keys < params.seq_k);
    for (int index = ptx::block_index(); index < of_sequence * heads; index += ptx::grid_size()) {
      const int unit = index / heads;
      const int batch = (index - unit * heads) / params.heads_kv;
      const int head = index - unit * heads - batch * params.heads_kv;
      const int keys = key_extent(params, batch).length;
      convert(batch, head, (maximum(0, keys - params.read_keys) / kUnitKeys + unit) * kUnitKeys, keys);
    }
  }
};

template <typename Spec>
__device__ __forceinline__ void dequantize_e4m3(const DequantizeParams& params) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  Dequantizer<Spec>(params).run();
}

}  // namespace flashmoe::attention
