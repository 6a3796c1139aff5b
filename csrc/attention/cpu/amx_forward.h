// One task of a 16-bit type on the tile unit. Query rows are tile rows and keys are in the lanes (S = Q K^T, O = P V),
// unlike in forward_simd.h. Without row maxima (amx_weights.h) a row's keys may come in any order: so K and V are
// packed a few blocks of 32 columns at a time (32 keys, or 32 of head_dim), and all row blocks use them while they are
// in the L1 cache. Include after vector_avx512.h. Internal linkage.
//
// The work is a sequence of products of 32 x 32 elements. The vector work on a product, its epilogue, runs between the
// instructions of the next product: the processor overlaps the two if they are a few hundred instructions apart.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/cpu/amx_weights.h"
#include "attention/cpu/mask.h"
#include "attention/cpu/operands.h"
#include "attention/cpu/softmax.h"
#include "cpu/amx_pack.h"
#include "cpu/amx_tiles.h"
#include "cpu/rows.h"

namespace flashmoe::cpu {
namespace {

static_assert(kBlockRows == 2 * kTileRows && kBlockRows == kStep, "a row block is two tiles high and a step of keys");

// Keys per pass over the blocks of K and then of V. With more keys the sums of products are loaded and stored less
// often, but the weights of a task (256 KiB per plane) have to fit the L2 cache.
constexpr int32_t kPassKeys = 512;
constexpr int32_t kPassSteps = kPassKeys / kStep;
// Column blocks per read of Q and of the weights.
template <int kPlanes>
constexpr int32_t kColumnBlocksAtOnce = 2 / kPlanes;

inline int32_t steps_of(int32_t count) { return (count + kStep - 1) / kStep; }

template <class T>
struct AmxScratch {
  static constexpr int kPlanes = kPlanesOf<T>;

  float* product;     // [2][32, 32]
  uint32_t* columns;  // [kColumnBlocksAtOnce][max(padded_dim, kPassKeys) / 32 steps][planes][2] tiles of K or V
  uint16_t* weights;  // [row_blocks][kPassSteps][planes][32, 32]
  uint16_t* ones;     // a tile
  float* sum;         // [row_blocks, 32]
  float* zero;        // [32], zeros: the maxima, which are not subtracted
  float* exact_sum;   // [row_blocks, 32, 16], for bf16 if the log-sum-exp is needed
  float* out;         // [row_blocks][padded_dim / 32][32, 32], if there are several passes
  uint16_t* q;        // [row_blocks][planes][32, padded_dim], if Q is not used in place
  T* whole;           // [32, padded_dim], if K or V is not used in place
  size_t bytes;

  static int64_t column_block_words(int32_t padded_dim) {
    return (padded_dim > kPassKeys ? padded_dim : kPassKeys) / kStep * kPlanes * 2 * kTileWords;
  }

  AmxScratch(void* base, int32_t row_blocks, int32_t padded_dim) {
    Arena arena(base);
    product = arena.take<float>(2 * kProductFloats);
    columns = arena.take<uint32_t>(kColumnBlocksAtOnce<kPlanes> * column_block_words(padded_dim));
    weights = arena.take<uint16_t>(int64_t{row_blocks} * kPassSteps * kPlanes * kBlockRows * kStep);
    ones = arena.take<uint16_t>(kTileWords * 2);
    sum = arena.take<float>(int64_t{row_blocks} * kBlockRows);
    zero = arena.take<float>(kBlockRows);
    exact_sum = arena.take<float>(int64_t{row_blocks} * kBlockRows * Vector::kWidth);
    out = arena.take<float>(int64_t{row_blocks} * kBlockRows * padded_dim);
    q = arena.take<uint16_t>(int64_t{row_blocks} * kPlanes * kBlockRows * padded_dim);
    whole = arena.take<T>(int64_t{kStep} * padded_dim);
    bytes = arena.used();
  }
};

template <class T>
class AmxForward {
 public:
  AmxForward(const Task& task, void* memory)
      : task_(task),
        params_(*task.params),
        operands_(task),
        mask_(task),
        head_dim_(params_.head_dim),
        padded_dim_(round_up(head_dim_, kStep)),
        row_blocks_(row_block_count(task.row_end - task.row_begin)),
        key_end_(
            clamp(round_up(mask_.keys(task.row_begin, task.row_end - task.row_begin).end, kStep), 0, params_.seq_k)),
        scale_log2_(params_.scale * kLog2E),
        scratch_(memory, row_blocks_, padded_dim_) {}

