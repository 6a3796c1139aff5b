// Products with scales, and quantisation, as loops; included by fake_gpu.cpp, whose helpers it uses.
#pragma once

// The value of each code.
const std::vector<float>& e4m3_numbers() {
  static const std::vector<float> numbers = [] {
    std::vector<float> made;
    for (int bits = 0; bits < 256; ++bits) {
      const int exponent = bits >> 3 & 15, fraction = bits & 7;
      const float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                        : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
      made.push_back((bits & 127) == 127 ? NAN : bits >= 128 ? -value : value);
    }
    return made;
  }();
  return numbers;
}

float load_e4m3(const void* address, int64_t index) {
  return e4m3_numbers()[static_cast<const uint8_t*>(address)[index]];
}

// Stores the nearest values; returns their block's scale.
float store_e4m3(void* address, int64_t index, const std::vector<float>& block) {
  float largest = 0.0F;
  for (const float value : block) largest = std::max(largest, std::fabs(value));
  const float scale = largest == 0.0F ? 1.0F : largest / 256.0F;
  for (const float value : block) {
    int best = 0;
    for (int bits = 0; bits < 255; ++bits) {
      if (bits == 127) continue;
      const uint8_t byte = static_cast<uint8_t>(bits), before = static_cast<uint8_t>(best);
      if (std::fabs(load_e4m3(&byte, 0) - value / scale) < std::fabs(load_e4m3(&before, 0) - value / scale))
        best = bits;
    }
    static_cast<uint8_t*>(address)[index++] = static_cast<uint8_t>(best);
  }
  return scale;
}

void quantize(const QuantizeParams& p, bool is_float) {
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t column = 0; column < p.columns; column += kScaleBlock) {
      std::vector<float> block;
      for (int64_t at = row * p.x_stride + column, i = 0; i < kScaleBlock; ++i, ++at) {
        block.push_back(is_float ? static_cast<const float*>(p.x)[at] : load(p.x, at));
      }
      p.scales[(row * p.columns + column) / kScaleBlock] = store_e4m3(p.values, row * p.columns + column, block);
    }
  }
}

std::string multiply_scaled(const host::Kernel& kernel, const ScaledGemmParams& params, int64_t grid) {
  const GemmParams& p = params.gemm;
  const std::string operation = kernel.operation;
  const bool is_gated = operation.find("gated") != std::string::npos;
  const bool has_few_rows = operation.find("few_rows") != std::string::npos;
  const int64_t blocks = 2 * p.k / kScaleBlock, columns = is_gated ? p.n / 2 : p.n;
  for (int64_t expert = 0; expert < p.experts; ++expert) {
    const int64_t begin = p.expert_offsets[expert], end = p.expert_offsets[expert + 1];
    for (int64_t row = begin; row < end; ++row) {
      const int64_t a_row = row_of(p.a_slots, row, p.top_k);
      const auto product = [&](int64_t n) {
        float sum = 0.0F;
        for (int64_t k = 0; k < 2 * p.k; ++k) {
          sum += load_e4m3(p.a, 2 * a_row * p.a_stride + k) * params.a_scale[a_row * blocks + k / kScaleBlock] *
                 load_e4m3(p.b, 2 * (expert * p.b_expert_stride + n * p.b_stride) + k) *
                 params.b_scale[(expert * (p.n / kScaleBlock) + n / kScaleBlock) * blocks + k / kScaleBlock];
        }
        return sum;
      };
      std::vector<float> block;
      for (int64_t column = 0; column < columns; ++column) {
        if (!is_gated) {
          store(p.d, row * p.d_stride + column, product(column));
          continue;
        }
        const float z[2] = {product(column), product(columns + column)};
        if (p.preactivation != nullptr) {
          store(p.preactivation, row * p.n + column, z[0]);
          store(p.preactivation, row * p.n + columns + column, z[1]);
        }
        const float h = activate(p.activation, z[0], z[1]).value;
        if (has_few_rows) {
          static_cast<float*>(p.d)[row * p.d_stride + column] = h;
          continue;
        }
        block.push_back(h);
        if ((column + 1) % kScaleBlock != 0) continue;
        const int64_t first = column + 1 - kScaleBlock;
        params.d_scale[(row * columns + first) / kScaleBlock] = store_e4m3(p.d, 2 * row * p.d_stride + first, block);
        block.clear();
      }
    }
  }
  return check_tiles(kernel, p, grid);
}
