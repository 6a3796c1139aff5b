// The extension on a driver without a GPU. "CUDA" memory is the CPU's; a "kernel" is a few
// plain loops over the parameters that it was launched with, in bf16, so that results can be compared, and what was launched is
// written down. Without masks, dropout, caches of 8-bit floats and split keys of dense calls: those need no other parameters than their own.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../fake_driver.h"
#include "../fake_memory.h"
#include "attention/host/axes.h"
#include "attention/host/backends.h"
#include "attention/host/e4m3.h"
#include "attention/params/append.h"
#include "attention/params/fused_backward.h"
#include "attention/params/row_dot.h"

namespace flashmoe {
namespace attention {

// Not called.
void forward_cpu(const ForwardArguments&, const ForwardOutputs&) {}
void backward_cpu(const BackwardParams&, const ForwardArguments&) {}
void forward_varlen_cpu(const VarlenArguments&, const ForwardOutputs&) {}
void backward_varlen_cpu(const VarlenBackwardArguments&, const Gradients&) {}
void append_cpu(const AppendArguments&) {}
void forward_e4m3_cpu(const E4m3Arguments&, const ForwardOutputs&) {}
void append_e4m3_cpu(const E4m3AppendArguments&) {}

namespace {

using host::load;
using host::store;

constexpr float kLn2 = 0.69314718F;

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Rows and keys of one sequence, and where they lie.
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

  int64_t of_row(const Strides& stride, int32_t head, int32_t row) const {
    const int64_t first = batch_.cu_seqlens_q != nullptr ? first_row_ * stride.row : number_ * stride.batch;
    return first + head * stride.head + row * stride.row;
  }
  int64_t of_key(const Strides& stride, int32_t head, int32_t key) const {
    if (batch_.block_table != nullptr) {
      const int32_t page = batch_.block_table[number_ * batch_.block_table_stride + key / batch_.page_size];
      return page * stride.batch + head * stride.head + key % batch_.page_size * stride.row;
    }
    const int64_t first = batch_.cu_seqlens_k != nullptr ? first_key_ * stride.row : number_ * stride.batch;
    return first + head * stride.head + key * stride.row;
  }
  // Of lse, dlse and row_dot.
  int64_t statistic(int32_t head, int32_t row) const {
    if (batch_.cu_seqlens_q != nullptr) return int64_t{head} * batch_.rows_total + first_row_ + row;
    return (int64_t{number_} * p.heads_q + head) * p.seq_q + row;
  }
  bool sees(int32_t row, int32_t key) const {
    const bool is_folded = options.folded_heads > 1;
    const int64_t distance = int64_t{key} - (is_folded ? 0 : row) - (keys - (is_folded ? 1 : rows));
    return distance >= -int64_t{options.left} && distance <= options.right;
  }
  // Of a product of a query and a key: the natural exponent, and the slope of the softcap.
  float score(float product, float& slope) const {
    slope = 1.0F;
    if (!(options.score_factor > 0)) return product * p.scale_log2 * kLn2;
    const float t = std::tanh(options.score_factor * product);
    slope = 1.0F - t * t;
    return t * p.scale_log2 * kLn2;
  }

  const Params& p;
  Batch batch_;
  int32_t number_;
  int32_t rows;
  int32_t keys;
  int32_t rows_there = 0;  // of ragged rows, also past seq_q
  ScoreOptions options{};

