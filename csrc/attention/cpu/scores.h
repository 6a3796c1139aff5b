// Applies the score options to the scores before the softmax (attention::ScoreOptions): softcap, then the mask tensor
// or ALiBi. If the mask tensor is -inf, or false, the score becomes -inf, even if it was NaN. Include after a
// vector_*.h. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/cpu/softmax.h"
#include "attention/params/forward.h"
#include "cpu/exp2.h"
#include "cpu/rows.h"

namespace flashmoe::cpu {
namespace {

// tanh x to within 2 ulp: x + x^3 p(x^2) up to |x| = 0.625, minimax in relative error, and above that (1 - e) / (1 + e)
// with e = exp(-2 |x|).
inline Vector::Float tanh_of(Vector::Float x) {
  static constexpr float kCoefficients[] = {-5.7049863e-3f, 2.0639087e-2f, -5.3739715e-2f, 1.3331442e-1f,
                                            -3.3333282e-1f};
  const Vector::Float z = Vector::mul(x, x);
  Vector::Float p = Vector::broadcast(kCoefficients[0]);
#pragma GCC unroll 4
  for (int i = 1; i < 5; ++i) p = Vector::fma(p, z, Vector::broadcast(kCoefficients[i]));
  const Vector::Float small = Vector::fma(Vector::mul(p, z), x, x);

  const Vector::Float minus_x = Vector::sub(Vector::zero(), x), one = Vector::broadcast(1.0f);
  const Vector::Float magnitude = Vector::max(x, minus_x);
  const Vector::Float e = exp2<kExpDegreeFull>(Vector::mul(magnitude, Vector::broadcast(-2.0f * kLog2E)));
  const Vector::Float large = Vector::div(Vector::sub(one, e), Vector::add(one, e));
  const Vector::Float signed_large = Vector::where_equal(magnitude, x, large, Vector::sub(Vector::zero(), large));
  const Vector::Float limit = Vector::broadcast(0.625f);
  return Vector::where_equal(Vector::max(magnitude, limit), limit, small, signed_large);  // a NaN becomes the limit
}

// For one query head. T: the mask tensor's type if it is additive.
template <class T>
class ScoreFunction {
 public:
  // diagonal: the sequence's number of keys minus its number of rows.
  ScoreFunction(const attention::ScoreOptions& options, int32_t head, int64_t diagonal)
      : options_(options), head_(head), diagonal_(diagonal) {}

  bool has_softcap() const { return options_.score_factor > 0.0f; }
  bool has_mask() const { return options_.mask_type != attention::MaskTensor::kNone; }

  // Changes scores[i] of `row` and key + i, for i < keys, in whole vectors. slopes, which may be null, gets the
  // softcap's derivative, by which gradients are multiplied.
  void apply(int64_t row, int32_t key, int32_t keys, float* scores, float* slopes) const {
    if (has_softcap()) {
      const Vector::Float one = Vector::broadcast(1.0f);
      for (int32_t i = 0; i < keys; i += Vector::kWidth) {
        const Vector::Float x = cap(Vector::load(scores + i));
        Vector::store(scores + i, x);
        if (slopes != nullptr) Vector::store(slopes + i, Vector::fma(Vector::sub(Vector::zero(), x), x, one));
      }
    }
    if (!has_mask()) return;
    float values[kChunk];
    for (int32_t begin = 0; begin < keys; begin += kChunk) {
      const int32_t count = clamp(keys - begin, 0, kChunk);
      load_values(row, key + begin, count, values);
      for (int32_t i = 0; i < count; i += Vector::kWidth) {
        float* s = scores + begin + i;
        Vector::store(s, masked(Vector::load(s), Vector::load(values + i)));
      }
    }
  }

  // The same for a block of `rows` rows, the lanes of scores_t [keys, block_rows]. values: [block_rows, kChunk].
  void apply_transposed(int64_t row, int32_t rows, int32_t block_rows, int32_t key, int32_t keys, float* scores_t,
                        float* values) const {
    if (has_softcap()) {
      for (int64_t i = 0; i < int64_t{keys} * block_rows; i += Vector::kWidth) {
        Vector::store(scores_t + i, cap(Vector::load(scores_t + i)));
      }
    }
    if (!has_mask()) return;
    const bool is_shared = options_.mask_stride_row == 0 && options_.mask_type != attention::MaskTensor::kAlibi;
    for (int32_t begin = 0; begin < keys; begin += kChunk) {
      const int32_t count = clamp(keys - begin, 0, kChunk);
      for (int32_t i = 0; i < (is_shared ? 1 : rows); ++i)
        load_values(row + i, key + begin, count, values + i * kChunk);
      float* chunk_t = scores_t + int64_t{begin} * block_rows;
      if (is_shared) {
        add_shared(values, count, block_rows, chunk_t);
      } else {
        add_own(values, count, rows, block_rows, chunk_t);
      }
    }
  }

  static constexpr int32_t kChunk = 128;      // keys whose mask values are loaded at a time
  static constexpr float kMostSlope = 1e29f;  // as on the GPU: any distance times this is a finite float

