// What attention's kernels compute, as plain loops over their launch parameters.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../fake_memory.h"
#include "attention/cpu/dropout.h"
#include "attention/host/axes.h"
#include "attention/params/append.h"
#include "attention/params/bias_gradient.h"
#include "attention/params/e4m3.h"
#include "attention/params/fused_backward.h"
#include "attention/params/merge.h"
#include "attention/params/row_dot.h"
#include "codes.h"
#include "host/ceil_div.h"
#include "host/kernel_table.h"

namespace flashmoe::attention {
namespace {

using host::load;
using host::store;

constexpr float kLn2 = 0.69314718F;

// Rows and keys of one sequence, and their addresses.
template <class Params>
class Sequence {
 public:
  Sequence(const Params& params, int32_t number, bool is_runtime, bool is_causal)
      : p(params),
        batch_(is_runtime ? params.sequences : Batch{}),
        number_(number),
        rows(params.seq_q),
        keys(params.seq_k) {
    if (batch_.cu_seqlens_q != nullptr) {
      first_row_ = batch_.cu_seqlens_q[number];
      rows_there = batch_.cu_seqlens_q[number + 1] - first_row_;
      rows = std::min(rows, rows_there);
    }
    if (batch_.cu_seqlens_k != nullptr) {
      first_key_ = batch_.cu_seqlens_k[number];
      keys = std::min(keys, batch_.cu_seqlens_k[number + 1] - first_key_);
    }
    if (batch_.seqused_k != nullptr) keys = std::min(keys, batch_.seqused_k[number]);
    if (is_runtime) options = params.score_options;
    if (!is_runtime)
      options = ScoreOptions{kUnbounded, is_causal ? 0 : kUnbounded, 0.0F, 0.0F, nullptr, nullptr, 0, 0, 0,
                             0,          MaskTensor::kNone,          1};
  }

  // A page that does not exist, whose keys no row sees, reads as the first.
  int32_t page_of(int32_t key) const {
    const int32_t page = batch_.block_table[number_ * batch_.block_table_stride + key / batch_.page_size];
    return page >= 0 && page < batch_.num_pages ? page : 0;
  }
  int64_t of_row(const Strides& stride, int32_t head, int32_t row) const {
    const int64_t first = batch_.cu_seqlens_q != nullptr ? first_row_ * stride.row : number_ * stride.batch;
    return first + head * stride.head + row * stride.row;
  }
  int64_t of_key(const Strides& stride, int32_t head, int32_t key) const {
    if (batch_.block_table != nullptr) {
      return page_of(key) * stride.batch + head * stride.head + key % batch_.page_size * stride.row;
    }
    const int64_t first = batch_.cu_seqlens_k != nullptr ? first_key_ * stride.row : number_ * stride.batch;
    return first + head * stride.head + key * stride.row;
  }
  // Index into lse, dlse and row_dot.
  int64_t statistic(int32_t head, int32_t row) const {
    if (batch_.cu_seqlens_q != nullptr) return int64_t{head} * batch_.rows_total + first_row_ + row;
    return (int64_t{number_} * p.heads_q + head) * p.seq_q + row;
  }
  // How far a key is behind the last one that a causal row sees.
  int64_t distance(int32_t row, int32_t key) const {
    const bool is_folded = options.folded_heads > 1;
    return int64_t{key} - (is_folded ? 0 : row) - (keys - (is_folded ? 1 : rows));
  }
  bool sees(int32_t head, int32_t row, int32_t key) const {
    if (distance(row, key) < -int64_t{options.left} || distance(row, key) > options.right) return false;
    const int64_t at = of_mask(head, row, key);
    if (options.mask_type == MaskTensor::kAdditive) return load(options.mask, at) != -INFINITY;
    return options.mask_type != MaskTensor::kBool || static_cast<const uint8_t*>(options.mask)[at] != 0;
  }
  // For a product of a query and a key: the natural exponent, and the slope of the softcap.
  float score(float product, int32_t head, int32_t row, int32_t key, float& slope) const {
    slope = 1.0F;
    if (options.score_factor > 0) {
      product = std::tanh(options.score_factor * product);
      slope = 1.0F - product * product;
    }
    const int64_t at = of_mask(head, row, key);
    if (options.mask_type == MaskTensor::kAdditive) product += options.mask_factor * load(options.mask, at);
    if (options.mask_type == MaskTensor::kAlibi) {
      product -= options.mask_factor * static_cast<const float*>(options.mask)[at] *
                 std::abs(static_cast<float>(distance(row, key)));
    }
    return product * p.scale_log2 * kLn2;
  }

