// A consumer warpgroup of the varlen kernels: the dense consumer's products and rings, over key blocks that a band bounds at both ends.
#pragma once

#include "attention/forward/sm90/consumer.cuh"
#include "attention/forward/sm90/varlen/epilogue.cuh"
#include "attention/forward/sm90/varlen/schedule.cuh"
#include "attention/forward/sm90/varlen/scores.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

template <typename Spec>
struct VarlenConsumer : Consumer<Spec, MaskKind::kRuntime> {
  using Base = Consumer<Spec, MaskKind::kRuntime>;
  using Base::consumer;
  using Base::params;
  using Base::query;
  using Base::shared;
  using typename Base::Element;
  static constexpr int kScores = Base::kScores;
  static constexpr int kProbabilities = Base::kProbabilities;
  static constexpr int kOutputs = Base::kOutputs;

  const bool has_functions;  // scores pass through a mask tensor, and a softcap before it
  const bool is_capped;      // a softcap alone, which is the softmax's
  bool has_output = false;   // a tile went before this one (release_output)
  const float scale_log2;    // of what leaves the functions: with an additive mask the scores have it already

  __device__ __forceinline__ VarlenConsumer(const ForwardParams& params_, const SharedMemory<Spec>& shared_,
                                            int consumer_)
      : Base(params_, shared_, consumer_),
        has_functions(Spec::kHasScoreFunctions && params_.score_options.mask_type != MaskTensor::kNone),
        is_capped(Spec::kHasScoreFunctions && !has_functions),
        scale_log2(has_functions && params_.score_options.mask_type == MaskTensor::kAdditive ? 1.0f
                                                                                             : params_.scale_log2) {}

  // The first of this thread's two rows; the other is 8 further on.
  __device__ __forceinline__ int thread_row(const VarlenTile& tile) const {
    return tile.m_block * Spec::kBlockM + consumer * 64 + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4;
  }

  // Softcap and mask tensor. Before the band's ends, so that -inf stays -inf.
  __device__ __forceinline__ void change_scores(float (&scores)[kScores], const VarlenTile& tile, int block) const {
    const ScoreOptions& options = params.score_options;
    if (options.score_factor > 0.0f) cap_scores<Spec::kBlockN>(scores, options.score_factor);
    const int first_key = block * Spec::kBlockN + ptx::lane_index() % 4 * 2;
    const MaskReader<Element> reader(options, tile, first_key, (block + 1) * Spec::kBlockN);
    const int row = thread_row(tile);
    if (options.mask_type == MaskTensor::kBool) {
      reader.template hide<Spec::kBlockN>(scores, row);
    } else {
      reader.template add<Spec::kBlockN>(scores, row, params.scale_log2, options.mask_factor * params.scale_log2);
    }
  }

  __device__ __forceinline__ void mask_block(float (&scores)[kScores], const VarlenTile& tile, int block) const {
    const int row = thread_row(tile);
    const int first_key = block * Spec::kBlockN + ptx::lane_index() % 4 * 2;
    const VarlenSequence sequence = tile.sequence(params);
    const KeyRange keys[2] = {visible_keys(sequence, row), visible_keys(sequence, row + 8)};
    const int visible[2] = {keys[0].end - first_key, keys[1].end - first_key};
    mask_scores<Spec::kBlockN>(scores, visible);
    if (params.score_options.left >= kUnbounded) return;
    const int hidden[2] = {keys[0].begin - first_key, keys[1].begin - first_key};
    mask_scores_before<Spec::kBlockN>(scores, hidden);
  }

  // What a step does to the scores of its block: nothing, the band's mask, and a softcap before either; a mask tensor, a softcap before
  // it, and the band's mask where the block needs one.
  enum class Step { kPlain, kMasked, kCapped, kCappedMasked, kFunctions };

  __device__ __forceinline__ Softcap softcap() const {
    return Softcap{params.score_options.score_factor, params.scale_log2};
  }

