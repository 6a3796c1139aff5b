// Latent attention on a driver without a GPU: plain loops over launch parameters, in bf16. Launch errors are logged.
#include <torch/csrc/stable/library.h>

#include <malloc.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "../attention/codes.h"
#include "../fake_driver.h"
#include "../fake_memory.h"
#include "host/ceil_div.h"
#include "mla/params/append.h"
#include "mla/params/decode.h"

namespace flashmoe {
namespace mla {
namespace {

using host::Kernel;
using host::load;
using host::store;

std::vector<float> g_results;  // of a decoding kernel whose sequences are split, for the combine kernel

bool is_aligned(const void* address, std::initializer_list<int64_t> strides) {
  bool is = reinterpret_cast<uintptr_t>(address) % 16 == 0;
  for (const int64_t bytes : strides) is = is && bytes % 16 == 0;
  return is;
}

float value_at(const DecodeParams& p, const char* key, int64_t column) {
  if (p.is_fp8 == 0) return load(key, column);
  if (column >= kLatentDim) return load(key + kRotaryBytesOffset, column - kLatentDim);
  float scale;
  std::memcpy(&scale, key + kScaleBytesOffset + column / kScaleColumns * 4, 4);
  const float value = attention::value_of(static_cast<uint8_t>(key[column])) * scale;
  uint16_t rounded;  // as in the dequantised cache
  store(&rounded, 0, value);
  return load(&rounded, 0);
}

// Null if there is no such key.
const char* key_of(const DecodeParams& p, int64_t sequence, int64_t key) {
  int64_t page = sequence, row = key;
  if (p.indices != nullptr) {
    const int64_t index = p.indices[sequence * p.max_keys + key];
    if (index < 0 || index >= p.num_slots) return nullptr;
    page = index / p.page_size;
    row = index % p.page_size;
  } else if (p.block_table != nullptr) {
    page = p.block_table[sequence * p.block_table_stride + key / p.page_size];
    row = key % p.page_size;
  }
  if (page < 0 || page >= p.num_pages) return nullptr;
  return static_cast<const char*>(p.cache) + (page * p.page_stride + row * p.key_stride) * (p.is_fp8 != 0 ? 1 : 2);
}

// Results of all rows, then their log-sum-exp.
std::vector<float> attend(const DecodeParams& p) {
  const int64_t rows = int64_t{p.batch} * p.tokens * p.heads;
  std::vector<float> results(static_cast<size_t>(rows * (kLatentDim + 1)), 0.0F);
  std::vector<float> values;  // of a sequence's keys
  int64_t held = -1;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row % p.heads, token = row / p.heads % p.tokens, sequence = row / p.heads / p.tokens;
    const int64_t all = p.cache_seqlens != nullptr ? p.cache_seqlens[sequence] : p.max_keys;
    values.resize(static_cast<size_t>(all * kHeadDim));
    for (int64_t at = 0; held != sequence && at < all * kHeadDim; ++at) {
      const char* key = key_of(p, sequence, at / kHeadDim);
      values[static_cast<size_t>(at)] = key != nullptr ? value_at(p, key, at % kHeadDim) : 0.0F;
    }
    held = sequence;
    const int64_t keys = p.is_causal != 0 ? std::max<int64_t>(0, all - (p.tokens - 1 - token)) : all;
    const int64_t q = sequence * p.q_stride_batch + (token * p.heads + head) * p.q_stride_row;
    float sum = 0.0F, *out = &results[static_cast<size_t>(row * kLatentDim)];
    for (int64_t index = 0; index < keys; ++index) {
      if (key_of(p, sequence, index) == nullptr) continue;
      const float* key = &values[static_cast<size_t>(index * kHeadDim)];
      float score = 0.0F;
      for (int64_t column = 0; column < kHeadDim; ++column) score += load(p.q, q + column) * key[column];
      const float weight = std::exp2(score * p.scale_log2);
      sum += weight;
      for (int64_t column = 0; column < kLatentDim; ++column) out[column] += weight * key[column];
    }
    if (p.sinks != nullptr) sum += std::exp(p.sinks[head]);
    for (int64_t column = 0; column < kLatentDim && sum > 0.0F; ++column) out[column] /= sum;
    results[static_cast<size_t>(rows * kLatentDim + row)] = std::log(sum);
  }
  return results;
}

void write(const DecodeParams& p, const std::vector<float>& results) {
  const int64_t rows = int64_t{p.batch} * p.tokens * p.heads, apart = int64_t{p.batches_per_sequence} * p.tokens;
  for (int64_t at = 0; at < rows * kLatentDim; ++at) store(p.out, at, results[static_cast<size_t>(at)]);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row % p.heads, token = row / p.heads;  // of all sequences
    p.lse[(token / apart * p.heads + head) * apart + token % apart] =
        results[static_cast<size_t>(rows * kLatentDim + row)];
  }
}

std::string decode(const Kernel& kernel, const DecodeParams& p, int64_t grid, void** maps) {
  const int64_t rows = int64_t{p.tokens} * p.heads, row_tiles = ceil_div(rows, kernel.block_m);
  const int64_t bytes = p.is_fp8 != 0 ? 1 : 2, held = int64_t{host::g_gpu.num_multiprocessors} * kernel.min_blocks;
  const bool is_split = p.num_splits != 1;
  if (p.block_m != kernel.block_m || p.row_tiles != row_tiles || 1 << p.block_n_log2 != kernel.block_n)
    return "another tile than the kernel's";
  if (grid != int64_t{p.num_sm_parts} * row_tiles) return "not a block for each part and tile";
  const int64_t most = std::max<int64_t>(1, held / row_tiles), even = p.batch <= most ? most / p.batch * p.batch : most;
  const int64_t parts =
      most - even <= most / 32 ? even : most;  // whole parts for each sequence, or the other way around
  if (p.num_sm_parts != (is_split ? parts : p.batch)) return "other parts than the GPU holds";
  if (p.parts_per_sequence != (is_split && p.batch <= 32 ? p.num_sm_parts / p.batch : 0))
    return "other parts of a sequence";
  const int min_blocks_per_part = std::strcmp(kernel.operation, "mla_decode_few") == 0 ? 1 : 2;
  if (p.num_splits < 1 || p.min_blocks_per_part != min_blocks_per_part) return "no parts, or shares too short";
  if (!is_aligned(p.q, {2 * p.q_stride_batch, 2 * p.q_stride_row})) return "q cannot be loaded by 16 bytes";
  if (!is_aligned(p.cache, {bytes * p.page_stride, bytes * p.key_stride})) return "keys cannot be loaded by 16 bytes";
  const void* tensors[] = {p.q, p.cache};
  for (int32_t map = 0; map < kernel.num_tensor_maps; ++map) {
    if (std::memcmp(maps[map], &tensors[map], sizeof(void*)) != 0) return "a tensor map of another tensor";
  }
  const int32_t both = p.page_size | kernel.block_n, box = p.block_table == nullptr ? kernel.block_n : both & -both;
  if (p.box_rows != box) return "a box that is no part of a page";
  if ((p.indices != nullptr) != (std::strstr(kernel.variant, "sparse") != nullptr)) return "a kernel of other keys";
  if ((p.is_fp8 != 0) != (std::strstr(kernel.variant, "codes") != nullptr)) return "a kernel of another cache";
  g_results = attend(p);
  if (!is_split) {
    write(p, g_results);
    return p.out_partial == nullptr && p.state_partial == nullptr ? "" : "room for parts that there are not";
  }
  const int64_t partial_rows = 2 * int64_t{p.num_sm_parts} * row_tiles * kernel.block_m;
  const auto left = static_cast<int64_t>(malloc_usable_size(p.out_partial)) -
                    4 * static_cast<int64_t>(p.state_partial - p.out_partial);
  if (p.state_partial - p.out_partial < partial_rows * kLatentDim || left < 8 * partial_rows)
    return "no room for parts";
  std::fill_n(p.out_partial, partial_rows * kLatentDim, NAN);
  std::fill_n(p.state_partial, partial_rows * 2, NAN);
  return "";
}

std::string combine(const Kernel& kernel, const DecodeParams& p, int64_t grid) {
  const int64_t sequences = std::min(p.batch, p.num_sm_parts), sums = kernel.block_m / p.warps_per_sum;
  const int64_t held = std::max<int64_t>(1, int64_t{host::g_gpu.num_multiprocessors} * kernel.min_blocks / sequences);
  const int64_t units = ceil_div(int64_t{p.tokens} * p.heads, kSumRows) * (kLatentDim / kSumColumns);
  if (p.warps_per_sum != (p.num_sm_parts >= 24 * p.batch ? kernel.block_m : 1)) return "other warps for a sum";
  if (p.tile_pairs_per_warp != (units > held * sums ? 2 : 1)) return "other pairs of tiles in a sum";
  if (grid != sequences * std::min(ceil_div(units, sums * p.tile_pairs_per_warp), held)) return "another grid";
  write(p, g_results);
  return "";
}

std::string append(const Kernel& kernel, const AppendParams& p, int64_t grid) {
  const int64_t rows = int64_t{p.batch} * p.tokens;
  if (grid != ceil_div(rows, kernel.threads / 32)) return "not a warp for each row";
  if (!is_aligned(p.latents, {2 * p.latents_stride_batch, 2 * p.latents_stride_token})) return "latents lie badly";
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t sequence = row / p.tokens, token = row % p.tokens;
    int64_t page = 0, key = 0;
    if (p.slots != nullptr) {
      if (p.slots[row] < 0 || p.slots[row] >= int64_t{p.num_pages} * p.page_size) continue;
      page = p.slots[row] / p.page_size;
      key = p.slots[row] % p.page_size;
    } else {
      key = int64_t{p.cache_seqlens[sequence]} + token;
      if (key < 0 || key >= p.capacity) continue;
      page = p.block_table != nullptr ? p.block_table[sequence * p.block_table_stride + key / p.page_size] : sequence;
      if (page < 0 || page >= p.num_pages) continue;
      key = p.block_table != nullptr ? key % p.page_size : key;
    }
    char* to = static_cast<char*>(p.cache) + page * p.page_stride + key * p.key_stride;
    const int64_t from = sequence * p.latents_stride_batch + token * p.latents_stride_token;
    for (int64_t group = 0; group < kLatentDim; group += kScaleColumns) {
      float most = 0.0F, scale = std::ldexp(1.0F, -13);
      for (int64_t i = 0; i < kScaleColumns; ++i) most = std::fmax(most, std::fabs(load(p.latents, from + group + i)));
      while (scale * 448.0F < most && scale < std::ldexp(1.0F, 127)) scale *= 2.0F;
      std::memcpy(to + kScaleBytesOffset + group / kScaleColumns * 4, &scale, 4);
      for (int64_t i = group; i < group + kScaleColumns; ++i)
        to[i] = static_cast<char>(attention::code_of(load(p.latents, from + i) / scale));
    }
    std::memcpy(to + kRotaryBytesOffset, static_cast<const uint16_t*>(p.latents) + from + kLatentDim, 2 * 64);
  }
  return "";
}

}  // namespace
}  // namespace mla

