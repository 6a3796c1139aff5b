// The AMX kernel: both products on the bf16 tile unit, the softmax with AVX-512. As in forward_simd.h everything is
// transposed (S^T = K Q^T, O^T += V^T P^T), so that K is a tile operand as it lies in memory and P^T as the softmax
// leaves it; Q^T is packed once a task, V^T once a block of keys.
//
// Types of more digits than bf16 are cut into planes of 8 significant bits, x = x0 + x1 + x2, and the products of
// planes that matter are added, smallest first: fp16 in two planes (exact), three or four products; fp32 in three
// planes (exact), six products; what is left out is 2^-16 and 2^-24 of the whole. Inf - Inf would arise between planes,
// so a block with Inf or NaN in it goes through the vector code of forward_simd.h.
//
// The target is set here, not by compiler flags, so that all files of this folder are compiled alike; it must come
// before the intrinsics' header. Nothing but this kernel's table entry may leave the translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")

#include "vector_avx512.h"

#include "forward_simd.h"
#include "run_simd.h"

namespace flashmoe {
namespace cpu {
namespace {

constexpr int32_t kTileRows = 16;
constexpr int32_t kTileBytesPerRow = 64;
constexpr int32_t kTileWords = 256;  // 32-bit words of a tile, each a pair of bf16
constexpr int32_t kStep = 32;        // elements of the summed dimension that one tile product takes
static_assert(kGroupRows == 2 * kTileRows, "a group is two tiles wide");
static_assert(kBlockKeys % kStep == 0, "a block is whole steps");

template <class T>
struct Planes;
template <>
struct Planes<BFloat16> {
  static constexpr int value = 1;
};
template <>
struct Planes<Half> {
  static constexpr int value = 2;
};
template <>
struct Planes<float> {
  static constexpr int value = 3;
};

// Pairs of planes to multiply, smallest product first, so that the rounding of the sum is that of its largest terms.
// kScores of fp16 are exact products: what (1, 1) adds is up to 2^-16 of a score, which is seen in the lse of large
// ones.
struct PlanePair {
  int a;
  int b;
};
enum class Product { kScores, kOutput };
template <int kPlanes, Product kProduct>
struct PlanePairs;
template <Product kProduct>
struct PlanePairs<1, kProduct> {
  static constexpr int kCount = 1;
  static constexpr PlanePair kPairs[] = {{0, 0}};
};
template <>
struct PlanePairs<2, Product::kScores> {
  static constexpr int kCount = 4;
  static constexpr PlanePair kPairs[] = {{1, 1}, {1, 0}, {0, 1}, {0, 0}};
};
template <>
struct PlanePairs<2, Product::kOutput> {
  static constexpr int kCount = 3;
  static constexpr PlanePair kPairs[] = {{1, 0}, {0, 1}, {0, 0}};
};
template <Product kProduct>
struct PlanePairs<3, kProduct> {
  static constexpr int kCount = 6;
  static constexpr PlanePair kPairs[] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
};

// The intrinsics are asm statements that do not say which memory they read: keep the compiler from moving stores.
inline void order_memory() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// All eight tiles 16 x 64 bytes; whoever uses tiles next configures its own. (A guard object would bring exception
// tables into a translation unit that throws nothing.)
inline void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = kTileBytesPerRow;
    config.rows[tile] = kTileRows;
  }
  order_memory();
  _tile_loadconfig(&config);
}

// A left operand: two tiles of 16 rows for each step. Tile t of step s of plane p starts at
// data + p * plane + t * tile + s * step (bytes), its rows row_bytes apart.
struct LeftOperand {
  const char* data;
  int64_t plane;
  int64_t tile;
  int64_t step;
  int64_t row_bytes;
};

// c [32 blocks, group] = sum over plane pairs and steps of a [32 blocks, 32 steps] b [32 steps, group], one step at a
// time: the caller puts vector code between the steps, so that neither waits for the other's latency (worth 8% at bf16
// and fp32, nothing at fp16, where it was measured; there the two units share issue slots, so it cannot hide more).
template <int kPlanes, Product kProduct>
class TileProduct {
 public:
  TileProduct() = default;
  // b: [planes][b_plane_steps][2] tiles, of which `steps` steps are used. The next block of a lies two tiles further.
  TileProduct(const LeftOperand& a, const uint32_t* b, int32_t b_plane_steps, int32_t steps, int32_t blocks, float* c)
      : a_(a), b_(b), b_plane_words_(int64_t{b_plane_steps} * 2 * kTileWords), steps_(steps), blocks_(blocks), c_(c) {}