  const Params& p;
  Batch batch_;
  int32_t number_;
  int32_t rows;
  int32_t keys;
  int32_t rows_there = 0;  // rows of a ragged sequence, also past seq_q
  ScoreOptions options{};

 private:
  int64_t of_mask(int32_t head, int32_t row, int32_t key) const {
    return number_ * options.mask_stride_batch + head * options.mask_stride_head + row * options.mask_stride_row +
           key * options.mask_stride_key;
  }

  int32_t first_row_ = 0;
  int32_t first_key_ = 0;
};

float dot(const void* a, int64_t at_a, const void* b, int64_t at_b, int32_t count) {
  float sum = 0.0F;
  for (int32_t c = 0; c < count; ++c) sum += load(a, at_a + c) * load(b, at_b + c);
  return sum;
}

// Calls body with each sequence, query head and its key head.
template <class Params, class Body>
void for_heads(const Params& params, const host::Kernel& kernel, Body body) {
  const bool is_runtime = kernel.axes[axis::kMask] < 0;
  const bool is_causal = !is_runtime && static_cast<Mask>(kernel.axes[axis::kMask]) == Mask::kCausal;
  for (int32_t number = 0; number < params.batch; ++number) {
    Sequence<Params> sequence(params, number, is_runtime, is_causal);
    if (std::strncmp(kernel.operation, "attention_decode", std::strlen("attention_decode")) == 0)
      sequence.options.folded_heads = 1;  // only inside the kernel
    for (int32_t head = 0; head < params.heads_q; ++head) {
      body(sequence, head, head / (params.heads_q / params.heads_kv));
    }
  }
}

// The factor of a kept probability; 0 if it is dropped.
float kept(const Dropout* dropout, int32_t number, int32_t head, int32_t row, int32_t key) {
  float factor = 1.0F;
  if (dropout != nullptr) cpu::DropoutFactors(*dropout, number, head).fill(row, 1, key, 1, 1, 1, &factor);
  return factor;
}

// Further launch parameters of a forward kernel: dropout, a cache of codes, or codes in Q, K and transposed V.
struct Beside {
  const Dropout* dropout = nullptr;
  const E4m3ForwardParams* cache = nullptr;
  const E4m3AttentionParams* codes = nullptr;
};

void forward(const ForwardParams& p, const host::Kernel& kernel, const Beside& beside) {
  const bool is_runtime = kernel.axes[axis::kMask] < 0;
  const int32_t head_dim_v = is_runtime || beside.codes != nullptr ? p.head_dim_v : p.head_dim;
  const bool is_second = p.num_splits == -1;                              // of the two kernels that share a batch
  if (is_runtime && p.sequences.cu_seqlens_q != nullptr && !is_second) {  // rows of no sequence
    for (int64_t row = 0; row < p.sequences.rows_total; ++row) {
      for (int32_t head = 0; head < p.heads_q; ++head) {
        for (int32_t c = 0; c < head_dim_v; ++c)
          store(p.out, row * p.out_stride.row + head * p.out_stride.head + c, 0.0F);
        if (p.lse != nullptr) p.lse[int64_t{head} * p.sequences.rows_total + row] = -INFINITY;
      }
    }
  }
  // A decoding kernel adds up its splits itself.
  const bool is_divided = p.num_splits > 1 && std::strncmp(kernel.operation, "attention_decode", 16) != 0;
  const int32_t splits = is_divided ? p.num_splits : 1;
  const int64_t rows_of_share =
      int64_t{p.heads_q} * (p.sequences.cu_seqlens_q != nullptr ? p.sequences.rows_total : p.batch * p.seq_q);
  if (is_divided) std::fill_n(p.lse_partial, splits * rows_of_share, -INFINITY);
  for_heads(p, kernel, [&](const auto& s, int32_t head, int32_t head_kv) {
    if (is_runtime && (is_second ? s.rows_there > p.seq_q : s.rows <= -p.num_splits)) return;
    std::vector<float> k(int64_t{s.keys} * p.head_dim), v(int64_t{s.keys} * head_dim_v);
    for (int32_t key = 0; key < s.keys; ++key) {
      const int64_t at_k = s.of_key(p.k_stride, head_kv, key), at_v = s.of_key(p.v_stride, head_kv, key);
      const int32_t page = beside.cache != nullptr && s.batch_.block_table != nullptr ? s.page_of(key) : 0;
      for (int32_t c = 0; c < p.head_dim; ++c) {
        k[key * p.head_dim + c] =
            beside.cache != nullptr   ? scaled(p.k, at_k + c, beside.cache->k_scale, s, head_kv, page)
            : beside.codes != nullptr ? scaled(p.k, at_k + c, beside.codes->k_scale, s, head_kv, key)
                                      : load(p.k, at_k + c);
      }
      for (int32_t c = 0; c < head_dim_v; ++c) {
        v[key * head_dim_v + c] =
            beside.cache != nullptr ? scaled(p.v, at_v + c, beside.cache->v_scale, s, head_kv, page)
            : beside.codes != nullptr
                ? scaled(p.v, transposed(*beside.codes, s, head_kv, key, c), beside.codes->v_scale, s, head_kv, key)
                : load(p.v, at_v + c);
      }
    }
    for (int32_t row = 0; row < s.rows; ++row) {
      const int64_t at_q = s.of_row(p.q_stride, head, row);
      std::vector<float> q(p.head_dim);
      for (int32_t c = 0; c < p.head_dim; ++c) {
        q[c] =
            beside.codes != nullptr ? scaled(p.q, at_q + c, beside.codes->q_scale, s, head, row) : load(p.q, at_q + c);
      }
      for (int32_t split = 0; split < splits; ++split) {
        std::vector<float> out(head_dim_v, 0.0F);
        const int32_t sink = head * s.options.folded_heads + (s.options.folded_heads > 1 ? row : 0);
        const bool has_sink = s.options.sinks != nullptr && split == 0;
        float largest = has_sink ? s.options.sinks[sink] : -INFINITY;
        float sum = has_sink ? 1.0F : 0.0F;
        const auto share = static_cast<int32_t>(ceil_div(s.keys, splits));
        for (int32_t key = split * share; key < std::min(s.keys, (split + 1) * share); ++key) {
          if (!s.sees(head, row, key)) continue;
          float product = 0.0F, slope;
          for (int32_t c = 0; c < p.head_dim; ++c) product += q[c] * k[key * p.head_dim + c];
          const float score = s.score(product, head, row, key, slope);
          const float next = std::max(largest, score), rescale = std::exp(largest - next),
                      weight = std::exp(score - next);
          const float factor = kept(beside.dropout, s.number_, head, row, key);
          for (int32_t c = 0; c < head_dim_v; ++c) {
            out[c] = out[c] * rescale + weight * factor * v[key * head_dim_v + c];
          }
          sum = sum * rescale + weight;
          largest = next;
        }
        const float lse = sum > 0 ? largest + std::log(sum) : -INFINITY;
        for (float& value : out) value = sum > 0 ? value / sum : 0.0F;
        if (is_divided) {
          const int64_t at = s.statistic(head, row) + split * rows_of_share;
          std::copy(out.begin(), out.end(), p.out_partial + at * head_dim_v);
          p.lse_partial[at] = lse;
          continue;
        }
        for (int32_t c = 0; c < head_dim_v; ++c) store(p.out, s.of_row(p.out_stride, head, row) + c, out[c]);
        if (p.lse != nullptr) p.lse[s.statistic(head, row)] = lse;
      }
    }
  });
}

// Follows a forward kernel whose keys were divided.
void combine(const ForwardParams& p) {
  const int64_t rows = int64_t{p.batch} * p.heads_q * p.seq_q;
  for (int64_t at = 0; at < rows; ++at) {
    float largest = -INFINITY, sum = 0.0F;
    for (int64_t split = 0; split < p.num_splits; ++split)
      largest = std::max(largest, p.lse_partial[split * rows + at]);
    std::vector<float> out(p.head_dim, 0.0F);
    for (int64_t split = 0; split < p.num_splits && largest > -INFINITY; ++split) {
      const float weight = std::exp(p.lse_partial[split * rows + at] - largest);
      sum += weight;
      for (int32_t c = 0; c < p.head_dim; ++c) out[c] += weight * p.out_partial[(split * rows + at) * p.head_dim + c];
    }
    const int64_t row = at % p.seq_q, head = at / p.seq_q % p.heads_q, number = at / p.seq_q / p.heads_q;
    for (int32_t c = 0; c < p.head_dim; ++c) {
      store(p.out, number * p.out_stride.batch + head * p.out_stride.head + row * p.out_stride.row + c,
            sum > 0 ? out[c] / sum : 0.0F);
    }
    if (p.lse != nullptr) p.lse[at] = sum > 0 ? largest + std::log(sum) : -INFINITY;
  }
}

int32_t width_v(const BackwardParams& p, const host::Kernel& kernel) {
  return kernel.axes[axis::kMask] < 0 ? p.head_dim_v : p.head_dim;
}

// P with its dropout, the gradient of the score after a softcap, and that of the product of query and key.
struct Derivatives {
  float weight = 0.0F;
  float of_score = 0.0F;
  float of_product = 0.0F;
};

template <class Sequence>
Derivatives differentiate(const BackwardParams& p, const Dropout* dropout, const Sequence& s, int32_t head,
                          int32_t head_kv, int32_t row, int32_t key, int32_t columns_v) {
  const int64_t at = s.statistic(head, row);
  if (p.lse[at] == -INFINITY || !s.sees(head, row, key)) return {};
  float slope;
  const float product = dot(p.q, s.of_row(p.q_stride, head, row), p.k, s.of_key(p.k_stride, head_kv, key), p.head_dim);
  const float weight = std::exp(s.score(product, head, row, key, slope) - p.lse[at]);
  const float of_weight =
      dot(p.dout, s.of_row(p.dout_stride, head, row), p.v, s.of_key(p.v_stride, head_kv, key), columns_v);
  const float factor = kept(dropout, s.number_, head, row, key);
  const float of_score = weight * (factor * of_weight - p.row_dot[at]);
  return {weight * factor, of_score, p.scale * slope * of_score};
}

void query_gradient(const BackwardParams& p, const Dropout* dropout, const host::Kernel& kernel) {
  const int32_t columns_v = width_v(p, kernel);
  const bool is_ragged = kernel.axes[axis::kMask] < 0 && p.sequences.cu_seqlens_q != nullptr;
  for (int64_t row = 0; is_ragged && row < p.sequences.rows_total; ++row) {
    for (int32_t head = 0; head < p.heads_q; ++head) {
      for (int32_t c = 0; c < p.head_dim; ++c) store(p.dq, row * p.dq_stride.row + head * p.dq_stride.head + c, 0.0F);
    }
  }
  for_heads(p, kernel, [&](const auto& s, int32_t head, int32_t head_kv) {
    for (int32_t row = 0; row < s.rows; ++row) {
      const int64_t at = s.statistic(head, row);
      p.row_dot[at] =
          dot(p.dout, s.of_row(p.dout_stride, head, row), p.out, s.of_row(p.out_stride, head, row), columns_v) -
          (p.dlse != nullptr ? p.dlse[at] : 0.0F);
      std::vector<float> sum(p.head_dim, 0.0F);
      for (int32_t key = 0; key < s.keys; ++key) {
        const float gradient = differentiate(p, dropout, s, head, head_kv, row, key, columns_v).of_product;
        for (int32_t c = 0; c < p.head_dim; ++c) sum[c] += gradient * load(p.k, s.of_key(p.k_stride, head_kv, key) + c);
      }
      for (int32_t c = 0; c < p.head_dim; ++c) store(p.dq, s.of_row(p.dq_stride, head, row) + c, sum[c]);
    }
  });
}

// `sums`: of the fused kernel, which adds up dq without its scales; null for the kernel of only dk and dv.
void key_value_gradient(const BackwardParams& p, const Dropout* dropout, const host::Kernel& kernel, float* sums,
                        int64_t rows_of_sums) {
  const int32_t columns_v = width_v(p, kernel), width = kernel.axes[axis::kHeadDim];
  const bool is_runtime = kernel.axes[axis::kMask] < 0;
  const bool is_ragged = is_runtime && p.sequences.cu_seqlens_q != nullptr;
  const int64_t keys_total = is_runtime && p.sequences.cu_seqlens_k != nullptr ? p.sequences.keys_total : 0;
  for (int64_t key = 0; key < keys_total; ++key) {
    for (int32_t head = 0; head < p.heads_kv; ++head) {
      for (int32_t c = 0; c < p.head_dim; ++c) store(p.dk, key * p.dk_stride.row + head * p.dk_stride.head + c, 0.0F);
      for (int32_t c = 0; c < columns_v; ++c) store(p.dv, key * p.dv_stride.row + head * p.dv_stride.head + c, 0.0F);
    }
  }
  const int32_t group = p.heads_q / p.heads_kv;
  const float sums_scale = p.scale * (dropout != nullptr ? dropout->scale : 1.0F);
  for_heads(p, kernel, [&](const auto& s, int32_t first_head, int32_t head_kv) {
    if (first_head % group != 0) return;
    for (int32_t key = 0; key < s.keys; ++key) {
      std::vector<float> dk(p.head_dim, 0.0F), dv(columns_v, 0.0F);
      for (int32_t head = first_head; head < first_head + group; ++head) {
        for (int32_t row = 0; row < s.rows; ++row) {
          const Derivatives found = differentiate(p, dropout, s, head, head_kv, row, key, columns_v);
          const float weight = found.weight, gradient = found.of_product;
          const int64_t at_q = s.of_row(p.q_stride, head, row), at_dout = s.of_row(p.dout_stride, head, row);
          for (int32_t c = 0; c < p.head_dim; ++c) dk[c] += gradient * load(p.q, at_q + c);
          for (int32_t c = 0; c < columns_v; ++c) dv[c] += weight * load(p.dout, at_dout + c);
          if (sums == nullptr) continue;
          float* sum = sums + (is_ragged ? head * rows_of_sums + s.statistic(0, row)
                                         : (int64_t{s.number_} * p.heads_q + head) * rows_of_sums + row) *
                                  width;
          for (int32_t c = 0; c < p.head_dim; ++c)
            sum[c] += gradient / sums_scale * load(p.k, s.of_key(p.k_stride, head_kv, key) + c);
        }
      }
      for (int32_t c = 0; c < p.head_dim; ++c) store(p.dk, s.of_key(p.dk_stride, head_kv, key) + c, dk[c]);
      for (int32_t c = 0; c < columns_v; ++c) store(p.dv, s.of_key(p.dv_stride, head_kv, key) + c, dv[c]);
    }
  });
}

// In a folded dimension the kernel's block is the whole dimension; each sequence and head belongs to one of the parts.
void bias_gradient(const BiasGradientParams& p, const Dropout* dropout, const host::Kernel& kernel) {
  const BackwardParams& backward = p.launched.backward;
  std::vector<float> sums(int64_t{p.splits} * p.batches * p.heads * p.rows * p.keys, 0.0F);
  for_heads(backward, kernel, [&](const auto& s, int32_t head, int32_t head_kv) {
    for (int32_t row = 0; row < s.rows; ++row) {
      for (int32_t key = 0; key < s.keys; ++key) {
        const int64_t part = (s.number_ + head) % p.splits;
        const int64_t of_head = (part * p.batches + s.number_ % p.batches) * p.heads + head % p.heads;
        sums[(of_head * p.rows + row % p.rows) * p.keys + key % p.keys] +=
            differentiate(backward, dropout, s, head, head_kv, row, key, backward.head_dim_v).of_score;
      }
    }
  });
  for (std::size_t at = 0; at < sums.size(); ++at) {
    if (p.is_float != 0) {
      static_cast<float*>(p.sums)[at] = sums[at];
    } else {
      store(p.sums, static_cast<int64_t>(at), sums[at]);
    }
  }
}

void row_dots(const RowDotParams& p) {
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t head = 0; head < p.heads; ++head) {
      for (int64_t row = 0; row < p.rows; ++row) {
        const int64_t at = (batch * p.heads + head) * p.rows + row;
        const auto of = [&](const Strides& s) { return batch * s.batch + head * s.head + row * s.row; };
        p.row_dot[at] = dot(p.dout, of(p.dout_stride), p.out, of(p.out_stride), p.head_dim) -
                        (p.dlse != nullptr ? p.dlse[at] : 0.0F);
      }
    }
  }
}