 private:
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
    if (std::strcmp(kernel.operation, "attention_decode") == 0)
      sequence.options.folded_heads = 1;  // in the kernel alone
    for (int32_t head = 0; head < params.heads_q; ++head) {
      body(sequence, head, head / (params.heads_q / params.heads_kv));
    }
  }
}

void forward(const ForwardParams& p, const host::Kernel& kernel) {
  const bool is_runtime = kernel.axes[axis::kMask] < 0;
  const int32_t head_dim_v = is_runtime ? p.head_dim_v : p.head_dim;
  const bool is_second = p.num_splits == -1;  // of the two kernels that a batch is divided between
  if (is_runtime && p.sequences.cu_seqlens_q != nullptr && !is_second) {  // rows of no sequence
    for (int64_t row = 0; row < p.sequences.rows_total; ++row) {
      for (int32_t head = 0; head < p.heads_q; ++head) {
        for (int32_t c = 0; c < head_dim_v; ++c)
          store(p.out, row * p.out_stride.row + head * p.out_stride.head + c, 0.0F);
        if (p.lse != nullptr) p.lse[int64_t{head} * p.sequences.rows_total + row] = -INFINITY;
      }
    }
  }
  for_heads(p, kernel, [&](const auto& s, int32_t head, int32_t head_kv) {
    if (is_runtime && (is_second ? s.rows_there > p.seq_q : s.rows <= -p.num_splits)) return;
    for (int32_t row = 0; row < s.rows; ++row) {
      std::vector<float> out(head_dim_v, 0.0F);
      const int32_t sink = head * s.options.folded_heads + (s.options.folded_heads > 1 ? row : 0);
      float largest = s.options.sinks != nullptr ? s.options.sinks[sink] : -INFINITY;
      float sum = s.options.sinks != nullptr ? 1.0F : 0.0F;
      for (int32_t key = 0; key < s.keys; ++key) {
        if (!s.sees(row, key)) continue;
        float slope;
        const float score = s.score(
            dot(p.q, s.of_row(p.q_stride, head, row), p.k, s.of_key(p.k_stride, head_kv, key), p.head_dim), slope);
        const float next = std::max(largest, score), rescale = std::exp(largest - next),
                    weight = std::exp(score - next);
        for (int32_t c = 0; c < head_dim_v; ++c) {
          out[c] = out[c] * rescale + weight * load(p.v, s.of_key(p.v_stride, head_kv, key) + c);
        }
        sum = sum * rescale + weight;
        largest = next;
      }
      for (int32_t c = 0; c < head_dim_v; ++c)
        store(p.out, s.of_row(p.out_stride, head, row) + c, sum > 0 ? out[c] / sum : 0.0F);
      if (p.lse != nullptr) p.lse[s.statistic(head, row)] = sum > 0 ? largest + std::log(sum) : -INFINITY;
    }
  });
}

// Where keys are shared all of a result is the first share's, and the others saw no key.
void chunk(const ForwardParams& p, const host::Kernel& kernel) {
  if (p.num_splits == 1) return forward(p, kernel);
  ForwardParams whole = p;
  whole.lse = p.lse_partial;
  forward(whole, kernel);
  const bool is_ragged = p.sequences.cu_seqlens_q != nullptr;
  const int64_t rows_of_head = is_ragged ? p.sequences.rows_total : p.seq_q;
  const int64_t rows = rows_of_head * p.heads_q * (is_ragged ? 1 : p.batch);
  std::fill(p.lse_partial + rows, p.lse_partial + rows * p.num_splits, -INFINITY);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row / rows_of_head, batch = is_ragged ? 0 : head / p.heads_q;
    const int64_t at = batch * p.out_stride.batch + (head - batch * p.heads_q) * p.out_stride.head +
                       row % rows_of_head * p.out_stride.row;
    for (int32_t c = 0; c < p.head_dim_v; ++c) {
      p.out_partial[row * p.head_dim_v + c] = load(p.out, at + c);
      store(p.out, at + c, NAN);
    }
  }
}

void combine(const ForwardParams& p) {
  const int64_t rows = int64_t{p.batch} * p.heads_q * p.seq_q;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row / p.seq_q, batch = head / p.heads_q;
    const int64_t at =
        batch * p.out_stride.batch + (head - batch * p.heads_q) * p.out_stride.head + row % p.seq_q * p.out_stride.row;
    float sum = 0.0F;
    for (int32_t split = 0; split < p.num_splits; ++split) sum += std::exp(p.lse_partial[split * rows + row]);
    for (int32_t c = 0; c < p.head_dim; ++c) {
      float value = 0.0F;
      for (int32_t split = 0; split < p.num_splits; ++split) {
        const float weight = std::exp(p.lse_partial[split * rows + row]);
        if (weight > 0) value += weight / sum * p.out_partial[(split * rows + row) * p.head_dim + c];
      }
      store(p.out, at + c, value);
    }
    if (p.lse != nullptr) p.lse[row] = std::log(sum);
  }
}

int32_t width_v(const BackwardParams& p, const host::Kernel& kernel) {
  return kernel.axes[axis::kMask] < 0 ? p.head_dim_v : p.head_dim;
}

// P, and the gradient of the product of query and key.
template <class Sequence>
void differentiate(const BackwardParams& p, const Sequence& s, int32_t head, int32_t head_kv, int32_t row, int32_t key,
                   int32_t columns_v, float& weight, float& gradient) {
  const int64_t at = s.statistic(head, row);
  weight = gradient = 0.0F;
  if (p.lse[at] == -INFINITY || !s.sees(row, key)) return;
  float slope;
  const float product = dot(p.q, s.of_row(p.q_stride, head, row), p.k, s.of_key(p.k_stride, head_kv, key), p.head_dim);
  weight = std::exp(s.score(product, slope) - p.lse[at]);
  const float of_weight =
      dot(p.dout, s.of_row(p.dout_stride, head, row), p.v, s.of_key(p.v_stride, head_kv, key), columns_v);
  gradient = p.scale * slope * weight * (of_weight - p.row_dot[at]);
}