  int32_t remaining_steps() const {
    return (blocks_ * Pairs::kCount - pair_) * steps_ - step_;
  }

  // Does one step; nothing and false when all are done.
  bool advance() {
    if (blocks_ == 0) return false;
    order_memory();
    if (pair_ == 0 && step_ == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const char* a = a_.data + Pairs::kPairs[pair_].a * a_.plane + step_ * a_.step;
    const uint32_t* b = b_ + Pairs::kPairs[pair_].b * b_plane_words_ + int64_t{step_} * 2 * kTileWords;
    _tile_loadd(6, b, kTileBytesPerRow);
    _tile_loadd(4, a, a_.row_bytes);
    _tile_loadd(7, b + kTileWords, kTileBytesPerRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + a_.tile, a_.row_bytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (++step_ == steps_) {
      step_ = 0;
      if (++pair_ == Pairs::kCount) finish_block();
    }
    order_memory();
    return true;
  }

  void finish() {
    while (advance()) {
    }
  }

 private:
  using Pairs = PlanePairs<kPlanes, kProduct>;

  void finish_block() {
    constexpr int64_t kRowBytes = kGroupRows * sizeof(float);
    _tile_stored(0, c_, kRowBytes);
    _tile_stored(1, c_ + kTileRows, kRowBytes);
    _tile_stored(2, c_ + kTileRows * kGroupRows, kRowBytes);
    _tile_stored(3, c_ + kTileRows * kGroupRows + kTileRows, kRowBytes);
    pair_ = 0;
    --blocks_;
    a_.data += 2 * a_.tile;
    c_ += 2 * kTileRows * kGroupRows;
  }

  LeftOperand a_{};
  const uint32_t* b_ = nullptr;
  int64_t b_plane_words_ = 0;
  int32_t steps_ = 0;
  int32_t blocks_ = 0;  // left to do, the current one included
  float* c_ = nullptr;
  int32_t pair_ = 0;
  int32_t step_ = 0;
};

// The two products that run beside a group's softmax: the output of the group before, the scores of the group after.
template <int kPlanes>
class TileWork {
 public:
  TileWork() = default;
  TileWork(const TileProduct<kPlanes, Product::kOutput>& output, const TileProduct<kPlanes, Product::kScores>& scores)
      : output_(output), scores_(scores), steps_(output.remaining_steps() + scores.remaining_steps()) {}

  // Called `slots` times, does its share of the steps each time.
  void advance(int32_t slot, int32_t slots) {
    const int32_t target = (steps_ * (slot + 1) + slots - 1) / slots;
    for (; done_ < target; ++done_) {
      if (!output_.advance()) scores_.advance();
    }
  }

  void finish() {
    output_.finish();
    scores_.finish();
  }

 private:
  TileProduct<kPlanes, Product::kOutput> output_;
  TileProduct<kPlanes, Product::kScores> scores_;
  int32_t steps_ = 0;
  int32_t done_ = 0;
};

// Two values a lane to one word a lane and plane: plane i's 8 bits of `low` in the low half, of `high` in the high one.
// The planes' sum is the value: exactly for three planes, rounded in the last of fewer.
template <int kPlanes>
inline void split_pair(__m512 low, __m512 high, __m512i (&words)[kPlanes]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
#pragma GCC unroll 3
  for (int plane = 0; plane < kPlanes; ++plane) {
    __m512i low_bits = _mm512_castps_si512(low), high_bits = _mm512_castps_si512(high);
    if (plane == kPlanes - 1 && kPlanes < 3) {
      low_bits = _mm512_add_epi32(low_bits, _mm512_set1_epi32(0x8000));
      high_bits = _mm512_add_epi32(high_bits, _mm512_set1_epi32(0x8000));
    }
    constexpr int kSelect = 0xca;  // first ? second : third, bit by bit
    words[plane] = _mm512_ternarylogic_epi32(upper, high_bits, _mm512_srli_epi32(low_bits, 16), kSelect);
    if (plane < kPlanes - 1) {
      low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_and_si512(low_bits, upper)));
      high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(high_bits, upper)));
    }
  }
}

// 16 elements from p on as fp32 lanes, 32 as one row of bf16 a plane. *finite collects 0 * x, which is 0 for all but
// Inf and NaN; one plane needs no such check: the tile unit propagates them itself.
template <class T>
inline __m512 load_checked(const T* p, __m512* finite) {
  const __m512 x = Vector::load(p);
  *finite = Vector::fma(x, Vector::zero(), *finite);
  return x;
}
template <class T>
inline void load_row_planes(const T* p, __m512i (&row)[Planes<T>::value], __m512* finite) {
  const __m512 a = load_checked(p, finite), b = load_checked(p + 16, finite);
  // Lanes: elements 2i and 2i + 1, which share a word.
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  split_pair<Planes<T>::value>(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b), row);
}
inline void load_row_planes(const BFloat16* p, __m512i (&row)[1], __m512*) { row[0] = _mm512_loadu_si512(p); }