  // Returns a bit for each row block that was given up: scores outside the window, or output that is not finite.
  uint32_t run() {
    for (int32_t i = 0; i < 2 * kTileWords; ++i) scratch_.ones[i] = 0x3f80;
    memset(scratch_.sum, 0, static_cast<size_t>(row_blocks_) * kBlockRows * sizeof(float));
    memset(scratch_.zero, 0, kBlockRows * sizeof(float));
    if (sums_exactly()) {
      memset(scratch_.exact_sum, 0, static_cast<size_t>(row_blocks_) * kBlockRows * Vector::kWidth * sizeof(float));
    }
    for (int32_t block = 0; block < row_blocks_; ++block) {
      if (visible_end(block) == 0) store_unseeing(block);
      const int64_t stride = params_.q_stride.row;
      q_[block] = pack_left(operands_.q + first_row(block) * stride, stride, height(block), head_dim_, padded_dim_,
                            scratch_.whole, scratch_.q + int64_t{block} * kPlanes * kBlockRows * padded_dim_);
    }
    for (int32_t key = 0; key < key_end_ && !all_need_fallback(); key += kPassKeys) {
      run_pass(key, clamp(int64_t{key_end_} - key, 0, kPassKeys));
    }
    return fallback_blocks_;
  }

 private:
  static constexpr int kPlanes = kPlanesOf<T>;
  static constexpr int32_t kAtOnce = kColumnBlocksAtOnce<kPlanes>;
  // For fp16 the last plane pair is needed for the scores: without it the log-sum-exp of large scores would be off.
  static constexpr int kScorePairs = kPlanes * kPlanes, kOutputPairs = kPlanes == 1 ? 1 : 3;

  bool sums_exactly() const { return kPlanes == 1 && operands_.lse != nullptr; }

  int32_t first_row(int32_t block) const { return task_.row_begin + block * kBlockRows; }
  int32_t height(int32_t block) const { return clamp(task_.row_end - first_row(block), 0, kBlockRows); }
  // Keys that any of 32 rows from the block's first on would see, even if the task's end cuts the block short.
  int32_t visible_end(int32_t block) const { return mask_.keys(first_row(block), kBlockRows).end; }
  bool needs_fallback(int32_t block) const { return (fallback_blocks_ >> block & 1) != 0; }
  bool all_need_fallback() const { return fallback_blocks_ == (uint64_t{1} << row_blocks_) - 1; }
  void fall_back_if(bool condition, int32_t block) { fallback_blocks_ |= static_cast<uint32_t>(condition) << block; }
  void fall_back_unless_finite(__m512 x, int32_t block) {
    fall_back_if(Vector::any_differs(Vector::sub(x, x), Vector::zero()), block);
  }

  struct Pass {
    int32_t begin;
    int32_t keys;
    int32_t k_blocks;  // of 32 keys
    int32_t v_blocks;  // of 32 of head_dim
  };
  // Steps of 32 keys in the pass that any row of the block sees.
  int32_t visible_steps(const Pass& pass, int32_t block) const {
    return steps_of(clamp(int64_t{visible_end(block)} - pass.begin, 0, pass.keys));
  }
  bool is_last(const Pass& pass, int32_t block) const { return visible_end(block) <= pass.begin + kPassKeys; }
  // Whether the row block sees a key of the block of K.
  bool takes_part(const Pass& pass, int32_t block, int32_t k_block) const {
    return !needs_fallback(block) && k_block < visible_steps(pass, block);
  }