// Rows of a head's sums: whole partials of kDqPartialRows.
int64_t rows_of_sums(const FusedQueryParams& p) { return ceil_div(p.rows, kDqPartialRows) * kDqPartialRows; }
int64_t rows_of_sums(const VarlenFusedQueryParams& p) {
  if (p.cu_seqlens_q == nullptr) return ceil_div(p.rows, kDqPartialRows) * kDqPartialRows;
  return (p.rows_total / kDqPartialRows + p.batch + 2) * kDqPartialRows;
}
int32_t ragged_rows(const FusedQueryParams&) { return 0; }
int32_t ragged_rows(const VarlenFusedQueryParams& p) { return p.cu_seqlens_q != nullptr ? p.rows_total : 0; }
int32_t columns_of_out(const FusedQueryParams& p) { return p.head_dim; }
int32_t columns_of_out(const VarlenFusedQueryParams& p) { return p.head_dim_v; }

// prepare: row_dot and zeroed sums; convert: from the sums to dq, with its scale.
template <class Params>
void prepare(const Params& p, int64_t width) {
  const int32_t ragged = ragged_rows(p);
  const int32_t batch = ragged > 0 ? 1 : p.batch, rows = ragged > 0 ? ragged : p.rows;
  row_dots(
      {p.out, p.dout, p.lse, p.dlse, p.row_dot, p.out_stride, p.dout_stride, batch, p.heads, rows, columns_of_out(p)});
  std::fill_n(p.sums, int64_t{batch} * p.heads * rows_of_sums(p) * width, 0.0F);
}
template <class Params>
void convert(const Params& p, int64_t width) {
  const int32_t ragged = ragged_rows(p);
  const int32_t batches = ragged > 0 ? 1 : p.batch, rows = ragged > 0 ? ragged : p.rows;
  for (int64_t batch = 0; batch < batches; ++batch) {
    for (int64_t head = 0; head < p.heads; ++head) {
      for (int64_t row = 0; row < rows; ++row) {
        const float* sum = p.sums + ((batch * p.heads + head) * rows_of_sums(p) + row) * width;
        const int64_t at =
            (ragged > 0 ? 0 : batch * p.dq_stride.batch) + head * p.dq_stride.head + row * p.dq_stride.row;
        for (int32_t c = 0; c < p.head_dim; ++c) store(p.dq, at + c, p.scale * sum[c]);
      }
    }
  }
}