inline bool is_zero(__m512 finite) { return !Vector::any_differs(finite, Vector::zero()); }

// Rows of whole 32-element steps.
template <class T>
struct WholeRows {
  const T* data;
  int64_t stride;
};

// src [rows, head_dim] times factor (+1, -1 or 0: exact) as [whole_rows, padded_dim], zero past the ends: where it is
// if it is whole there, else a copy in `buffer`.
template <class T>
inline WholeRows<T> make_whole(const T* src, int64_t stride, int32_t rows, int32_t whole_rows, int32_t head_dim,
                               int32_t padded_dim, float factor, T* buffer) {
  if (rows == whole_rows && head_dim == padded_dim && factor == 1.0f) return {src, stride};
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

// q [kGroupRows, padded_dim] -> q_tiles [planes][steps][2] tiles of [16 pairs of head_dim, 16 queries]. Returns whether
// all is finite.
template <class T>
inline bool pack_q_tiles(WholeRows<T> q, int32_t padded_dim, uint32_t* q_tiles) {
  constexpr int kPlanes = Planes<T>::value;
  const int32_t steps = padded_dim / kStep;
  __m512 finite = Vector::zero();
  for (int32_t step = 0; step < steps; ++step) {
    for (int32_t tile = 0; tile < 2; ++tile) {
      __m512i words[kPlanes][16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        __m512i row[kPlanes];
        load_row_planes(q.data + (tile * kTileRows + i) * q.stride + step * kStep, row, &finite);
#pragma GCC unroll 3
        for (int plane = 0; plane < kPlanes; ++plane) words[plane][i] = row[plane];
      }
#pragma GCC unroll 3
      for (int plane = 0; plane < kPlanes; ++plane) {
        Vector::transpose(words[plane]);
        uint32_t* dst = q_tiles + ((int64_t{plane} * steps + step) * 2 + tile) * kTileWords;
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + i * 16, words[plane][i]);
      }
    }
  }
  return is_zero(finite);
}

// k [32 keys, padded_dim] -> k_planes [planes] of [32 keys, padded_dim] bf16, plane_elements apart. Returns whether all
// is finite.
template <class T>
inline bool pack_k_step(WholeRows<T> k, int32_t padded_dim, int64_t plane_elements, uint16_t* k_planes) {
  constexpr int kPlanes = Planes<T>::value;
  __m512 finite = Vector::zero();
  for (int32_t row = 0; row < kStep; ++row) {
    for (int32_t dim = 0; dim < padded_dim; dim += kStep) {
      __m512i planes[kPlanes];
      load_row_planes(k.data + row * k.stride + dim, planes, &finite);
#pragma GCC unroll 3
      for (int plane = 0; plane < kPlanes; ++plane) {
        _mm512_store_si512(k_planes + plane * plane_elements + int64_t{row} * padded_dim + dim, planes[plane]);
      }
    }
  }
  return is_zero(finite);
}

template <class T>
inline bool whole_rows_are_finite(WholeRows<T> rows, int32_t count, int32_t padded_dim) {
  __m512 finite = Vector::zero();
  for (int32_t row = 0; row < count; ++row) {
    for (int32_t dim = 0; dim < padded_dim; dim += Vector::kWidth) {
      load_checked(rows.data + row * rows.stride + dim, &finite);
    }
  }
  return is_zero(finite);
}