namespace host {
namespace {

CUresult launch(CUfunction function, unsigned grid, unsigned, unsigned, bool is_dependent, void** arguments) {
  const Kernel& kernel = kernel_of(function);
  const std::string operation = kernel.operation;
  const auto& decoding = *static_cast<const mla::DecodeParams*>(arguments[0]);
  const void* cache =
      operation == "mla_append" ? static_cast<const mla::AppendParams*>(arguments[0])->latents : decoding.cache;
  const std::string problem =
      operation == "mla_append" ? mla::append(kernel, *static_cast<const mla::AppendParams*>(arguments[0]), grid)
      : operation.rfind("mla_decode", 0) == 0 ? mla::decode(kernel, decoding, grid, arguments + 1)
                                              : mla::combine(kernel, decoding, grid);
  g_log += std::string("{\"symbol\": \"") + kernel.symbol +
           "\", \"is_dependent\": " + (is_dependent ? "true" : "false") +
           ", \"read\": " + std::to_string(reinterpret_cast<uintptr_t>(cache)) +
           ", \"q\": " + std::to_string(operation == "mla_append" ? 0 : reinterpret_cast<uintptr_t>(decoding.q)) +
           ", \"problem\": \"" + problem + "\"}\n";
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace host
}  // namespace flashmoe

FAKE_EXPORT void fake_gpu(int capability, int multiprocessors, int is_capturing) {
  flashmoe::host::begin_call(capability, multiprocessors, is_capturing != 0);
}