  // The buffer of a column block of K or V; kAtOnce of them are packed at a time.
  uint32_t* packed_columns(int32_t column_block) const {
    return scratch_.columns + column_block % kAtOnce * AmxScratch<T>::column_block_words(padded_dim_);
  }

  // Rows of step `step` of the pass: 32 keys, zero past the last.
  WholeRows<T> whole_rows(const Pass& pass, const T* rows, int64_t stride, int32_t step) const {
    const int32_t key = step * kStep;
    return make_whole(rows + (pass.begin + key) * stride, stride, clamp(pass.keys - key, 0, kStep), head_dim_,
                      padded_dim_, scratch_.whole);
  }

  void pack_k(const Pass& pass, int32_t k_block) const {
    const WholeRows<T> k = whole_rows(pass, operands_.k, params_.k_stride.row, k_block);
    uint32_t* step = packed_columns(k_block);
    for (int32_t dim = 0; dim < padded_dim_; dim += kStep, step += kPlanes * 2 * kTileWords) {
      pack_transposed(k.data + dim, k.stride, step);
    }
  }

  // Column blocks [begin, end).
  void pack_v(const Pass& pass, int32_t begin, int32_t end) const {
    for (int32_t step = 0; step < pass.k_blocks; ++step) {
      const WholeRows<T> v = whole_rows(pass, operands_.v, params_.v_stride.row, step);
      for (int32_t v_block = begin; v_block < end; ++v_block) {
        pack_rows(v.data + v_block * kBlockColumns, v.stride,
                  packed_columns(v_block) + step * kPlanes * 2 * kTileWords);
      }
    }
  }

  void run_pass(int32_t begin, int32_t keys) {
    const Pass pass = {begin, keys, steps_of(keys), padded_dim_ / kBlockColumns};
    for (int32_t k_block = 0; k_block < pass.k_blocks && !all_need_fallback(); k_block += kAtOnce) {
      compute_scores(pass, k_block, clamp(k_block + kAtOnce, 0, pass.k_blocks));
    }
    for (int32_t block = 0; block < row_blocks_; ++block) {
      if (!takes_part(pass, block, 0)) continue;
      if (epilogue_ == Epilogue::kWeights && row_block_ == block) drain(pass);  // its last weights are not yet computed
      run_product<0>(pass, Epilogue::kSums, block, 0, next_product(), weights_operand(block), scratch_.ones,
                     visible_steps(pass, block), nullptr);
    }
    for (int32_t v_block = 0; v_block < pass.v_blocks && !all_need_fallback(); v_block += kAtOnce) {
      compute_output(pass, v_block, clamp(v_block + kAtOnce, 0, pass.v_blocks));
    }
    drain(pass);
  }

  void compute_scores(const Pass& pass, int32_t begin, int32_t end) {
    for (int32_t k_block = begin; k_block < end; ++k_block) pack_k(pass, k_block);
    for (int32_t block = 0; block < row_blocks_; ++block) {
      for (int32_t k_block = begin; k_block < end; ++k_block) {
        if (!takes_part(pass, block, k_block)) continue;
        run_product<kScorePairs>(pass, Epilogue::kWeights, block, k_block, next_product(), q_[block],
                                 packed_columns(k_block), pass.v_blocks, nullptr);
      }
    }
  }

  void compute_output(const Pass& pass, int32_t begin, int32_t end) {
    pack_v(pass, begin, end);
    for (int32_t block = 0; block < row_blocks_; ++block) {
      if (!takes_part(pass, block, 0)) continue;
      const bool ends = is_last(pass, block);
      for (int32_t v_block = begin; v_block < end; ++v_block) {
        float* sums = scratch_.out + (int64_t{block} * pass.v_blocks + v_block) * kProductFloats;
        run_product<kOutputPairs>(pass, ends ? Epilogue::kOutput : Epilogue::kNone, block, v_block,
                                  ends ? next_product() : sums, weights_operand(block), packed_columns(v_block),
                                  visible_steps(pass, block), pass.begin == 0 ? nullptr : sums);
      }
    }
  }