void dequantize(const DequantizeParams& p) {
  ForwardParams of{};
  of.seq_k = p.seq_k;
  of.sequences = p.sequences;
  for (int32_t number = 0; number < p.batch; ++number) {
    const Sequence<ForwardParams> s(of, number, /*is_runtime=*/true, /*is_causal=*/false);
    for (int32_t at = 0; at < p.heads_kv * s.keys; ++at) {
      const int32_t head = at / s.keys, key = at % s.keys,
                    page = p.sequences.block_table != nullptr ? s.page_of(key) : 0;
      const int64_t row = (int64_t{number} * p.heads_kv + head) * p.seq_k + key;
      if (key < s.keys - p.read_keys) {
        store(p.k_out, row * p.head_dim, NAN);
        continue;
      }
      for (int32_t c = 0; c < p.head_dim; ++c)
        store(p.k_out, row * p.head_dim + c,
              scaled(p.k, s.of_key(p.k_stride, head, key) + c, p.k_scale, s, head, page));
      for (int32_t c = 0; c < p.head_dim_v; ++c)
        store(p.v_out, row * p.head_dim_v + c,
              scaled(p.v, s.of_key(p.v_stride, head, key) + c, p.v_scale, s, head, page));
    }
  }
}

// put(cache, at, value, sequence, page or sequence, key head).
template <class Put>
void append(const AppendParams& p, const Put& put) {
  for (int32_t number = 0; number < p.batch; ++number) {
    for (int32_t i = 0; i < p.new_keys; ++i) {
      const int32_t key = p.cache_seqlens[number] + i;
      if (key >= p.room) continue;
      int64_t base = number, row = key;
      if (p.block_table != nullptr) {
        base = p.block_table[number * p.block_table_stride + key / p.page_size];
        row = key % p.page_size;
        if (base < 0 || base >= p.num_pages) continue;
      }
      for (int32_t head = 0; head < p.heads_kv; ++head) {
        const auto copy = [&](void* to, const Strides& there, const void* from, const Strides& here, int32_t count) {
          for (int32_t c = 0; c < count; ++c) {
            put(to, base * there.batch + head * there.head + row * there.row + c,
                load(from, number * here.batch + head * here.head + i * here.row + c), number, base, head);
          }
        };
        copy(p.k_cache, p.k_cache_stride, p.k_new, p.k_new_stride, p.head_dim);
        copy(p.v_cache, p.v_cache_stride, p.v_new, p.v_new_stride, p.head_dim_v);
      }
    }
  }
}