// v [32 keys, padded_dim] -> v_tiles [planes][padded_dim / 16] tiles of [16 of head_dim, 32 keys], planes plane_words
// apart. Returns whether all is finite.
template <class T>
inline bool pack_v_step(WholeRows<T> v, int32_t padded_dim, int64_t plane_words, uint32_t* v_tiles) {
  constexpr int kPlanes = Planes<T>::value;
  __m512 finite = Vector::zero();
  for (int32_t tile = 0; tile < padded_dim / kTileRows; ++tile) {
    __m512i words[kPlanes][16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const T* pair = v.data + 2 * i * v.stride + tile * kTileRows;
      __m512i word[kPlanes];
      split_pair<kPlanes>(load_checked(pair, &finite), load_checked(pair + v.stride, &finite), word);
#pragma GCC unroll 3
      for (int plane = 0; plane < kPlanes; ++plane) words[plane][i] = word[plane];
    }
#pragma GCC unroll 3
    for (int plane = 0; plane < kPlanes; ++plane) {
      Vector::transpose(words[plane]);
      uint32_t* dst = v_tiles + plane * plane_words + int64_t{tile} * kTileWords;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + i * 16, words[plane][i]);
    }
  }
  return is_zero(finite);
}
// bf16 needs no arithmetic: interleave two rows of keys, 32 of head_dim at once.
inline bool pack_v_step(WholeRows<BFloat16> v, int32_t padded_dim, int64_t, uint32_t* v_tiles) {
  for (int32_t dim = 0; dim < padded_dim; dim += kStep) {
    __m512i low[16], high[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const BFloat16* pair = v.data + 2 * i * v.stride + dim;
      const __m512i a = _mm512_loadu_si512(pair), b = _mm512_loadu_si512(pair + v.stride);
      low[i] = _mm512_unpacklo_epi16(a, b);
      high[i] = _mm512_unpackhi_epi16(a, b);
    }
    Vector::transpose(low);
    Vector::transpose(high);
    uint32_t* dst = v_tiles + int64_t{dim / kTileRows} * kTileWords;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // word i of `low` held element 8 (i / 4) + i % 4 of head_dim, of `high` 4 more
      const int row = i / 4 * 8 + i % 4;
      _mm512_store_si512(dst + row * 16, low[i]);
      _mm512_store_si512(dst + (row + 4) * 16, high[i]);
    }
  }
  return true;
}

// Turns scores_t [keys, group] into weights, as p_tiles [planes][kBlockKeys / 32 steps][2] tiles of [16 pairs of keys,
// 16 queries], and updates the state; `work` is done beside it. keys is a multiple of 32.
template <class T>
inline void softmax_to_tiles(const float* scores_t, int32_t keys, float scale_log2, GroupState state,
                             uint32_t* p_tiles, TileWork<Planes<T>::value>& work) {
  constexpr int kPlanes = Planes<T>::value;
  constexpr int kDegree = ExpDegree<T>::value;
  constexpr int64_t kPlaneWords = int64_t{kBlockKeys / kStep} * 2 * kTileWords;
  constexpr int32_t kSlotPairs = 4;  // pairs of keys between two shares of `work`: some 150 micro-operations
  const int32_t slots = kGroupVectors * keys / (2 * kSlotPairs);
  const __m512 scale = Vector::broadcast(scale_log2);
  int32_t slot = 0;
  for (int c = 0; c < kGroupVectors; ++c) {
    const __m512 minus_shift = Vector::sub(Vector::zero(), update_max(scores_t, keys, scale_log2, state, c));
    __m512 sum0 = Vector::zero(), sum1 = Vector::zero();
    const float* s = scores_t + c * Vector::kWidth;
    for (int32_t pair = 0; pair < keys / 2; pair += kSlotPairs) {
      work.advance(slot++, slots);
      uint32_t* words_of_pair =
          p_tiles + (int64_t{pair / kTileRows} * 2 + c) * kTileWords + pair % kTileRows * Vector::kWidth;
#pragma GCC unroll 4
      for (int32_t i = 0; i < kSlotPairs; ++i) {
        const __m512 p0 = exp2<kDegree>(Vector::fma(Vector::load(s), scale, minus_shift));
        const __m512 p1 = exp2<kDegree>(Vector::fma(Vector::load(s + kGroupRows), scale, minus_shift));
        s += 2 * kGroupRows;
        sum0 = Vector::add(sum0, p0);
        sum1 = Vector::add(sum1, p1);
        __m512i words[kPlanes];
        split_pair<kPlanes>(p0, p1, words);
#pragma GCC unroll 3
        for (int plane = 0; plane < kPlanes; ++plane) {
          _mm512_store_si512(words_of_pair + plane * kPlaneWords + i * Vector::kWidth, words[plane]);
        }
      }
    }
    update_sum(state, c, Vector::add(sum0, sum1));
  }
}

struct AmxScratch {
  uint32_t* q_tiles;   // [groups][planes][steps][2] tiles
  float* out_t;        // [groups, padded_dim, group]
  float* max_log2;     // [groups, group]
  float* sum;          // [groups, group]
  float* alpha;        // [2, group]
  bool* q_is_finite;   // [groups]
  float* scores_t;     // [2][kBlockKeys, group]
  uint32_t* p_tiles;   // [2][planes][kBlockKeys / 32][2] tiles
  float* product_t;    // [padded_dim, group]
  float* rows;         // [32, padded_dim]
  void* whole;         // [kBlockKeys, padded_dim] of the element type, for rows that are not whole steps
  uint16_t* k_planes;  // [planes][kBlockKeys, padded_dim] bf16
  uint32_t* v_tiles;   // [planes][kBlockKeys / 32][padded_dim / 16] tiles
  float* fp32_rows;    // [kBlockKeys, padded_dim], for blocks with Inf or NaN
  float* q_t;          // [padded_dim, group], the same
  size_t bytes;

