// The kernels that train a layer in e4m3, as loops; included by fake_gpu.cpp, whose helpers it uses.
#pragma once

std::string multiply_weight_gradient(const host::Kernel& kernel, const ScaledGemmParams& params, int64_t grid) {
  const GemmParams& p = params.gemm;
  const int64_t padded = 2 * p.a_stride;
  for (int64_t expert = 0; expert < p.experts; ++expert) {
    const int32_t begin = p.expert_offsets[expert], count = p.expert_offsets[expert + 1] - begin;
    const int64_t first = padded_block(begin, static_cast<int>(expert));
    for (int64_t n = 0; n < p.n; ++n) {
      for (int64_t k = 0; k < p.k; ++k) {
        float sum = 0.0F;
        for (int64_t row = 0; row < count; ++row) {
          const int64_t block = first + row / kScaleBlock, at = first * kScaleBlock + row;
          sum += load_e4m3(p.a, n * padded + at) * params.a_scale[block * p.n + n] * load_e4m3(p.b, k * padded + at) *
                 params.b_scale[block * (p.k / kScaleBlock) + k / kScaleBlock];
        }
        store(p.d, (expert * p.n + n) * p.d_stride + k, sum);
      }
    }
  }
  return check_tiles(kernel, p, grid);
}

using Number = std::function<float(int64_t row, int64_t column)>;

// Writes [columns][stride] of an expert's rows from `first` on, in blocks from `block` on; a scale per 128 x width.
void transpose(const Number& number, int32_t first, int32_t count, int64_t block, int64_t columns, int64_t width,
               void* values, int64_t stride, float* scales) {
  for (int64_t start = 0; start < count; start += kScaleBlock, ++block) {
    for (int64_t column = 0; column < columns; column += width) {
      std::vector<float> tile;
      for (int64_t at = column; at < column + width; ++at) {
        for (int64_t row = start; row < start + kScaleBlock; ++row) {
          tile.push_back(row < count ? number(first + row, at) : 0.0F);
        }
      }
      std::vector<uint8_t> codes(tile.size());
      scales[(block * columns + column) / width] = store_e4m3(codes.data(), 0, tile);
      for (int64_t at = 0; at < width; ++at) {
        std::copy_n(codes.data() + at * kScaleBlock, kScaleBlock,
                    static_cast<uint8_t*>(values) + (column + at) * stride + block * kScaleBlock);
      }
    }
  }
}

// Writes values [.][columns], one scale per 128 of a row.
void quantize_row(const Number& number, int64_t row, int64_t columns, void* values, float* scales) {
  for (int64_t column = 0; column < columns; column += kScaleBlock) {
    std::vector<float> block;
    for (int64_t at = column; at < column + kScaleBlock; ++at) block.push_back(number(row, at));
    scales[(row * columns + column) / kScaleBlock] = store_e4m3(values, row * columns + column, block);
  }
}

void quantize_tiles(const QuantizeTilesParams& p, TileSource source) {
  if (source == TileSource::kWeights) {
    for (int64_t expert = 0; expert < p.experts; ++expert) {
      const int64_t size = int64_t{p.rows} * p.columns, blocks = size / kScaleBlock / kScaleBlock;
      const auto weight = [&](int64_t row, int64_t column) {
        return load(p.x, expert * size + row * p.columns + column);
      };
      const auto transposed = [&](int64_t row, int64_t column) { return weight(column, row); };
      // The columns of the transpose are the rows of the weights.
      std::vector<float> scales(blocks);
      transpose(weight, 0, p.rows, 0, p.columns, kScaleBlock, static_cast<uint8_t*>(p.transposed) + expert * size,
                p.rows, scales.data());
      transpose(transposed, 0, p.columns, 0, p.rows, kScaleBlock, static_cast<uint8_t*>(p.values) + expert * size,
                p.columns, p.transposed_scales + expert * blocks);
      std::copy(scales.begin(), scales.end(), p.scales + expert * blocks);
    }
    return;
  }
  const auto token = [&](int64_t row, int64_t column) {
    return load(p.x, row_of(p.row_slots, row, p.top_k) * p.x_stride + column);
  };
  for (int32_t expert = 0; expert < p.experts; ++expert) {
    const int32_t begin = p.expert_offsets[expert], end = p.expert_offsets[expert + 1];
    for (int64_t row = begin; p.values != nullptr && row < end; ++row) {
      quantize_row(token, row, p.columns, p.values, p.scales);
    }
    if (p.transposed == nullptr) continue;
    transpose(token, begin, end - begin, padded_block(begin, expert), p.columns,
              source == TileSource::kTokens ? kScaleBlock : 1, p.transposed, p.transposed_stride, p.transposed_scales);
  }
}

void differentiate(const GatedGradientParams& p) {
  const int64_t both = 2 * p.columns;
  std::vector<uint16_t> dz(p.slots * both), active(p.slots * p.columns);
  for (int64_t row = 0; row < p.expert_offsets[p.experts]; ++row) {
    for (int64_t column = 0; column < p.columns; ++column) {
      const float s = load(p.s, row * p.columns + column), weight = p.row_weights[row];
      const auto found = activate(p.activation, load(p.preactivation, row * both + column),
                                  load(p.preactivation, row * both + p.columns + column));
      store(dz.data(), row * both + column, weight * s * found.by_gate);
      store(dz.data(), row * both + p.columns + column, weight * s * found.by_up);
      store(active.data(), row * p.columns + column, weight * found.value);
      float& dot = p.row_dots[column / kScaleBlock * p.slots + row];
      dot = (column % kScaleBlock == 0 ? 0.0F : dot) + found.value * s;
    }
  }
  const auto gradient = [&](int64_t row, int64_t column) { return load(dz.data(), row * both + column); };
  const auto activation = [&](int64_t row, int64_t column) { return load(active.data(), row * p.columns + column); };
  for (int32_t expert = 0; expert < p.experts; ++expert) {
    const int32_t begin = p.expert_offsets[expert], end = p.expert_offsets[expert + 1];
    const int64_t block = padded_block(begin, expert);
    for (int64_t row = begin; p.values != nullptr && row < end; ++row) {
      quantize_row(gradient, row, both, p.values, p.scales);
    }
    if (p.transposed != nullptr) {
      transpose(gradient, begin, end - begin, block, both, 1, p.transposed, p.transposed_stride, p.transposed_scales);
    }
    if (p.activation_transposed != nullptr) {
      transpose(activation, begin, end - begin, block, p.columns, kScaleBlock, p.activation_transposed,
                p.transposed_stride, p.activation_scales);
    }
  }
}