void query_gradient(const BackwardParams& p, const host::Kernel& kernel) {
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
        float weight, gradient;
        differentiate(p, s, head, head_kv, row, key, columns_v, weight, gradient);
        for (int32_t c = 0; c < p.head_dim; ++c) sum[c] += gradient * load(p.k, s.of_key(p.k_stride, head_kv, key) + c);
      }
      for (int32_t c = 0; c < p.head_dim; ++c) store(p.dq, s.of_row(p.dq_stride, head, row) + c, sum[c]);
    }
  });
}

// `sums`: of the fused kernel, which adds up dq without its scale; null for the kernel of dk and dv alone.
void key_value_gradient(const BackwardParams& p, const host::Kernel& kernel, float* sums, int64_t rows_of_sums) {
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
  for_heads(p, kernel, [&](const auto& s, int32_t first_head, int32_t head_kv) {
    if (first_head % group != 0) return;
    for (int32_t key = 0; key < s.keys; ++key) {
      std::vector<float> dk(p.head_dim, 0.0F), dv(columns_v, 0.0F);
      for (int32_t head = first_head; head < first_head + group; ++head) {
        for (int32_t row = 0; row < s.rows; ++row) {
          float weight, gradient;
          differentiate(p, s, head, head_kv, row, key, columns_v, weight, gradient);
          const int64_t at_q = s.of_row(p.q_stride, head, row), at_dout = s.of_row(p.dout_stride, head, row);
          for (int32_t c = 0; c < p.head_dim; ++c) dk[c] += gradient * load(p.q, at_q + c);
          for (int32_t c = 0; c < columns_v; ++c) dv[c] += weight * load(p.dout, at_dout + c);
          if (sums == nullptr) continue;
          float* sum = sums + (is_ragged ? head * rows_of_sums + s.statistic(0, row)
                                         : (int64_t{s.number_} * p.heads_q + head) * rows_of_sums + row) *
                                  width;
          for (int32_t c = 0; c < p.head_dim; ++c)
            sum[c] += gradient / p.scale * load(p.k, s.of_key(p.k_stride, head_kv, key) + c);
        }
      }
      for (int32_t c = 0; c < p.head_dim; ++c) store(p.dk, s.of_key(p.dk_stride, head_kv, key) + c, dk[c]);
      for (int32_t c = 0; c < columns_v; ++c) store(p.dv, s.of_key(p.dv_stride, head_kv, key) + c, dv[c]);
    }
  });
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

// row_dot and zeroed sums; dq's scale and the way back from the sums.
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

void append(const AppendParams& p) {
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
            store(to, base * there.batch + head * there.head + row * there.row + c,
                  load(from, number * here.batch + head * here.head + i * here.row + c));
          }
        };
        copy(p.k_cache, p.k_cache_stride, p.k_new, p.k_new_stride, p.head_dim);
        copy(p.v_cache, p.v_cache_stride, p.v_new, p.v_new_stride, p.head_dim_v);
      }
    }
  }
}

// Blocks of a head that tiles of `block` need, over all sequences.
int64_t tiles(const BackwardParams& p, bool is_runtime, bool of_rows, int32_t block) {
  int64_t count = 0;
  for (int32_t number = 0; number < p.batch; ++number) {
    const Sequence<BackwardParams> sequence(p, number, is_runtime, false);
    count += ceil_div(of_rows ? sequence.rows : sequence.keys, block);
  }
  return count * (of_rows ? p.heads_q : p.heads_kv);
}

std::string check_maps(void** arguments, const host::Kernel& kernel, const std::vector<const void*>& tensors) {
  for (int32_t map = 0; map < kernel.num_tensor_maps; ++map) {
    if (std::memcmp(arguments[1 + map], &tensors[map], sizeof(void*)) != 0)
      return "map " + std::to_string(map) + " of another tensor";
  }
  return "";
}