  AmxScratch(void* base, int planes, int32_t groups, int32_t padded_dim) {
    Arena arena(base);
    q_tiles = arena.take<uint32_t>(int64_t{groups} * group_words(planes, padded_dim));
    out_t = arena.take<float>(int64_t{groups} * padded_dim * kGroupRows);
    max_log2 = arena.take<float>(int64_t{groups} * kGroupRows);
    sum = arena.take<float>(int64_t{groups} * kGroupRows);
    alpha = arena.take<float>(2 * kGroupRows);
    q_is_finite = arena.take<bool>(groups);
    scores_t = arena.take<float>(2 * kScoresFloats);
    p_tiles = arena.take<uint32_t>(2 * weights_words(planes));
    product_t = arena.take<float>(int64_t{padded_dim} * kGroupRows);
    rows = arena.take<float>(int64_t{kGroupRows} * padded_dim);
    whole = arena.take<float>(int64_t{kBlockKeys} * padded_dim);
    k_planes = arena.take<uint16_t>(int64_t{planes} * kBlockKeys * padded_dim);
    v_tiles = arena.take<uint32_t>(int64_t{planes} * kBlockKeys * padded_dim / 2);
    fp32_rows = arena.take<float>(int64_t{kBlockKeys} * padded_dim);
    q_t = arena.take<float>(int64_t{padded_dim} * kGroupRows);
    bytes = arena.used();
  }

  static constexpr int64_t kScoresFloats = int64_t{kBlockKeys} * kGroupRows;
  static int64_t weights_words(int planes) { return int64_t{planes} * (kBlockKeys / kStep) * 2 * kTileWords; }
  static int64_t group_words(int planes, int32_t padded_dim) {
    return int64_t{planes} * (padded_dim / kStep) * 2 * kTileWords;
  }
  GroupState state(int32_t group, int buffer) const {
    return {max_log2 + int64_t{group} * kGroupRows, sum + int64_t{group} * kGroupRows, alpha + buffer * kGroupRows};
  }
};

template <class T>
class AmxForward {
 public:
  AmxForward(const Task& task, void* memory)
      : task_(task),
        params_(*task.params),
        operands_(task),
        head_dim_(params_.head_dim),
        padded_dim_(round_up(head_dim_, kStep)),
        groups_(group_count(task.row_end - task.row_begin)),
        scale_(make_scale(params_.scale)),
        scratch_(memory, kPlanes, groups_, padded_dim_) {}

  void run() {
    for (int32_t group = 0; group < groups_; ++group) {
      begin_group(group);
      q_is_finite_ &= scratch_.q_is_finite[group];
    }
    // Whole steps, so that what a step holds does not depend on the task's height.
    const int64_t visible_steps = (int64_t{visible_end(task_)} + kStep - 1) / kStep;
    const int32_t key_end = clamp(visible_steps * kStep, 0, params_.seq_k);
    for (int32_t key = 0; key < key_end; key += kBlockKeys) {
      const Block block = load_block(key, clamp(int64_t{key_end} - key, 0, kBlockKeys));
      if (q_is_finite_ && (block.k_bad | block.v_bad) == 0) {
        attend_overlapped(block);
      } else {
        attend_in_turn(block);
      }
    }
    for (int32_t group = 0; group < groups_; ++group) end_group(group);
  }

 private:
  static constexpr int kPlanes = Planes<T>::value;

  struct Block {
    int32_t begin;
    int32_t keys;
    LeftOperand k;  // tiles: keys 0..15 and 16..31; 32 keys further: 2 * k.tile bytes
    // Bit i: keys 32 i to 32 i + 31 hold Inf or NaN. By step, and not by block: the rows that a block is loaded for
    // depend on the task's height, those of a step do not, and how a group is computed must not depend on it.
    uint32_t k_bad;
    uint32_t v_bad;
  };

  // A group that sees keys of the block, with the buffers that it uses.
  struct Turn {
    int32_t group;    // groups_ when there is none
    int64_t diagonal;
    VisibleKeys visible;
    int32_t keys;     // visible.end rounded up to whole steps
    int buffer;       // of scores_t, p_tiles, alpha
  };

