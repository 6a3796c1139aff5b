// Caches of 8-bit floats on the CPU. If every scale is a power of two with which this is exact, the codes are converted
// to a cache of 16-bit elements, and the kernels for that type run; otherwise to float32, with float32 queries. Each
// call converts the keys that it reads.

#include <array>
#include <cstring>

#include "attention/host/backends.h"
#include "attention/host/e4m3.h"
#include "host/last_kernel.h"

namespace flashmoe::attention {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value = 0.0F;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float decode(uint32_t code) {
  const uint32_t sign = (code & 0x80U) << 24, magnitude = code & 0x7fU;
  if (magnitude == 0x7fU) return float_of(sign | 0x7fc00000U);
  return float_of(sign | magnitude << 20) * 0x1p120F;  // the three mantissa bits become the top ones of a float
}

// Rounds to nearest even; values beyond 448 become 448, NaN becomes 0x7f.
uint8_t encode(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffU;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80U);
  if (magnitude > 0x7f800000U) return 0x7f;
  if (magnitude >= 0x43e00000U) return sign | 0x7e;  // 448
  // Below 2^-6 codes are multiples of 2^-9, the last bit of a float of the size of kShift.
  constexpr float kShift = 0x1p14F;
  if (magnitude < 0x3c800000U)
    return sign | static_cast<uint8_t>(bits_of(float_of(magnitude) + kShift) - bits_of(kShift));
  return sign | static_cast<uint8_t>((magnitude + 0x7ffffU + (magnitude >> 20 & 1U) - 0x3c000000U) >> 20);
}

float scale_at(const CacheScale& scale, int64_t index, int64_t head) {
  return scale.values == nullptr ? scale.factor
                                 : scale.factor * scale.values[index * scale.stride + head * scale.head_stride];
}

// Whether every code times the scale is exact in the type: float16 has 2^-24 to 2^15, bfloat16 far more.
bool is_exact(float scale, Dtype dtype) {
  const uint32_t bits = bits_of(scale);
  const auto exponent = static_cast<int32_t>(bits >> 23) - 127;
  const int32_t least = dtype == Dtype::kFloat16 ? -15 : -100, most = dtype == Dtype::kFloat16 ? 7 : 100;
  return (bits & 0x807fffffU) == 0 && exponent >= least && exponent <= most;
}

// Calls function(scale index, index along the axis of `strides.batch`, index along the axis of `strides.row`) for each
// key that the lengths cover, sequence by sequence.
template <class Function>
void for_each_key(const ForwardParams& params, Function function) {
  const Batch& sequences = params.sequences;
  for (int64_t sequence = 0; sequence < params.batch; ++sequence) {
    int64_t first = 0, keys = params.seq_k;
    if (sequences.cu_seqlens_k != nullptr) {
      first = sequences.cu_seqlens_k[sequence];
      keys = sequences.cu_seqlens_k[sequence + 1] - first;
    }
    if (sequences.seqused_k != nullptr) keys = sequences.seqused_k[sequence];
    for (int64_t key = 0; key < keys; ++key) {
      if (sequences.block_table == nullptr) {
        function(sequence, sequence, first + key);
        continue;
      }
      // The table may have no valid page for keys before a window.
      const int64_t page = sequences.block_table[sequence * sequences.block_table_stride + key / sequences.page_size];
      if (page >= 0 && page < sequences.num_pages) function(sequence, page, key % sequences.page_size);
    }
  }
}

struct Dequantized {
  Tensor values;  // float32, contiguous
  bool is_exact = true;
};

// Has the sizes of `cache`; each element is a code's value times its scale. Keys that no length covers are left
// uninitialised.
Dequantized dequantize(const Tensor& cache, const Strides& stride, const CacheScale& scale, const ForwardParams& params,
                       const VarlenArguments& arguments) {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> values{};
    for (uint32_t code = 0; code < 256; ++code) values[code] = decode(code);
    return values;
  }();
  Dequantized result;
  result.values = host::empty(cache.dim(), cache.sizes(), aoti_torch_dtype_float32(), cache.device_type(), 0);
  const Strides to = strides_of(result.values, arguments.has_pages());
  const auto* codes = static_cast<const uint8_t*>(cache.data());
  auto* values = static_cast<float*>(result.values.data());
  const int64_t columns = cache.sizes()[cache.dim() - 1];
  for_each_key(params, [&](int64_t sequence, int64_t batch, int64_t row) {
    for (int64_t head = 0; head < params.heads_kv; ++head) {
      const float factor = scale_at(scale, scale.is_of_pages != 0 ? batch : sequence, head);
      result.is_exact = result.is_exact && is_exact(factor, arguments.dtype);
      const uint8_t* from = codes + batch * stride.batch + head * stride.head + row * stride.row;
      float* target = values + batch * to.batch + head * to.head + row * to.row;
      for (int64_t column = 0; column < columns; ++column) target[column] = kValues[from[column]] * factor;
    }
  });
  return result;
}