 private:
  Vector::Float cap(Vector::Float score) const {
    return tanh_of(Vector::mul(score, Vector::broadcast(options_.score_factor)));
  }

  static Vector::Float masked(Vector::Float score, Vector::Float value) {
    const Vector::Float hidden = Vector::broadcast(kMinusInfinity);
    return Vector::where_equal(value, hidden, hidden, Vector::add(score, value));
  }

  // values[i] = the mask value of the row and key + i, times mask_factor, for i < keys <= kChunk; zeros up to a whole
  // vector.
  void load_values(int64_t row, int32_t key, int32_t keys, float* values) const {
    const int64_t at =
        head_ * options_.mask_stride_head + row * options_.mask_stride_row + key * options_.mask_stride_key;
    const int64_t stride = options_.mask_stride_key;
    if (options_.mask_type == attention::MaskTensor::kAlibi) {
      const float slope = -static_cast<const float*>(options_.mask)[at] * options_.mask_factor;
      const float held = slope > kMostSlope ? kMostSlope : slope < -kMostSlope ? -kMostSlope : slope;
      const int64_t distance = row + diagonal_ - key;
      for (int32_t i = 0; i < round_up(keys, Vector::kWidth); ++i) {
        values[i] = held * static_cast<float>(distance < i ? i - distance : distance - i);
      }
      return;
    }
    if (options_.mask_type == attention::MaskTensor::kBool) {
      const uint8_t* shown = static_cast<const uint8_t*>(options_.mask) + at;
      for (int32_t i = 0; i < keys; ++i) values[i] = shown[i * stride] != 0 ? 0.0f : kMinusInfinity;
      for (int32_t i = keys; i < round_up(keys, Vector::kWidth); ++i) values[i] = 0.0f;
      return;
    }
    const T* src = static_cast<const T*>(options_.mask) + at;
    T near[kChunk];
    if (stride != 1) {
      for (int32_t i = 0; i < keys; ++i) near[i] = src[i * stride];
      src = near;
    }
    load_row(src, keys, values, Vector::broadcast(1.0f));
    const Vector::Float factor = Vector::broadcast(options_.mask_factor), lowest = Vector::broadcast(-__FLT_MAX__);
    const Vector::Float hidden = Vector::broadcast(kMinusInfinity);
    for (int32_t i = 0; i < keys; i += Vector::kWidth) {  // a finite value stays finite
      const Vector::Float value = Vector::load(values + i);
      const Vector::Float above = Vector::max(lowest, Vector::mul(value, factor));
      const Vector::Float held = Vector::sub(Vector::zero(), Vector::max(lowest, Vector::sub(Vector::zero(), above)));
      Vector::store(values + i, Vector::where_equal(value, hidden, hidden, held));
    }
  }

  static void add_shared(const float* values, int32_t keys, int32_t block_rows, float* scores_t) {
    for (int32_t i = 0; i < keys; ++i) {
      for (int32_t lane = 0; lane < block_rows; lane += Vector::kWidth) {
        float* s = scores_t + int64_t{i} * block_rows + lane;
        Vector::store(s, masked(Vector::load(s), Vector::broadcast(values[i])));
      }
    }
  }

  // values: [rows, kChunk]. Lanes past the last row get unused numbers.
  static void add_own(const float* values, int32_t keys, int32_t rows, int32_t block_rows, float* scores_t) {
    float square[Vector::kWidth * Vector::kWidth];
    for (int32_t lane = 0; lane < block_rows && lane < rows; lane += Vector::kWidth) {
      for (int32_t i = 0; i < keys; i += Vector::kWidth) {
        Vector::transpose(
            [&](int r) { return lane + r < rows ? Vector::load(values + (lane + r) * kChunk + i) : Vector::zero(); },
            square, Vector::kWidth);
        for (int32_t j = 0; j < Vector::kWidth && i + j < keys; ++j) {
          float* s = scores_t + int64_t{i + j} * block_rows + lane;
          Vector::store(s, masked(Vector::load(s), Vector::load(square + j * Vector::kWidth)));
        }
      }
    }
  }

  const attention::ScoreOptions& options_;
  const int32_t head_;
  const int64_t diagonal_;
};

// The factors of scores with options. Their scale is above zero; with a softcap, the cap takes the place of the scale.
// Without softcap they are bit for bit those of a call without options.
template <class Params>
inline Scale scale_of_options(const Params& params) {
  if (params.score_options.score_factor <= 0.0f) return make_scale(params.scale);
  return {1.0f, params.scale_log2 / kLog2E, params.scale_log2};
}

// A row's running maximum and sum start from the sink, which is one more score without a value, or from no score.
struct RowStart {
  float max;  // as SoftmaxState's, unscaled
  float sum;
};
inline RowStart start_of_row(const attention::ScoreOptions& options, int32_t head, Scale scale) {
  if (options.sinks == nullptr || options.sinks[head] == kMinusInfinity) return {kMinusInfinity, 0.0f};
  return {options.sinks[head] / scale.natural, 1.0f};
}

}  // namespace
}  // namespace flashmoe::cpu