  int32_t group_row(int32_t group) const { return task_.row_begin + group * kGroupRows; }
  int32_t group_height(int32_t group) const { return clamp(task_.row_end - group_row(group), 0, kGroupRows); }
  const T* q_rows(int32_t group) const { return operands_.q + group_row(group) * params_.q_stride.row; }
  uint32_t* q_tiles(int32_t group) const {
    return scratch_.q_tiles + group * AmxScratch::group_words(kPlanes, padded_dim_);
  }
  T* whole() const { return static_cast<T*>(scratch_.whole); }
  float* out_t(int32_t group) const { return scratch_.out_t + int64_t{group} * padded_dim_ * kGroupRows; }

  void begin_group(int32_t group) {
    const WholeRows<T> q = make_whole(q_rows(group), params_.q_stride.row, group_height(group), kGroupRows, head_dim_,
                                      padded_dim_, scale_.q_factor, whole());
    scratch_.q_is_finite[group] = pack_q_tiles(q, padded_dim_, q_tiles(group));
    clear_state(scratch_.state(group, 0));
    memset(out_t(group), 0, static_cast<size_t>(padded_dim_) * kGroupRows * sizeof(float));
  }

  void end_group(int32_t group) {
    const int32_t row = group_row(group);
    store_group(out_t(group), scratch_.state(group, 0), group_height(group), head_dim_, padded_dim_, scratch_.rows,
                operands_.out + row * params_.out_stride.row, params_.out_stride.row, operands_.lse + row);
  }

  // K as a left operand: bf16 where it is if it is whole there, other types in planes.
  LeftOperand load_k(const T* k, int32_t keys, uint32_t* bad) {
    const int64_t row_stride = params_.k_stride.row;
    const int32_t whole_keys = round_up(keys, kStep);
    *bad = 0;
    if (kPlanes == 1) {
      const WholeRows<T> rows = make_whole(k, row_stride, keys, whole_keys, head_dim_, padded_dim_, 1.0f, whole());
      const int64_t row_bytes = rows.stride * static_cast<int64_t>(sizeof(T));
      return {reinterpret_cast<const char*>(rows.data), 0, kTileRows * row_bytes, kTileBytesPerRow, row_bytes};
    }
    for (int32_t key = 0; key < keys; key += kStep) {
      const int32_t step_keys = clamp(int64_t{keys} - key, 0, kStep);
      const WholeRows<T> rows = make_whole(k + key * row_stride, row_stride, step_keys, kStep, head_dim_, padded_dim_,
                                           1.0f, whole());
      const bool is_finite = pack_k_step(rows, padded_dim_, int64_t{kBlockKeys} * padded_dim_,
                                         scratch_.k_planes + int64_t{key} * padded_dim_);
      *bad |= static_cast<uint32_t>(!is_finite) << (key / kStep);
    }
    const int64_t row_bytes = padded_dim_ * static_cast<int64_t>(sizeof(uint16_t));
    return {reinterpret_cast<const char*>(scratch_.k_planes), kBlockKeys * row_bytes, kTileRows * row_bytes,
            kTileBytesPerRow, row_bytes};
  }

  // V as tiles [planes][kBlockKeys / 32 steps][padded_dim / 16] of [16 of head_dim, 32 keys], zero past the ends.
  // must_check: whether Inf and NaN are to be found even if the tile unit would propagate them.
  uint32_t load_v(const T* v, int32_t keys, bool must_check) {
    const int64_t row_stride = params_.v_stride.row;
    const int64_t step_words = int64_t{padded_dim_ / kTileRows} * kTileWords;
    uint32_t bad = 0;
    for (int32_t key = 0; key < keys; key += kStep) {
      const int32_t step_keys = clamp(int64_t{keys} - key, 0, kStep);
      const WholeRows<T> rows = make_whole(v + key * row_stride, row_stride, step_keys, kStep, head_dim_, padded_dim_,
                                           1.0f, whole());
      bool is_finite = pack_v_step(rows, padded_dim_, kBlockKeys / kStep * step_words,
                                   scratch_.v_tiles + key / kStep * step_words);
      if (kPlanes == 1 && must_check) is_finite = whole_rows_are_finite(rows, kStep, padded_dim_);
      bad |= static_cast<uint32_t>(!is_finite) << (key / kStep);
    }
    return bad;
  }