Tensor converted(const Tensor& tensor, int32_t dtype) {
  Tensor result = host::empty(tensor.dim(), tensor.sizes(), dtype, tensor.device_type(), tensor.device_index());
  host::check_shim(aoti_torch_copy_(result.get(), tensor.get(), /*non_blocking=*/0), "copy_");
  return result;
}

}  // namespace

void forward_e4m3_cpu(const E4m3Arguments& arguments, const ForwardOutputs& outputs) {
  const VarlenArguments& varlen = arguments.varlen;
  const ForwardParams params = make_varlen_params(varlen, outputs);
  const bool has_pages = varlen.has_pages();
  Dequantized k = dequantize(varlen.k, params.k_stride, make_scale(arguments.k_scale, has_pages), params, varlen);
  Dequantized v = dequantize(varlen.v, params.v_stride, make_scale(arguments.v_scale, has_pages), params, varlen);
  if (k.is_exact && v.is_exact) {
    VarlenArguments read = with_operands(varlen, host::alias(varlen.q), converted(k.values, varlen.torch_dtype),
                                         converted(v.values, varlen.torch_dtype));
    read.has_codes = false;
    forward_varlen_cpu(read, outputs);
    return;
  }
  const int32_t float32 = aoti_torch_dtype_float32();
  VarlenArguments read = with_operands(varlen, converted(varlen.q, float32), std::move(k.values), std::move(v.values));
  read.has_codes = false;
  read.dtype = Dtype::kFloat32;
  read.torch_dtype = float32;
  if (varlen.mask.is_given() && varlen.mask.dtype() != aoti_torch_dtype_bool()) {
    read.mask = converted(varlen.mask, float32);
  }
  ForwardOutputs wide;
  wide.out = converted(outputs.out, float32);
  if (outputs.lse.is_given()) wide.lse = host::alias(outputs.lse);
  forward_varlen_cpu(read, wide);
  host::check_shim(aoti_torch_copy_(outputs.out.get(), wide.out.get(), /*non_blocking=*/0), "copy_");
}

namespace {

void append_rows(const AppendArguments& arguments, const Tensor& cache, const Tensor& added, const CacheScale& scale) {
  const Tensor values = converted(added, aoti_torch_dtype_float32());
  const bool has_pages = arguments.has_pages();
  const Strides to = strides_of(cache, has_pages), from = strides_of(values);
  const int64_t* sizes = added.sizes();
  const int64_t page_size = has_pages ? cache.sizes()[1] : 0;
  const auto* used = static_cast<const int32_t*>(arguments.cache_seqlens.data());
  for (int64_t sequence = 0; sequence < sizes[0]; ++sequence) {
    for (int64_t i = 0; i < sizes[2]; ++i) {
      int64_t batch = sequence, key = used[sequence] + i;
      if (has_pages) {
        const auto* table = static_cast<const int32_t*>(arguments.block_table.data());
        batch = table[sequence * arguments.block_table.strides()[0] + key / page_size];
        key %= page_size;
      }
      for (int64_t head = 0; head < sizes[1]; ++head) {
        const float factor = scale_at(scale, scale.is_of_pages != 0 ? batch : sequence, head);
        const float* row =
            static_cast<const float*>(values.data()) + sequence * from.batch + head * from.head + i * from.row;
        uint8_t* codes = static_cast<uint8_t*>(cache.data()) + batch * to.batch + head * to.head + key * to.row;
        for (int64_t column = 0; column < sizes[3]; ++column) codes[column] = encode(row[column] / factor);
      }
    }
  }
}

}  // namespace

// Lengths and pages are already checked: on the CPU they always are.
void append_e4m3_cpu(const E4m3AppendArguments& arguments) {
  const AppendArguments& append = arguments.append;
  append_rows(append, append.k_cache, append.k_new, make_scale(arguments.k_scale, append.has_pages()));
  append_rows(append, append.v_cache, append.v_new, make_scale(arguments.v_scale, append.has_pages()));
}

}  // namespace flashmoe::attention