  uint16_t* weights(int32_t block, int32_t step) const {
    return scratch_.weights + (int64_t{block} * kPassSteps + step) * kPlanes * kBlockRows * kStep;
  }
  LeftOperand weights_operand(int32_t block) const {
    return {weights(block, 0), kTileBytesPerRow, kPlanes * kStepBytes, kStepBytes};
  }

  // Alternates between two buffers for products.
  float* next_product() {
    is_odd_ = !is_odd_;
    return scratch_.product + (is_odd_ ? kProductFloats : 0);
  }

  enum class Epilogue { kNone, kWeights, kSums, kOutput };

  // Computes the product of a and b, added to `before` if that is not null, with kPairs plane pairs; or the row sums of
  // a if kPairs is 0. Also runs the epilogue of the previous product. Not inlined, it would cost a tenth of the time.
  template <int kPairs, class Right>
  inline __attribute__((always_inline)) void run_product(const Pass& pass, Epilogue epilogue, int32_t block,
                                                         int32_t column_block, float* product, const LeftOperand& a,
                                                         const Right* b, int32_t steps, const float* before) {
    const auto multiply = [&](int32_t begin, int32_t end) __attribute__((always_inline)) {
      if constexpr (kPairs == 0) {
        add_row_sums<kPlanes>(a, b, begin, end);
      } else {
        add_products<kPlanes, kPairs>(a, b, begin, end);
      }
    };
    const int32_t middle = (steps + 1) / 2;
    order_memory();
    if (before == nullptr) {
      clear_product();
    } else {
      load_product(before);
    }
    multiply(0, middle);
    order_memory();
    run_epilogue(pass, 0);
    order_memory();
    multiply(middle, steps);
    order_memory();
    run_epilogue(pass, kRowsAtOnce);
    order_memory();
    if (kPairs == 0) {
      store_row_sums(product);
    } else {
      store_product(product);
    }
    order_memory();
    epilogue_ = epilogue;
    row_block_ = block;
    column_block_ = column_block;
    product_ = product;
  }

  void drain(const Pass& pass) {
    run_epilogue(pass, 0);
    run_epilogue(pass, kRowsAtOnce);
    epilogue_ = Epilogue::kNone;
  }

  // For rows [row, row + kRowsAtOnce) of a product; kSums does all rows at row 0.
  inline __attribute__((always_inline)) void run_epilogue(const Pass& pass, int32_t row) {
    switch (epilogue_) {
      case Epilogue::kWeights:
        return make_weights(pass, row);
      case Epilogue::kSums:
        if (row == 0) add_sums(pass);
        return;
      case Epilogue::kOutput:
        return write_output(row);
      case Epilogue::kNone:
        return;
    }
  }

  void make_weights(const Pass& pass, int32_t row) {
    const float* product = product_ + row * kBlockColumns;
    const int32_t key = column_block_ * kStep;
    const BlockMask mask = mask_.block(first_row(row_block_) + row, pass.begin + key, clamp(pass.keys - key, 0, kStep));
    uint16_t* to = weights(row_block_, column_block_) + row * kStep;
    T* type = nullptr;
    const bool is_inside = mask.keys_of_all(kRowsAtOnce).end == kStep
                               ? scores_to_weights<false>(product, scale_log2_, mask, type, to)
                               : scores_to_weights<true>(product, scale_log2_, mask, type, to);
    fall_back_if(!is_inside, row_block_);
    if (sums_exactly()) {
      add_exact_weights(product, scale_log2_, mask,
                        scratch_.exact_sum + (int64_t{row_block_} * kBlockRows + row) * Vector::kWidth);
    }
  }