  Block load_block(int32_t begin, int32_t keys) {
    Block block;
    block.begin = begin;
    block.keys = keys;
    // V first: padded bf16 rows of K stay in whole().
    const int64_t first_diagonal = int64_t{task_.row_begin} + params_.seq_k - params_.seq_q;
    const VisibleKeys seen_by_first_group = visible_keys(task_.causal, first_diagonal, begin, keys);
    block.v_bad = load_v(operands_.v + begin * params_.v_stride.row, keys, seen_by_first_group.full < keys);
    block.k = load_k(operands_.k + begin * params_.k_stride.row, keys, &block.k_bad);
    return block;
  }

  bool scores_need_vectors(const Turn& turn, const Block& block) const {
    return !scratch_.q_is_finite[turn.group] || (block.k_bad & steps_of(turn)) != 0;
  }
  bool output_needs_vectors(const Turn& turn, const Block& block) const {
    return (block.v_bad & steps_of(turn)) != 0 && (kPlanes > 1 || turn.visible.full < turn.visible.end);
  }
  static uint32_t steps_of(const Turn& turn) { return (1u << (turn.keys / kStep)) - 1; }

  // The first group from `group` on that sees a key of the block.
  Turn next_turn(int32_t group, const Block& block, int buffer) const {
    for (; group < groups_; ++group) {
      const int64_t diagonal = int64_t{group_row(group)} + params_.seq_k - params_.seq_q;
      const VisibleKeys visible = visible_keys(task_.causal, diagonal, block.begin, block.keys);
      if (visible.end > 0) return {group, diagonal, visible, round_up(visible.end, kStep), buffer};
    }
    return {groups_, 0, {0, 0}, 0, buffer};
  }

  // While a group's softmax runs, so do the output of the group before and the scores of the group after.
  void attend_overlapped(const Block& block) {
    Turn previous = {groups_, 0, {0, 0}, 0, 1};
    Turn current = next_turn(0, block, 0);
    scores_product(current, block).finish();
    while (current.group < groups_) {
      const Turn next = next_turn(current.group + 1, block, previous.buffer);
      hide_scores(current, block);
      TileWork<kPlanes> work(output_product(previous), scores_product(next, block));
      softmax_to_tiles<T>(scores_t(current), current.keys, scale_.log2, state(current), p_tiles(current), work);
      work.finish();
      accumulate(previous);
      previous = current;
      current = next;
    }
    output_product(previous).finish();
    accumulate(previous);
  }

  // One group after the other, Inf and NaN going by way of vectors. Rounds as attend_overlapped does.
  void attend_in_turn(const Block& block) {
    for (Turn turn = next_turn(0, block, 0); turn.group < groups_; turn = next_turn(turn.group + 1, block, 0)) {
      if (scores_need_vectors(turn, block)) {
        vector_scores(turn, block);
      } else {
        scores_product(turn, block).finish();
      }
      hide_scores(turn, block);
      if (output_needs_vectors(turn, block)) {
        vector_output(turn, block);
        continue;
      }
      TileWork<kPlanes> no_work;
      softmax_to_tiles<T>(scores_t(turn), turn.keys, scale_.log2, state(turn), p_tiles(turn), no_work);
      output_product(turn).finish();
      accumulate(turn);
    }
  }

  float* scores_t(const Turn& turn) const { return scratch_.scores_t + turn.buffer * AmxScratch::kScoresFloats; }
  uint32_t* p_tiles(const Turn& turn) const {
    return scratch_.p_tiles + turn.buffer * AmxScratch::weights_words(kPlanes);
  }
  GroupState state(const Turn& turn) const { return scratch_.state(turn.group, turn.buffer); }

  TileProduct<kPlanes, Product::kScores> scores_product(const Turn& turn, const Block& block) const {
    if (turn.group == groups_) return {};
    const int32_t steps = padded_dim_ / kStep;
    return {block.k, q_tiles(turn.group), steps, steps, turn.keys / kStep, scores_t(turn)};
  }

  TileProduct<kPlanes, Product::kOutput> output_product(const Turn& turn) const {
    if (turn.group == groups_) return {};
    const int32_t dim_tiles = padded_dim_ / kTileRows;
    constexpr int64_t kTileBytes = kTileWords * sizeof(uint32_t);
    const LeftOperand v = {reinterpret_cast<const char*>(scratch_.v_tiles),
                           (kBlockKeys / kStep) * dim_tiles * kTileBytes, kTileBytes, dim_tiles * kTileBytes,
                           kTileBytesPerRow};
    return {v, p_tiles(turn), kBlockKeys / kStep, turn.keys / kStep, dim_tiles / 2, scratch_.product_t};
  }

