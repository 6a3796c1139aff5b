// Chunks over a cache of 8-bit floats (e4m3): TMA loads codes, and one warpgroup converts them, exactly, to the
// elements that a 16-bit kernel would have loaded. The consumers apply the scales of a sequence: that of keys to the
// scores, that of values to the output. Scales of pages are applied to the elements, which are rounded as in a
// dequantised copy (append/dequantize.cuh).
//
// A thread converts one row of each block, or of its slab of 128 columns: K, then V, and so on.
#pragma once

#include "attention/forward/sm90/varlen/codes.cuh"
#include "attention/forward/sm90/varlen/forward.cuh"
#include "device/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm90 {

template <typename Spec>
struct CodeConverter {
  using Element = typename Spec::Element;
  static constexpr int kChunks = 4;  // chunks of 16 codes, whose elements fill a row of a slab
  static_assert(Spec::KeyTile::kBytes == Spec::ValueTile::kBytes, "K and V are converted by the same instructions");

  const ForwardParams& params;
  const SharedMemory<Spec> shared;
  const int row;                   // row of a block
  const int code_slab;             // slab of its codes
  unsigned swizzled[2 * kChunks];  // offset of each 16 bytes of the thread's row in a slab
  RingPosition<Spec::kCodeSlots> code;
  RingPosition<Spec::kNumStages> element;
  // For keys of `batch` and `kv_head`: codes become codes & and_mask ^ xor_mask.
  int batch = -1;
  int kv_head = -1;
  uint32_t and_mask = 0xffffffffu;
  uint32_t xor_mask = 0;
  bool is_odd = false;  // and_mask and xor_mask change codes
  // If pages have scales: those of the row's key. They are loaded while the previous block is converted: the page
  // number before K, the scales before V.
  struct PageScales {
    float key;
    float value;
  };
  PageScales scales = {1.0f, 1.0f};
  PageScales next_scales = {1.0f, 1.0f};
  int next_page = kNoPage;
  int next_first = -1;  // first key of the block that they are for
  static constexpr int kNoPage = -1;

  __device__ __forceinline__ CodeConverter(const ForwardParams& params_, const SharedMemory<Spec>& shared_)
      : params(params_),
        shared(shared_),
        row(ptx::thread_index() % Spec::kBlockN),
        code_slab(ptx::thread_index() % 128 / Spec::kBlockN) {
    const unsigned of_block = row;
#pragma unroll
    for (unsigned i = 0; i < 2 * kChunks; ++i) swizzled[i] = of_block * kSlabRowBytes + (i ^ of_block % 8) * 16;
  }

  __device__ __forceinline__ void read_scale(const CodeBlock& block) {
    batch = block.batch;
    kv_head = block.kv_head;
    const float scale = scale_of(of_codes(params).k_scale, batch, kv_head);
    and_mask = 0xffffffffu;
    xor_mask = 0;
    is_odd = !is_positive(scale);
    if (!is_odd) return;
    if (is_positive(-scale)) {
      xor_mask = 0x80808080u;
    } else {
      and_mask = 0;
      xor_mask = scale == 0.0f ? 0 : 0x7f7f7f7fu;  // NaN
    }
  }

  // The page number in the table for the row's key, in a block that begins at `first`.
  __device__ __forceinline__ int find_page(const CodeBlock& block, int first) const {
    if (first + row >= block.first + block.keys) return kNoPage;
    const Batch& sequences = params.sequences;
    return load_length(sequences.block_table + block.batch * sequences.block_table_stride +
                       (first + row) / sequences.page_size);
  }
  // Zero for a page that does not exist; its codes are zeros.
  __device__ __forceinline__ PageScales find_scales(int page) const {
    const auto find = [&](const CacheScale& scale) {
      if (!scale.is_of_pages) return 1.0f;
      if (page < 0 || page >= params.sequences.num_pages) return 0.0f;
      return scale.factor * ptx::ld_global_float(scale.values + page * scale.stride + kv_head * scale.head_stride);
    };
    return PageScales{find(of_codes(params).k_scale), find(of_codes(params).v_scale)};
  }
  __device__ __forceinline__ void look_ahead(const CodeBlock& block, bool is_key, bool is_new) {
    if (is_key) {
      scales = is_new || block.first != next_first ? find_scales(find_page(block, block.first)) : next_scales;
      next_first = block.first + Spec::kBlockN;
      next_page = find_page(block, next_first);
    } else {
      next_scales = find_scales(next_page);
    }
  }