void merge(const MergeParams& p) {
  const auto read = [&](const void* from, int64_t at) {
    return p.is_float != 0 ? static_cast<const float*>(from)[at] : load(from, at);
  };
  for (int64_t index = 0; index < int64_t{p.batch} * p.heads * p.rows; ++index) {
    const auto at = [&](const Strides& stride) {
      return index / p.rows / p.heads * stride.batch + index / p.rows % p.heads * stride.head +
             index % p.rows * stride.row;
    };
    const float lse_a = p.lse_a[at(p.lse_a_stride)], lse_b = p.lse_b[at(p.lse_b_stride)];
    const float lse = std::max(lse_a, lse_b) + std::log1p(std::exp(-std::abs(lse_a - lse_b)));
    for (int32_t c = 0; c < p.head_dim; ++c) {
      const float value = std::exp(lse_a - lse) * read(p.out_a, at(p.out_a_stride) + c) +
                          std::exp(lse_b - lse) * load(p.out_b, at(p.out_b_stride) + c);
      const int64_t to = at(p.out_stride) + c;
      p.is_float != 0 ? void(static_cast<float*>(p.out)[to] = value) : store(p.out, to, value);
    }
    p.lse[at(p.lse_stride)] = lse;
  }
}

}  // namespace
}  // namespace flashmoe::attention