  // As Consumer::step, whose comments hold.
  template <Step kStep>
  __device__ __forceinline__ void step(float (&output)[kOutputs], uint32_t (&probabilities)[kProbabilities],
                                       RowState& rows, const VarlenTile& tile, int block, bool is_masked = true) {
    float scores[kScores];
    this->wait_key();
    if constexpr (Base::kWaitsForBoth) this->wait_value();
    this->issue_scores(scores);
    if constexpr (!Base::kWaitsForBoth) this->wait_value();
    this->issue_output(output, probabilities);

    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operands(scores);
    this->release_key();
    if constexpr (kStep == Step::kFunctions) change_scores(scores, tile, block);
    if constexpr (kStep != Step::kPlain && kStep != Step::kCapped) {
      if (is_masked) mask_block(scores, tile, block);
    }
    float rescale[2];
    bool moved;
    if constexpr (kStep == Step::kCapped || kStep == Step::kCappedMasked) {
      moved = capped_softmax<Element, Spec::kBlockN, kStep == Step::kCappedMasked>(scores, rows, rescale, softcap());
    } else {
      moved = online_softmax<Spec::kBlockN, kStep != Step::kPlain>(scores, rows, rescale, scale_log2);
    }

    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(output);
    this->release_value();
    if (moved) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] *= rescale[(i / 2) % 2];
    }
    pack_operand<Element>(probabilities, scores);
  }

  // The buffer of the tile before, where the output took the place of Q: once its store has read it.
  __device__ __forceinline__ void release_output() {
    if constexpr (Spec::kHasOutputInQuery) {
      if (ptx::thread_index() % 128 == 0) ptx::tma_store_wait_read<0>();
      if (has_output) this->release(shared.query_empty(query.stage ^ 1, consumer));
      has_output = true;
    }
  }

  // Blocks of the tile that this warpgroup's rows see, at least one of its range.
  __device__ __forceinline__ KeyRange own_blocks(const VarlenSequence& sequence, int first_row,
                                                 const KeyRange& range) const {
    const KeyRange seen = seen_blocks<Spec>(sequence, first_row, first_row + 64);
    const int begin = maximum(range.begin, minimum(seen.begin, range.end - 1));
    return KeyRange{begin, maximum(begin + 1, minimum(seen.end, range.end))};
  }

  // The whole tile but the epilogue: key blocks range.end - 1 down to range.begin.
  __device__ __forceinline__ void attend(const VarlenTile& tile, const KeyRange& range, const KeyRange& own,
                                         int first_row, float (&output)[kOutputs], RowState& rows,
                                         float (&sink_log2)[2]) {
    const VarlenSequence sequence = tile.sequence(params);
    for (int block = range.end; block > own.end; --block) this->skip_block();

    // Every row of the warpgroup sees all keys of the blocks from full.begin to full.end - 1.
    const int last_row = minimum(first_row + 64, tile.rows) - 1;
    const KeyRange full{ceil_div(visible_keys(sequence, last_row).begin, Spec::kBlockN),
                        visible_keys(sequence, first_row).end / Spec::kBlockN};
    const auto is_masked = [&](int block) { return block >= full.end || block < full.begin; };
    int block = own.end - 1;
    uint32_t probabilities[kProbabilities];
    {
      float scores[kScores];
      float rescale[2];
      this->wait_key();
      this->issue_scores(scores);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(scores);
      this->release_key();
      release_output();
      if (has_functions) change_scores(scores, tile, block);
      if (is_masked(block)) mask_block(scores, tile, block);
      if (is_capped) {
        capped_softmax<Element, Spec::kBlockN, true>(scores, rows, rescale, softcap());
      } else {
        online_softmax<Spec::kBlockN, true>(scores, rows, rescale, scale_log2);
      }
      pack_operand<Element>(probabilities, scores);
    }
    --block;
    const int plain_begin = maximum(own.begin, full.begin);
    // Blocks that need no mask are a loop of their own: inside one loop for both they would be an eighth slower.
    const auto steps = [&](auto masked, auto plain) {
      while (block >= own.begin) {
        if (is_masked(block)) {
          masked();
          --block;
          continue;
        }
        do plain();
        while (--block >= plain_begin);
      }
    };
    if constexpr (!Spec::kHasScoreFunctions) {
      steps([&] { step<Step::kMasked>(output, probabilities, rows, tile, block); },
            [&] { step<Step::kPlain>(output, probabilities, rows, tile, block); });
    } else if (is_capped) {
      steps([&] { step<Step::kCappedMasked>(output, probabilities, rows, tile, block); },
            [&] { step<Step::kCapped>(output, probabilities, rows, tile, block); });
    } else {
      for (; block >= own.begin; --block)
        step<Step::kFunctions>(output, probabilities, rows, tile, block, is_masked(block));
    }
    load_sinks(params, tile, thread_row(tile), sink_log2);
    if constexpr (!Spec::kHasOutputInQuery) this->release_query();
    this->wait_value();
    this->issue_output(output, probabilities);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(output);
    this->release_value();
  }

  // Rows of Q past the end of a ragged sequence are the next one's: they become zeros, so that no result depends on them (the maximum
  // moves for all rows of a warp at once).
  __device__ __forceinline__ void clear_query_tail(const VarlenTile& tile, int first_row) const {
    const int rows = tile.rows - first_row;
    if (rows >= 64 || params.sequences.cu_seqlens_q == nullptr) return;
    const auto query_rows = shared.query(query.stage, consumer);
    const uint32_t zeros[4] = {0, 0, 0, 0};
    const int thread = ptx::thread_index() % 128;
    for (int row = rows + thread / 8; row < 64; row += 16) {
#pragma unroll
      for (int slab = 0; slab < Spec::kNumSlabs; ++slab) {
        ptx::st_shared_128(query_rows.row(row, slab) + thread % 8 * 16, zeros);
      }
    }
    // Hazard: the tensor cores read Q before all of it is cleared and visible to them.
    ptx::fence_proxy_async_shared();
    sync_consumer(consumer);
  }

  __device__ __forceinline__ void run(const ptx::TensorMap& out_map) {
    while (true) {
      ptx::mbarrier_wait(shared.query_full(query.stage, consumer), query.parity);
      const VarlenTile tile = read_varlen_tile(shared.tile(query.stage, consumer));
      ptx::warp_sync();  // all lanes have read it before the first one can release it
      if (tile.m_block < 0) break;
      const int first_row = tile.m_block * Spec::kBlockM + consumer * 64;
      const KeyRange range = tile.blocks;
      if (first_row >= tile.rows) {
        // Rows past the end: nothing to compute or to store.
        if constexpr (Spec::kHasOutputInQuery) {
          release_output();
          query.advance();
        } else {
          this->release_query();
        }
        for (int block = range.end; block > range.begin; --block) this->skip_block();
        continue;
      }
      clear_query_tail(tile, first_row);
      float output[kOutputs];
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] = 0.0f;
      RowState rows = {{ptx::negative_infinity(), ptx::negative_infinity()}, {0.0f, 0.0f}};
      float sink_log2[2];
      const KeyRange own = own_blocks(tile.sequence(params), first_row, range);
      attend(tile, range, own, first_row, output, rows, sink_log2);
      const int row = thread_row(tile);
      float inverse_sum[2];
      float lse[2];
      if (is_capped) {  // from here on, maxima are exponents
        rows.max[0] = softcap().exponent_of_max(rows.max[0]);
        rows.max[1] = softcap().exponent_of_max(rows.max[1]);
      }
      finish_rows(params, rows, is_capped ? 1.0f : scale_log2, sink_log2, inverse_sum, lse);
      store_varlen_lse(params, tile, row, lse);
      typename Spec::OutputTile output_smem = shared.output(consumer);
      if constexpr (Spec::kHasOutputInQuery) output_smem = shared.query(query.stage, consumer);
      store_varlen_tile<Spec>(params, shared, out_map, tile, consumer, output_smem, output, inverse_sum);
      if constexpr (Spec::kHasOutputInQuery) query.advance();
      for (int left = own.begin; left > range.begin; --left) this->skip_block();
    }
    // Hazard: the last store still reads the buffer when the block, and with it its shared memory, is gone.
    if (ptx::thread_index() % 128 == 0) ptx::tma_store_wait_read<0>();
  }
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