  // out_t = out_t * alpha + product_t. A block's product starts from zero, which rounds less than a running sum.
  void accumulate(const Turn& turn) const {
    if (turn.group == groups_) return;
    const float* alpha = state(turn).alpha;
    const __m512 alphas[kGroupVectors] = {Vector::load(alpha), Vector::load(alpha + Vector::kWidth)};
    float* out = out_t(turn.group);
    const float* product = scratch_.product_t;
    for (int32_t dim = 0; dim < padded_dim_; ++dim) {
      for (int c = 0; c < kGroupVectors; ++c) {
        Vector::store(out, Vector::fma(Vector::load(out), alphas[c], Vector::load(product)));
        out += Vector::kWidth;
        product += Vector::kWidth;
      }
    }
  }

  // -inf for what the mask hides and for the rows that fill up the last step.
  void hide_scores(const Turn& turn, const Block& block) const {
    mask_scores(scores_t(turn), turn.visible, turn.diagonal, block.begin);
    for (int32_t i = turn.visible.end * kGroupVectors; i < turn.keys * kGroupVectors; ++i) {
      Vector::store(scores_t(turn) + int64_t{i} * Vector::kWidth, Vector::broadcast(kMinusInfinity));
    }
  }

  // The same by vectors, for blocks that hold Inf or NaN.
  void vector_scores(const Turn& turn, const Block& block) {
    pack_group(q_rows(turn.group), params_.q_stride.row, group_height(turn.group), head_dim_, padded_dim_,
               scale_.q_factor, scratch_.fp32_rows, scratch_.q_t);
    convert_rows(operands_.k + block.begin * params_.k_stride.row, params_.k_stride.row, turn.visible.end, head_dim_,
                 padded_dim_, scratch_.fp32_rows);
    compute_scores(scratch_.q_t, scratch_.fp32_rows, padded_dim_, turn.visible.end, head_dim_, scores_t(turn));
  }

  void vector_output(const Turn& turn, const Block& block) {
    convert_rows(operands_.v + block.begin * params_.v_stride.row, params_.v_stride.row, turn.visible.end, head_dim_,
                 padded_dim_, scratch_.fp32_rows);
    softmax_in_place<ExpDegree<T>::value>(scores_t(turn), turn.visible.end, scale_.log2, state(turn));
    accumulate_visible_output(scores_t(turn), scratch_.fp32_rows, padded_dim_, turn.visible, turn.diagonal, block.begin,
                              head_dim_, state(turn).alpha, out_t(turn.group));
  }

  const Task& task_;
  const attention::ForwardParams& params_;
  const Operands<T> operands_;
  const int32_t head_dim_;
  const int32_t padded_dim_;  // a multiple of 32
  const int32_t groups_;
  const Scale scale_;
  const AmxScratch scratch_;
  bool q_is_finite_ = true;
};

// Whether the tile unit beats the vectors. For fp32, at six products, it does by 1.1 to 1.5 where the rows are enough
// to pay for packing K and V in planes, and little of head_dim is padding (measured at 16 and 200 rows, head_dim 40:
// 0.8).
inline bool tiles_win(const Task& task) {
  constexpr int32_t kFewestRows = 64;
  const int32_t head_dim = task.params->head_dim;
  return task.type != ScalarType::kFloat32 ||
         (task.params->seq_q >= kFewestRows && 8 * head_dim >= 7 * round_up(head_dim, kStep));
}

void run_amx(const Task& task, void* memory) {
  if (task.params->seq_q <= kFewRows || !tiles_win(task)) return run_simd(task, memory);
  configure_tiles();
  switch (task.type) {
    case ScalarType::kFloat32:
      AmxForward<float>(task, memory).run();
      break;
    case ScalarType::kFloat16:
      AmxForward<Half>(task, memory).run();
      break;
    case ScalarType::kBFloat16:
      AmxForward<BFloat16>(task, memory).run();
      break;
  }
  _tile_release();
}

size_t amx_scratch_bytes(ScalarType type, int32_t head_dim, int32_t rows) {
  const int planes = type == ScalarType::kFloat32   ? Planes<float>::value
                     : type == ScalarType::kFloat16 ? Planes<Half>::value
                                                    : Planes<BFloat16>::value;
  const size_t bytes = AmxScratch(nullptr, planes, group_count(rows), round_up(head_dim, kStep)).bytes;
  const size_t simd_bytes = simd_scratch_bytes(type, head_dim, rows);
  return bytes > simd_bytes ? bytes : simd_bytes;
}

}  // namespace

extern const Kernel kAmxKernel = {"amx", kGroupRows, amx_scratch_bytes, run_amx};

}  // namespace cpu
}  // namespace flashmoe
