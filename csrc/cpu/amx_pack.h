// Rows of Q, K and V as operands of the tile unit. Include after vector_avx512.h. Internal linkage.
//
// S = Q K^T and O = P V: Q and P are left operands, a row of 32 elements a tile row; K^T and V are right ones, whose tile
// rows hold pairs of the summed dimension. Which elements make a pair is free as long as both operands agree: pairs 2i,
// 2i + 1 in bf16, which needs no arithmetic; i and i + 16 of a step in types that are cut into planes, which two vectors
// give without a shuffle.
#pragma once

#include <cstdint>
#include <cstring>

#include "amx_tiles.h"

namespace flashmoe {
namespace cpu {
namespace {

// Rows of whole 32-element steps.
template <class T>
struct WholeRows {
  const T* data;
  int64_t stride;
};

inline bool rows_are_whole(int32_t rows, int32_t whole_rows, int32_t head_dim, int32_t padded_dim, float factor) {
  return rows == whole_rows && head_dim == padded_dim && factor == 1.0f;
}

// src [rows, head_dim] times factor (+1, -1 or 0: exact) as [whole_rows, padded_dim], zero past the ends: where it is
// if it is whole there, else a copy in `buffer`.
template <class T>
inline WholeRows<T> make_whole(const T* src, int64_t stride, int32_t rows, int32_t whole_rows, int32_t head_dim,
                               int32_t padded_dim, float factor, T* buffer) {
  if (rows_are_whole(rows, whole_rows, head_dim, padded_dim, factor)) return {src, stride};
  memset(buffer, 0, static_cast<size_t>(whole_rows) * static_cast<size_t>(padded_dim) * sizeof(T));
  for (int32_t row = 0; row < rows; ++row) {
    T* dst = buffer + int64_t{row} * padded_dim;
    memcpy(dst, src + row * stride, static_cast<size_t>(head_dim) * sizeof(T));
    if (factor == 1.0f) continue;
    for (int32_t i = 0; i < padded_dim; i += Vector::kWidth) {
      Vector::store(dst + i, Vector::mul(Vector::load(dst + i), Vector::broadcast(factor)));
    }
  }
  return {buffer, padded_dim};
}

// 32 elements from p on as one row of bf16 pairs a plane.
template <class T>
inline void load_row_planes(const T* p, __m512i (&row)[Planes<T>::value]) {
  split_pair<Planes<T>::value>(Vector::load(p), Vector::load(p + Vector::kWidth), row);
}
inline void load_row_planes(const BFloat16* p, __m512i (&row)[1]) { row[0] = _mm512_loadu_si512(p); }

// q [kGroupRows, padded_dim] -> q_planes [planes][kGroupRows, padded_dim].
template <class T>
inline void pack_q(WholeRows<T> q, int32_t padded_dim, uint16_t* q_planes) {
  constexpr int kPlanes = Planes<T>::value;
  const int64_t plane_elements = int64_t{kGroupRows} * padded_dim;
  for (int32_t row = 0; row < kGroupRows; ++row) {
    for (int32_t dim = 0; dim < padded_dim; dim += kStep) {
      __m512i planes[kPlanes];
      load_row_planes(q.data + row * q.stride + dim, planes);
#pragma GCC unroll 3
      for (int plane = 0; plane < kPlanes; ++plane) {
        _mm512_store_si512(q_planes + plane * plane_elements + int64_t{row} * padded_dim + dim, planes[plane]);
      }
    }
  }
}

// rows[i]: 16 elements of row i, as fp32.
template <class T>
inline void load_square(const T* p, int64_t stride, __m512i (&rows)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_castps_si512(Vector::load(p + i * stride));
}

// k [32 keys, padded_dim] -> a panel: [padded_dim / 32 steps][planes][2] tiles of [16 pairs, 16 keys]. Transposed before
// it is cut into planes: two squares of fp32 are fewer than three planes.
template <class T>
inline void pack_k(WholeRows<T> k, int32_t padded_dim, uint32_t* panel) {
  constexpr int kPlanes = Planes<T>::value;
  for (int32_t dim = 0; dim < padded_dim; dim += kStep, panel += kPlanes * 2 * kTileWords) {
    for (int tile = 0; tile < 2; ++tile) {
      const T* square = k.data + tile * kTileRows * k.stride + dim;
      __m512i low[16], high[16];
      load_square(square, k.stride, low);
      Vector::transpose(low);
      load_square(square + Vector::kWidth, k.stride, high);
      Vector::transpose(high);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        __m512i words[kPlanes];
        split_pair<kPlanes>(_mm512_castsi512_ps(low[i]), _mm512_castsi512_ps(high[i]), words);
#pragma GCC unroll 3
        for (int plane = 0; plane < kPlanes; ++plane) {
          _mm512_store_si512(panel + (plane * 2 + tile) * kTileWords + i * Vector::kWidth, words[plane]);
        }
      }
    }
  }
}
// bf16 needs no arithmetic.
inline void pack_k(WholeRows<BFloat16> k, int32_t padded_dim, uint32_t* panel) {
  for (int32_t dim = 0; dim < padded_dim; dim += kStep) {
    for (int tile = 0; tile < 2; ++tile, panel += kTileWords) {
      __m512i words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) words[i] = _mm512_loadu_si512(k.data + (tile * kTileRows + i) * k.stride + dim);
      Vector::transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_store_si512(panel + i * Vector::kWidth, words[i]);
    }
  }
}

// v [32 keys, padded_dim] -> a step of each panel: [panels] of [planes][2] tiles of [16 pairs of keys, 16 of head_dim],
// panels panel_words apart.
template <class T>
inline void pack_v(WholeRows<T> v, int32_t padded_dim, int64_t panel_words, uint32_t* step) {
  constexpr int kPlanes = Planes<T>::value;
  for (int32_t pair = 0; pair < kTileRows; ++pair, step += Vector::kWidth) {
    const T* low = v.data + pair * v.stride;
    const T* high = low + kTileRows * v.stride;
    for (int32_t dim = 0; dim < padded_dim; dim += Vector::kWidth) {
      __m512i words[kPlanes];
      split_pair<kPlanes>(Vector::load(low + dim), Vector::load(high + dim), words);
      uint32_t* dst = step + dim / kPanelColumns * panel_words + dim % kPanelColumns / kTileRows * kTileWords;
#pragma GCC unroll 3
      for (int plane = 0; plane < kPlanes; ++plane) _mm512_store_si512(dst + plane * 2 * kTileWords, words[plane]);
    }
  }
}
// bf16 needs no arithmetic: interleave two rows of keys, 32 of head_dim at once.
inline void pack_v(WholeRows<BFloat16> v, int32_t padded_dim, int64_t panel_words, uint32_t* step) {
  // Quarters of the first 16 elements to the low halves of the 128-bit lanes that unpacking interleaves.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int32_t pair = 0; pair < kTileRows; ++pair, step += Vector::kWidth) {
    const BFloat16* low = v.data + 2 * pair * v.stride;
    const BFloat16* high = low + v.stride;
    for (int32_t dim = 0; dim < padded_dim; dim += kPanelColumns) {
      const __m512i a = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(low + dim));
      const __m512i b = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(high + dim));
      uint32_t* dst = step + dim / kPanelColumns * panel_words;
      _mm512_store_si512(dst, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(dst + kTileWords, _mm512_unpackhi_epi16(a, b));
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
