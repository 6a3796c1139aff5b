// Operands of the matrix products in gemm_tile.h, packed. Include after a vector_*.h. Internal linkage.
//
// A word is 32 bits along the summed dimension: one element as fp32, or two bf16 if the processor multiplies pairs of
// them (bf16_pairs.h), the first in the low half. Operands are given as pointers to their rows, so that rows may be
// gathered. Elements past an end are packed as zeros.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/scalar_types.h"

namespace flashmoe::cpu {
namespace {

template <class T>
struct Words {
  static constexpr int kElements = 1;
  // sum + a * b; for words of two elements, sum + a.low * b.low + a.high * b.high.
  static Vector::Float multiply_add(Vector::Float a, Vector::Float b, Vector::Float sum) {
    return Vector::fma(a, b, sum);
  }
  // The words of a row's next elements.
  static Vector::Float load(const T* row) { return Vector::load(row); }
  // One word of each of the next columns: from `row`, and from `next` if a word holds two elements (null: zeros).
  static Vector::Float load_columns(const T* row, const T*) { return Vector::load(row); }
  // The same for columns that are already fp32: `second` is the next row's.
  static Vector::Float of_columns(Vector::Float first, Vector::Float) { return first; }
};

template <class T>
constexpr int kWordElements = Words<T>::kElements;
template <class T>
constexpr int kVectorElements = Vector::kWidth * kWordElements<T>;  // elements per vector of words

template <class T>
inline int32_t word_count(int32_t elements) {
  return (elements + kWordElements<T> - 1) / kWordElements<T>;
}

template <class T>
inline Vector::Float load_words(const T* row, int32_t count) {
  if (count >= kVectorElements<T>) return Words<T>::load(row);
  T tail[kVectorElements<T>] = {};
  if (count > 0) memcpy(tail, row, static_cast<size_t>(count) * sizeof(T));
  return Words<T>::load(tail);
}

template <class T>
inline Vector::Float load_columns(const T* row, const T* next, int32_t count) {
  T tail[2][Vector::kWidth];
  if (count < Vector::kWidth) {
    memset(tail, 0, sizeof tail);
    memcpy(tail[0], row, static_cast<size_t>(count) * sizeof(T));
    row = tail[0];
    if (kWordElements<T> == 2 && next != nullptr) {
      memcpy(tail[1], next, static_cast<size_t>(count) * sizeof(T));
      next = tail[1];
    }
  }
  return Words<T>::load_columns(row, next);
}

// dst[row][word]: `elements` from rows[row] + offset on, up to a whole vector of words.
template <class T>
inline void pack_rows(const T* const* rows, int32_t row_count, int64_t offset, int32_t elements, float* dst,
                      int64_t dst_stride) {
  for (int32_t row = 0; row < row_count; ++row, dst += dst_stride) {
    const T* src = rows[row] + offset;
    for (int32_t i = 0; i < elements; i += kVectorElements<T>) {
      Vector::store(dst + i / kWordElements<T>, load_words(src + i, elements - i));
    }
  }
}

// dst[word][lane]: `elements` from rows[lane] + offset on, of up to a vector's width of rows; writes whole squares.
template <class T>
inline void pack_transposed(const T* const* rows, int32_t row_count, int64_t offset, int32_t elements, float* dst,
                            int64_t dst_stride) {
  for (int32_t i = 0; i < elements; i += kVectorElements<T>, dst += Vector::kWidth * dst_stride) {
    if (row_count == Vector::kWidth && elements - i >= kVectorElements<T>) {
      Vector::transpose([&](int lane) { return Words<T>::load(rows[lane] + offset + i); }, dst, dst_stride);
    } else {
      const auto load = [&](int lane) {
        return lane < row_count ? load_words(rows[lane] + offset + i, elements - i) : Vector::zero();
      };
      Vector::transpose(load, dst, dst_stride);
    }
  }
}

// dst[word][lane]: `lanes` columns from `offset` on of rows that are summed over.
template <class T>
inline void pack_columns(const T* const* rows, int32_t row_count, int64_t offset, int32_t lanes, float* dst,
                         int64_t dst_stride) {
  for (int32_t row = 0; row < row_count; row += kWordElements<T>, dst += dst_stride) {
    const T* next = row + 1 < row_count ? rows[row + 1] + offset : nullptr;
    Vector::store(dst, load_columns(rows[row] + offset, next, lanes));
  }
}

// dst[lane][word] of the same columns: a left operand whose columns become its rows.
template <class T>
inline void pack_columns_as_rows(const T* const* rows, int32_t row_count, int64_t offset, int32_t lanes, float* dst,
                                 int64_t dst_stride) {
  const auto load = [&](int word) {
    const int32_t row = word * kWordElements<T>;
    if (row >= row_count) return Vector::zero();
    return load_columns(rows[row] + offset, row + 1 < row_count ? rows[row + 1] + offset : nullptr, lanes);
  };
  for (int32_t row = 0; row < row_count; row += kVectorElements<T>, dst += Vector::kWidth) {
    const auto from_here = [&](int word) { return load(word + row / kWordElements<T>); };
    Vector::transpose(from_here, dst, dst_stride);
  }
}

}  // namespace
}  // namespace flashmoe::cpu