  // Adds the product's first column to the sums; after the last keys stores lse and inverts the sums.
  void add_sums(const Pass& pass) {
    float* sum = scratch_.sum + row_block_ * kBlockRows;
    const __m512i rows = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 5);
    static_assert(kBlockColumns == 1 << 5, "floats in a row of the product");
    for (int c = 0; c < kBlockVectors; ++c) {
      float* x = sum + c * Vector::kWidth;
      const __m512 added = _mm512_i32gather_ps(rows, product_ + c * kProductFloats / 2, sizeof(float));
      Vector::store(x, Vector::add(Vector::load(x), added));
    }
    if (!is_last(pass, row_block_)) return;
    store_block_lse(row_block_);
    const __m512 least = Vector::broadcast(kLeastSumOfKey * static_cast<float>(visible_end(row_block_)));
    const int32_t first_seeing = mask_.block(first_row(row_block_), 0, params_.seq_k).first_row(0);
    for (int c = 0; c < kBlockVectors; ++c) {
      const __m512 x = Vector::load(sum + c * Vector::kWidth);
      fall_back_unless_finite(x, row_block_);
      const __m512 seeing = Vector::from_lane(first_seeing - c * Vector::kWidth, x, least);
      fall_back_if(_mm512_cmp_ps_mask(seeing, least, _CMP_LT_OQ) != 0, row_block_);
      Vector::store(sum + c * Vector::kWidth, inverse_sum({nullptr, sum, nullptr}, c));
    }
  }

  void write_output(int32_t row) {
    const int32_t rows = clamp(height(row_block_) - row, 0, kRowsAtOnce), dim = column_block_ * kBlockColumns;
    const int64_t stride = params_.out_stride.row;
    const float* inverse_sums = scratch_.sum + row_block_ * kBlockRows + row;
    T* out = operands_.out + (first_row(row_block_) + row) * stride + dim;
    const float* product = product_ + row * kBlockColumns;
    fall_back_unless_finite(store_output(product, inverse_sums, rows, head_dim_ - dim, stride, out), row_block_);
  }

  void store_block_lse(int32_t block) const {
    float* sum = scratch_.sum + block * kBlockRows;
    if (sums_exactly()) {
      float* lanes = scratch_.exact_sum + int64_t{block} * kBlockRows * Vector::kWidth;
      sum = lanes;
      for (int c = 0; c < kBlockVectors; ++c) {
        __m512 rows[kTileRows];
#pragma GCC unroll 16
        for (int i = 0; i < kTileRows; ++i) rows[i] = Vector::load(lanes + (c * kTileRows + i) * Vector::kWidth);
        Vector::store(sum + c * Vector::kWidth, sum_rows(rows));
      }
    }
    store_lse({scratch_.zero, sum, nullptr}, height(block), make_scale(params_.scale),
              operands_.lse_row(first_row(block)));
  }

  void store_unseeing(int32_t block) const {
    for (int32_t row = first_row(block); row < first_row(block) + height(block); ++row) {
      memset(operands_.out + row * params_.out_stride.row, 0, static_cast<size_t>(head_dim_) * sizeof(T));
      if (operands_.lse != nullptr) *operands_.lse_row(row) = kMinusInfinity;
    }
  }

  static constexpr int32_t kMostRowBlocks = 32;  // the number of bits in fallback_blocks_

  const Task& task_;
  const attention::ForwardParams& params_;
  const Operands<T> operands_;
  const Mask mask_;
  const int32_t head_dim_;
  const int32_t padded_dim_;
  const int32_t row_blocks_;
  // A multiple of kStep, so that the content of a row block's last step does not depend on the task's height.
  const int32_t key_end_;
  const float scale_log2_;
  const AmxScratch<T> scratch_;
  uint32_t fallback_blocks_ = 0;
  // The last product, whose epilogue has not run yet.
  Epilogue epilogue_ = Epilogue::kNone;
  int32_t row_block_ = 0;
  int32_t column_block_ = 0;
  float* product_ = nullptr;
  bool is_odd_ = false;  // selects the next buffer
  LeftOperand q_[kMostRowBlocks];
};

}  // namespace
}  // namespace flashmoe::cpu
