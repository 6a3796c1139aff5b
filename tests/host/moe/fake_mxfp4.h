// Loops for 4-bit weights, included by fake_gpu.cpp.
#pragma once

// The row of w13 that a packed row holds: eight rows of gate alternate with the same eight of up.
int64_t unpacked_row(int64_t row, int64_t rows, bool is_interleaved) {
  const int64_t column = row / 16 * 8 + row % 8, is_up = row / 8 % 2;
  return is_interleaved ? 2 * column + is_up : is_up * (rows / 2) + column;
}

// Packed weights as these loops read them: the codes of a 64 x 64 block by row, then its scales. The CPU's operator has
// no packed weights.
bool g_packs = false;
Tensor pack(const Tensor& codes, const Tensor& scales, bool is_gated, bool is_interleaved) {
  const int64_t n = codes.sizes()[1], k = 2 * codes.sizes()[2], rows = codes.sizes()[0] * n;
  Tensor made =
      host::empty({codes.sizes()[0], n / 64, k / 64, kMxfp4PackedBytes}, codes.dtype(), codes.device_type(), 0);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t from = row / n * n + (is_gated ? unpacked_row(row % n, n, is_interleaved) : row % n);
    for (int64_t block = 0; block < k / 64; ++block) {
      auto* to = static_cast<uint8_t*>(made.data()) + (row / 64 * (k / 64) + block) * kMxfp4PackedBytes;
      std::copy_n(static_cast<const uint8_t*>(codes.data()) + from * (k / 2) + block * 32, 32, to + row % 64 * 32);
      std::copy_n(static_cast<const uint8_t*>(scales.data()) + from * (k / 32) + block * 2, 2,
                  to + 2048 + row % 64 * 2);
    }
  }
  return made;
}

// Multiplies by 4-bit weights, converted to bf16.
std::string multiply_mxfp4(const host::Kernel& kernel, const Mxfp4GemmParams& params, int64_t grid) {
  constexpr float kNumbers[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  const std::string operation = kernel.operation;
  const bool is_packed = operation.find("_packed") != std::string::npos;
  GemmParams p = params.gemm;
  const auto* codes = static_cast<const uint8_t*>(p.b);
  std::vector<uint16_t> weights(static_cast<std::size_t>(p.experts) * p.n * p.k);
  for (int64_t row = 0; row < static_cast<int64_t>(p.experts) * p.n; ++row) {
    const int64_t expert = row / p.n, n = row % p.n;
    const bool is_in_turn = is_packed && operation.find("gated") != std::string::npos;
    const int64_t to = is_in_turn ? unpacked_row(n, p.n, p.is_interleaved != 0) : n;
    for (int64_t k = 0; k < p.k; ++k) {
      const uint8_t* block = codes + ((row / 64) * (p.k / 64) + k / 64) * kMxfp4PackedBytes;
      const uint8_t byte = is_packed ? block[row % 64 * 32 + k % 64 / 2]
                                     : codes[2 * (expert * p.b_expert_stride + n * p.b_stride) + k / 2];
      const int scale = is_packed ? block[kMxfp4PackedCodes + row % 64 * 2 + k % 64 / kMxfp4Block]
                                  : params.b_scale[row * (p.k / kMxfp4Block) + k / kMxfp4Block];
      const int code = k % 2 == 0 ? byte & 15 : byte >> 4;
      const float value = scale == 255 ? NAN : std::ldexp(kNumbers[code & 7], scale - 127);
      store(weights.data(), (expert * p.n + to) * p.k + k, (code & 8) != 0 ? -value : value);
    }
  }
  p.b = weights.data();
  p.b_stride = p.k;
  p.b_expert_stride = static_cast<int64_t>(p.n) * p.k;
  return multiply(kernel, p, WeightLayout::kNk, grid);
}
