// Chunks over a cache of 8-bit floats (e4m3): the copy engine brings codes, and a warpgroup makes the elements of them that a kernel over 16 bits
// would have loaded, exactly. Scales are the consumers' business: that of keys multiplies the scores, that of values the output.
//
// A thread has a row of each block: K, then V, and so on.
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
  static constexpr int kChunks = Spec::kHeadDim / 16;
  static constexpr int kAtOnce = 4;

  const ForwardParams& params;
  const SharedMemory<Spec> shared;
  const int row;  // of a block
  RingPosition<Spec::kCodeSlots> code;
  RingPosition<Spec::kNumStages> key;
  RingPosition<Spec::kNumStages> value;
  // Of the keys of `batch` and `kv_head`: codes & keep ^ flip.
  int batch = -1;
  int kv_head = -1;
  uint32_t keep = 0xffffffffu;
  uint32_t flip = 0;
  bool is_odd = false;  // these change codes

  __device__ __forceinline__ CodeConverter(const ForwardParams& params_, const SharedMemory<Spec>& shared_)
      : params(params_), shared(shared_), row(ptx::thread_index() % 128) {}

  __device__ __forceinline__ void read_scale(const CodeBlock& block) {
    if (block.batch == batch && block.kv_head == kv_head) return;
    batch = block.batch;
    kv_head = block.kv_head;
    const float scale = scale_of(of_codes(params).k_scale, batch, kv_head);
    keep = 0xffffffffu;
    flip = 0;
    is_odd = !is_positive(scale);
    if (!is_odd) return;
    if (is_positive(-scale)) {
      flip = 0x80808080u;
    } else {
      keep = 0;
      flip = scale == 0.0f ? 0 : 0x7f7f7f7fu;  // NaN
    }
  }

  // The next block's, if there is one, to `tile`. Rows that are no keys become zeros.
  template <bool kIsKey, typename Tile>
  __device__ __forceinline__ bool convert(Tile tile, ptx::Mbarrier* full, ptx::Mbarrier* empty, int parity) {
    ptx::mbarrier_wait(shared.codes_full(code.stage), code.parity);
    const auto block = read_tile<CodeBlock>(shared.code_block(code.stage));
    if (block.keys == CodeBlock::kEnd) return false;
    if constexpr (kIsKey) read_scale(block);
    const auto codes_of_block = shared.codes(code.stage);
    const bool is_whole = block.keys >= Spec::kBlockN && !(kIsKey && is_odd);
    const bool is_key = row < block.keys;
    // Several chunks before the first element: a warp that waits for each takes twice as long.
#pragma unroll
    for (int first = 0; first < kChunks; first += kAtOnce) {
      uint32_t codes[kAtOnce][4];
#pragma unroll
      for (int chunk = 0; chunk < kAtOnce; ++chunk)
        ptx::ld_shared_128(codes[chunk], codes_of_block.chunk(row, 0, first + chunk));
      if (!is_whole) {
#pragma unroll
        for (int chunk = 0; chunk < kAtOnce; ++chunk)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (kIsKey) codes[chunk][i] = codes[chunk][i] & keep ^ flip;
            if (!is_key) codes[chunk][i] = 0;
          }
      }
      if (first == 0) ptx::mbarrier_wait(empty, parity ^ 1);
#pragma unroll
      for (int chunk = 0; chunk < kAtOnce; ++chunk)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t pairs[2];
            ptx::unpack_e4m3<Element>(pairs, codes[chunk][2 * half + i]);
            words[2 * i] = pairs[0];
            words[2 * i + 1] = pairs[1];
          }
          ptx::st_shared_128(tile.chunk(row, (first + chunk) / 4, (first + chunk) % 4 * 2 + half), words);
        }
    }
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

  __device__ __forceinline__ void run() {
    while (convert<true>(shared.key(key.stage), shared.key_full(key.stage), shared.key_empty(key.stage), key.parity)) {
      key.advance();
      convert<false>(shared.value(value.stage), shared.value_full(value.stage), shared.value_empty(value.stage),
                     value.parity);
      value.advance();
    }
  }
};

template <typename Spec>
__device__ __forceinline__ void forward_codes(const E4m3ForwardParams& params, const ptx::TensorMap& q_map,
                                              const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                              const ptx::TensorMap& out_map) {
  static_assert(Spec::kConvertsCodes, "others take ForwardParams");
  run_varlen<Spec, ForwardParams, Consumer<Spec, MaskKind::kRuntime>, CodeConverter<Spec>>(
      params.forward, params.forward, q_map, k_map, v_map, out_map);
}

}  // namespace flashmoe::attention::sm90