  // Converts a row. kOfPages: multiplies it by `scale`, which is one if only the other tensor has scales of pages.
  template <bool kOfPages>
  __device__ __forceinline__ void convert_row(const CodeBlock& block, const unsigned char* codes_smem,
                                              unsigned char* elements_smem, bool changes, float scale) const {
    // One loop for both slabs, as for K and V: instructions that miss the cache cost a warp more than the jump.
#pragma unroll 1
    for (int slab = 0; slab < Spec::kNumSlabs / Spec::kCodeSlabs; ++slab, elements_smem += Spec::KeyTile::kSlabBytes) {
      // Load all chunks before converting the first: waiting for each takes twice as long.
      uint32_t codes[kChunks][4];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        ptx::ld_shared_128(codes[chunk], codes_smem + (swizzled[chunk] ^ slab * (kChunks * 16)));
      if (block.keys < Spec::kBlockN || changes) {
        const uint32_t kept = row >= block.keys ? 0 : changes ? and_mask : 0xffffffffu;
        const uint32_t flipped = row < block.keys && changes ? xor_mask : 0;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
          for (int i = 0; i < 4; ++i) codes[chunk][i] = codes[chunk][i] & kept ^ flipped;
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t four = codes[chunk][2 * half + i];
            uint32_t pairs[2];
            if constexpr (kOfPages) {
              float values[4];
              ptx::widen_e4m3(values, four);
              pairs[0] = pack<Element>(values[0] * scale, values[1] * scale);
              pairs[1] = pack<Element>(values[2] * scale, values[3] * scale);
            } else {
              ptx::unpack_e4m3<Element>(pairs, four);
            }
            words[2 * i] = pairs[0];
            words[2 * i + 1] = pairs[1];
          }
          ptx::st_shared_128(elements_smem + swizzled[2 * chunk + half], words);
        }
    }
  }

  // Converts K or V of the next block; returns false if there is none. Rows past the last key become zeros.
  template <bool kOfPages>
  __device__ __forceinline__ bool convert(bool is_key) {
    ptx::mbarrier_wait(shared.codes_full(code.stage), code.parity);
    const auto block = read_tile<CodeBlock>(shared.code_block(code.stage));
    if (block.keys == CodeBlock::kEnd) return false;
    const bool is_new = is_key && (block.batch != batch || block.kv_head != kv_head);
    if (is_new) read_scale(block);
    if constexpr (kOfPages) look_ahead(block, is_key, is_new);
    const bool changes = is_key && is_odd;
    ptx::Mbarrier* full = is_key ? shared.key_full(element.stage) : shared.value_full(element.stage);
    ptx::mbarrier_wait(is_key ? shared.key_empty(element.stage) : shared.value_empty(element.stage),
                       element.parity ^ 1);
    const unsigned char* codes_smem = shared.codes(code.stage).slab(code_slab);
    const auto tile = is_key ? shared.key(element.stage) : shared.value(element.stage);
    convert_row<kOfPages>(block, codes_smem, tile.slab(2 * code_slab), changes, is_key ? scales.key : scales.value);
    // Hazard: the tensor cores read the elements before these stores are visible to them.
    ptx::fence_proxy_async_shared();
    ptx::warp_sync();
    if (ptx::lane_index() == 0) {
      ptx::mbarrier_arrive(full);
      ptx::mbarrier_arrive(shared.codes_empty(code.stage));
    }
    code.advance();
    return true;
  }

  template <bool kOfPages>
  __device__ __forceinline__ void run_loop() {
    for (bool is_key = true; convert<kOfPages>(is_key); is_key = !is_key) {
      if (!is_key) element.advance();
    }
  }
  // Two loops: each takes 3% longer if the other's instructions are in between.
  __device__ __forceinline__ void run() {
    if ((of_codes(params).k_scale.is_of_pages | of_codes(params).v_scale.is_of_pages) != 0) {
      run_loop<true>();
    } else {
      run_loop<false>();
    }
  }
};

template <typename Spec>
__device__ __forceinline__ void forward_codes(const E4m3ForwardParams& params, const ptx::TensorMap& q_map,
                                              const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                              const ptx::TensorMap& out_map) {
  static_assert(Spec::kConvertsCodes, "kernels without codes take ForwardParams");
  run_varlen<Spec, ForwardParams, Consumer<Spec, MaskKind::kRuntime>, CodeConverter<Spec>>(
      params.forward, params.forward, q_map, k_map, v_map, out_map);
}

}  // namespace flashmoe::attention::sm90