// What the kernel would do; the text of what is wrong, or an empty one.
std::string run_kernel(const host::Kernel& kernel, int64_t grid, void** arguments) {
  static BackwardParams g_fused;  // between the kernels of the fused form
  static int64_t g_rows_of_sums = 0;
  const std::string operation = kernel.operation;
  const bool is_varlen = operation.rfind("attention_varlen_", 0) == 0;
  const std::string kind = operation.substr(std::strlen(is_varlen ? "attention_varlen_" : "attention_"));
  const int32_t width = kernel.axes[axis::kHeadDim];
  if (kind == "forward" || kind == "decode") {
    const auto& p = *static_cast<const ForwardParams*>(arguments[0]);
    if (p.num_splits > 1) return "split keys";
    forward(p, kernel);
    return check_maps(arguments, kernel, {p.q, p.k, p.v, p.out});
  }
  if (kind == "chunk_forward") {
    const auto& p = *static_cast<const ForwardParams*>(arguments[0]);
    if (p.score_options.folded_heads != 1) return "heads are the kernel's to fold";
    chunk(p, kernel);
    return check_maps(arguments, kernel, {p.q, p.k, p.v, p.out});
  }
  if (kind == "combine") {
    const auto& p = *static_cast<const ForwardParams*>(arguments[0]);
    if (grid * kernel.block_m < int64_t{p.batch} * p.heads_q * p.seq_q) return "fewer warps than rows";
    combine(p);
    return "";
  }
  if (kind == "append") {
    const auto& p = *static_cast<const AppendParams*>(arguments[0]);
    if (grid * (kernel.threads / 32) < int64_t{2} * p.batch * p.new_keys * p.heads_kv) return "fewer warps than rows";
    append(p);
  } else if (kind == "row_dot") {
    const auto& p = *static_cast<const RowDotParams*>(arguments[0]);
    if (grid * kernel.threads < int64_t{4} * p.batch * p.heads * p.rows) return "fewer than four threads for a row";
    row_dots(p);
  } else if (kind == "backward_dq" || kind == "backward_dkv") {
    const auto& p = *static_cast<const BackwardParams*>(arguments[0]);
    const bool is_dq = kind == "backward_dq";
    if (!kernel.is_persistent && grid < tiles(p, is_varlen, is_dq, is_dq ? kernel.block_m : kernel.block_n))
      return "fewer blocks than tiles";
    if (kernel.is_persistent && (p.tile_counter == nullptr || *p.tile_counter != 0)) return "no counter of tiles";
    is_dq ? query_gradient(p, kernel) : key_value_gradient(p, kernel, nullptr, 0);
    if (is_dq) return check_maps(arguments, kernel, {p.q, p.k, p.v, p.dout, p.dq});
    return check_maps(arguments, kernel, {p.q, p.k, p.v, p.dout, p.dk, p.dv});
  } else if (kind == "backward_fused_prepare" || kind == "backward_fused_convert") {
    const auto run = [&](const auto& p, int64_t columns) {
      const int64_t rows = rows_of_sums(p) * (ragged_rows(p) > 0 ? 1 : p.batch);
      if (grid < rows / kDqPartialRows * p.heads && !is_varlen) return "fewer blocks than partials";
      g_rows_of_sums = rows_of_sums(p);
      kind == "backward_fused_prepare" ? prepare(p, columns) : convert(p, columns);
      return "";
    };
    if (is_varlen) {
      const auto& p = *static_cast<const VarlenFusedQueryParams*>(arguments[0]);
      return run(p, p.width);
    }
    return run(*static_cast<const FusedQueryParams*>(arguments[0]), width);
  } else if (kind == "backward_fused") {
    g_fused = *static_cast<const BackwardParams*>(arguments[0]);
    if (g_fused.tile_counter == nullptr || *g_fused.tile_counter != 0) return "no counter of tiles";
    key_value_gradient(g_fused, kernel, static_cast<float*>(g_fused.dq), g_rows_of_sums);
    return check_maps(arguments, kernel, {g_fused.q, g_fused.k, g_fused.v, g_fused.dout, g_fused.dk, g_fused.dv});
  } else {
    return "no loops for it";
  }
  return "";
}

}  // namespace
}  // namespace attention

namespace host {
namespace {

CUresult launch(CUfunction function, unsigned grid, unsigned, unsigned, bool, void** arguments) {
  const Kernel& kernel = kernel_of(function);
  const std::string problem = attention::run_kernel(kernel, grid, arguments);
  g_log += std::string("{\"symbol\": \"") + kernel.symbol + "\", \"operation\": \"" + kernel.operation +
           "\", \"grid\": " + std::to_string(grid) + ", \"problem\": \"" + problem + "\"}\n";
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace host
}  // namespace flashmoe

FAKE_EXPORT void fake_gpu(int capability, int multiprocessors, int is_capturing) {
  flashmoe::host::begin_call(capability, multiprocessors, is_capturing != 0);
}
