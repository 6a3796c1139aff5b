// The AMX kernel: both products on the bf16 tile unit, the softmax with AVX-512. As in forward_simd.h everything is
// transposed (S^T = K Q^T, O^T += V^T P^T), so that K is a tile operand as it lies in memory and P^T as the softmax
// leaves it; Q^T is packed once a task, V^T once a block of keys.
//
// Types of more digits than bf16 are cut into planes of 8 significant bits, x = x0 + x1 + x2, and the products of
// planes that matter are added: fp16 in two planes (exact) and three or four products, fp32 in three planes (exact) and six
// products, smallest first; what is left out is 2^-16 and 2^-24 of the whole. Six bf16 products are still twice as fast
// as one fp32 multiplication in vectors. Inf - Inf would arise between planes, so a block with Inf or NaN in it goes
// through the vector code of forward_simd.h.
//
// The target is set here, not by compiler flags, so that all files of this folder are compiled alike; it must come
// before the intrinsics' header. Nothing but this kernel's table entry may leave the translation unit.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")

#include "vector_avx512.h"

#include "forward_simd.h"

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
// kScores of fp16 are exact products: what (1, 1) adds is up to 2^-16 of a score, which is seen in the lse of large ones.
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

// All eight tiles 16 x 64 bytes, for the lifetime of this object; whoever uses tiles next configures its own.
class TileSession {
 public:
  TileSession() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.bytes_per_row[tile] = kTileBytesPerRow;
      config.rows[tile] = kTileRows;
    }
    order_memory();
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

// A left operand: two tiles of 16 rows for each step. Tile t of step s of plane p starts at
// data + p * plane + t * tile + s * step (bytes), its rows row_bytes apart.
struct LeftOperand {
  const char* data;
  int64_t plane;
  int64_t tile;
  int64_t step;
  int64_t row_bytes;
};

// c [32, group] = sum over product pairs and steps of a [32, 32 steps] b [32 steps, group].
// b: [planes][b_plane_steps][2] tiles, of which `steps` steps are used.
template <int kPlanes, Product kProduct>
inline void multiply_tiles(const LeftOperand& a, const uint32_t* b, int32_t b_plane_steps, int32_t steps, float* c) {
  using Pairs = PlanePairs<kPlanes, kProduct>;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
#pragma GCC unroll 6
  for (int product = 0; product < Pairs::kCount; ++product) {
    const char* a_step = a.data + Pairs::kPairs[product].a * a.plane;
    const uint32_t* b_step = b + int64_t{Pairs::kPairs[product].b} * b_plane_steps * 2 * kTileWords;
    for (int32_t step = 0; step < steps; ++step) {
      _tile_loadd(6, b_step, kTileBytesPerRow);
      _tile_loadd(4, a_step, a.row_bytes);
      _tile_loadd(7, b_step + kTileWords, kTileBytesPerRow);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, a_step + a.tile, a.row_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      a_step += a.step;
      b_step += 2 * kTileWords;
    }
  }
  constexpr int64_t kRowBytes = kGroupRows * sizeof(float);
  _tile_stored(0, c, kRowBytes);
  _tile_stored(1, c + kTileRows, kRowBytes);
  _tile_stored(2, c + kTileRows * kGroupRows, kRowBytes);
  _tile_stored(3, c + kTileRows * kGroupRows + kTileRows, kRowBytes);
}

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

// fp32 x [32] to one row of 32 bf16 a plane.
template <int kPlanes>
inline void split_row(const float* x, __m512i (&rows)[kPlanes]) {
  // Lanes of `even` and `odd`: elements 2i and 2i + 1, which share a word.
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  const __m512i even_index =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd_index = _mm512_add_epi32(even_index, _mm512_set1_epi32(1));
  split_pair<kPlanes>(_mm512_permutex2var_ps(a, even_index, b), _mm512_permutex2var_ps(a, odd_index, b), rows);
}

// Whether no element is Inf or NaN: 0 * x is not 0 for them. count is a multiple of the vector width.
template <class T>
inline bool rows_are_finite(const float* rows, int32_t count) {
  if (Planes<T>::value == 1) return true;  // one plane: the tile unit propagates Inf and NaN itself
  __m512 sum = Vector::zero();
  for (int32_t i = 0; i < count; i += Vector::kWidth) sum = Vector::fma(Vector::load(rows + i), Vector::zero(), sum);
  return !Vector::any_differs(sum, Vector::zero());
}

// rows [kGroupRows, padded_dim] fp32 -> q_tiles [planes][steps][2] tiles of [16 pairs of head_dim, 16 queries].
template <int kPlanes>
inline void pack_q_tiles(const float* rows, int32_t padded_dim, uint32_t* q_tiles) {
  const int32_t steps = padded_dim / kStep;
  for (int32_t step = 0; step < steps; ++step) {
    for (int32_t tile = 0; tile < 2; ++tile) {
      __m512i words[kPlanes][16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        __m512i row[kPlanes];
        split_row<kPlanes>(rows + int64_t{tile * kTileRows + i} * padded_dim + step * kStep, row);
#pragma GCC unroll 3
        for (int plane = 0; plane < kPlanes; ++plane) words[plane][i] = row[plane];
      }
      for (int plane = 0; plane < kPlanes; ++plane) {
        Vector::transpose(words[plane]);
        uint32_t* dst = q_tiles + ((int64_t{plane} * steps + step) * 2 + tile) * kTileWords;
        for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + i * 16, words[plane][i]);
      }
    }
  }
}

// One row of K as fp32 -> row `row` of k_planes [planes][kBlockKeys, padded_dim] bf16.
template <int kPlanes>
inline void store_k_row(const float* x, int32_t padded_dim, int32_t row, uint16_t* k_planes) {
  for (int32_t dim = 0; dim < padded_dim; dim += kStep) {
    __m512i planes[kPlanes];
    split_row<kPlanes>(x + dim, planes);
#pragma GCC unroll 3
    for (int plane = 0; plane < kPlanes; ++plane) {
      _mm512_store_si512(k_planes + (int64_t{plane} * kBlockKeys + row) * padded_dim + dim, planes[plane]);
    }
  }
}

// v [keys, head_dim] -> v_tiles [planes][kBlockKeys / 32 steps][padded_dim / 16] tiles of [16 of head_dim, 32 keys], zero
// past the ends. rows: [2, padded_dim]. Returns whether all is finite.
template <class T>
inline bool pack_v_tiles(const T* v, int64_t row_stride, int32_t keys, int32_t head_dim, int32_t padded_dim,
                         float* rows, uint32_t* v_tiles) {
  constexpr int kPlanes = Planes<T>::value;
  const int32_t dim_tiles = padded_dim / kTileRows;
  bool is_finite = true;
  for (int32_t key = 0; key < keys; key += kStep) {
    const int32_t step_keys = clamp(int64_t{keys} - key, 0, kStep);
    for (int32_t row = 0; row < kStep; ++row) {
      float* dst = rows + int64_t{row} * padded_dim;
      if (row < step_keys) {
        load_row(v + (key + row) * row_stride, head_dim, dst, Vector::broadcast(1.0f));
      } else {
        memset(dst, 0, static_cast<size_t>(padded_dim) * sizeof(float));
      }
    }
    is_finite &= rows_are_finite<T>(rows, kStep * padded_dim);
    for (int32_t tile = 0; tile < dim_tiles; ++tile) {
      __m512i words[kPlanes][16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const float* pair = rows + int64_t{2 * i} * padded_dim + tile * kTileRows;
        __m512i word[kPlanes];
        split_pair<kPlanes>(_mm512_loadu_ps(pair), _mm512_loadu_ps(pair + padded_dim), word);
#pragma GCC unroll 3
        for (int plane = 0; plane < kPlanes; ++plane) words[plane][i] = word[plane];
      }
      for (int plane = 0; plane < kPlanes; ++plane) {
        Vector::transpose(words[plane]);
        uint32_t* dst =
            v_tiles + ((int64_t{plane} * (kBlockKeys / kStep) + key / kStep) * dim_tiles + tile) * kTileWords;
        for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + i * 16, words[plane][i]);
      }
    }
  }
  return is_finite;
}

// Turns scores_t [keys, group] into weights, as p_tiles [planes][kBlockKeys / 32 steps][2] tiles of [16 pairs of keys,
// 16 queries], and updates the state. keys is a multiple of 32.
template <class T>
inline void softmax_to_tiles(const float* scores_t, int32_t keys, float scale_log2, GroupState state,
                             uint32_t* p_tiles) {
  constexpr int kPlanes = Planes<T>::value;
  constexpr int kDegree = ExpDegree<T>::value;
  constexpr int64_t kPlaneWords = int64_t{kBlockKeys / kStep} * 2 * kTileWords;
  const __m512 scale = Vector::broadcast(scale_log2);
  for (int c = 0; c < kGroupVectors; ++c) {
    const __m512 minus_shift = Vector::sub(Vector::zero(), update_max(scores_t, keys, scale_log2, state, c));
    __m512 sum0 = Vector::zero(), sum1 = Vector::zero();
    const float* s = scores_t + c * Vector::kWidth;
    for (int32_t key = 0; key < keys; key += kStep) {
      uint32_t* tile = p_tiles + (int64_t{key / kStep} * 2 + c) * kTileWords;
#pragma GCC unroll 4
      for (int32_t pair = 0; pair < kTileRows; ++pair) {
        const __m512 p0 = exp2<kDegree>(Vector::fma(Vector::load(s), scale, minus_shift));
        const __m512 p1 = exp2<kDegree>(Vector::fma(Vector::load(s + kGroupRows), scale, minus_shift));
        s += 2 * kGroupRows;
        sum0 = Vector::add(sum0, p0);
        sum1 = Vector::add(sum1, p1);
        __m512i words[kPlanes];
        split_pair<kPlanes>(p0, p1, words);
#pragma GCC unroll 3
        for (int plane = 0; plane < kPlanes; ++plane) {
          _mm512_store_si512(tile + plane * kPlaneWords + pair * 16, words[plane]);
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
  float* alpha;        // [group]
  bool* q_is_finite;   // [groups]
  float* scores_t;     // [kBlockKeys, group]
  uint32_t* p_tiles;   // [planes][kBlockKeys / 32][2] tiles
  float* product_t;    // [32, group]
  float* rows;         // [32, padded_dim]
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
    alpha = arena.take<float>(kGroupRows);
    q_is_finite = arena.take<bool>(groups);
    scores_t = arena.take<float>(int64_t{kBlockKeys} * kGroupRows);
    p_tiles = arena.take<uint32_t>(int64_t{planes} * (kBlockKeys / kStep) * 2 * kTileWords);
    product_t = arena.take<float>(int64_t{2} * kTileRows * kGroupRows);
    rows = arena.take<float>(int64_t{kGroupRows} * padded_dim);
    k_planes = arena.take<uint16_t>(int64_t{planes} * kBlockKeys * padded_dim);
    v_tiles = arena.take<uint32_t>(int64_t{planes} * kBlockKeys * padded_dim / 2);
    fp32_rows = arena.take<float>(int64_t{kBlockKeys} * padded_dim);
    q_t = arena.take<float>(int64_t{padded_dim} * kGroupRows);
    bytes = arena.used();
  }

  static int64_t group_words(int planes, int32_t padded_dim) {
    return int64_t{planes} * (padded_dim / kStep) * 2 * kTileWords;
  }
  GroupState state(int32_t group) const {
    return {max_log2 + int64_t{group} * kGroupRows, sum + int64_t{group} * kGroupRows, alpha};
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
    for (int32_t group = 0; group < groups_; ++group) begin_group(group);
    const int32_t key_end = visible_end(task_);
    for (int32_t key = 0; key < key_end; key += kBlockKeys) {
      const Block block = load_block(key, clamp(int64_t{key_end} - key, 0, kBlockKeys));
      for (int32_t group = 0; group < groups_; ++group) attend(group, block);
    }
    for (int32_t group = 0; group < groups_; ++group) end_group(group);
  }

 private:
  static constexpr int kPlanes = Planes<T>::value;

  struct Block {
    int32_t begin;
    int32_t keys;
    LeftOperand k;  // tiles: keys 0..15 and 16..31; 32 keys further: 2 * k.tile bytes
    bool k_is_finite;
    bool v_is_finite;
  };

  int32_t group_row(int32_t group) const { return task_.row_begin + group * kGroupRows; }
  int32_t group_height(int32_t group) const { return clamp(task_.row_end - group_row(group), 0, kGroupRows); }
  const T* q_rows(int32_t group) const { return operands_.q + group_row(group) * params_.q_stride.row; }
  uint32_t* q_tiles(int32_t group) const {
    return scratch_.q_tiles + group * AmxScratch::group_words(kPlanes, padded_dim_);
  }
  float* out_t(int32_t group) const { return scratch_.out_t + int64_t{group} * padded_dim_ * kGroupRows; }

  void begin_group(int32_t group) {
    const int32_t height = group_height(group);
    memset(scratch_.rows, 0, static_cast<size_t>(kGroupRows) * static_cast<size_t>(padded_dim_) * sizeof(float));
    for (int32_t row = 0; row < height; ++row) {
      load_row(q_rows(group) + row * params_.q_stride.row, head_dim_, scratch_.rows + int64_t{row} * padded_dim_,
               Vector::broadcast(scale_.q_factor));
    }
    scratch_.q_is_finite[group] = rows_are_finite<T>(scratch_.rows, kGroupRows * padded_dim_);
    pack_q_tiles<kPlanes>(scratch_.rows, padded_dim_, q_tiles(group));
    clear_state(scratch_.state(group));
    memset(out_t(group), 0, static_cast<size_t>(padded_dim_) * kGroupRows * sizeof(float));
  }

  void end_group(int32_t group) {
    const int32_t row = group_row(group);
    store_group(out_t(group), scratch_.state(group), group_height(group), head_dim_, padded_dim_, scratch_.rows,
                operands_.out + row * params_.out_stride.row, params_.out_stride.row, operands_.lse + row);
  }

  // K as a left operand: where it is if it is whole bf16 tiles there, else a padded copy in planes.
  LeftOperand load_k(const T* k, int32_t keys, bool* is_finite) {
    const int64_t row_stride = params_.k_stride.row;
    if (kPlanes == 1 && head_dim_ == padded_dim_ && keys % kStep == 0) {
      *is_finite = true;
      const int64_t row_bytes = row_stride * static_cast<int64_t>(sizeof(T));
      return {reinterpret_cast<const char*>(k), 0, kTileRows * row_bytes, kTileBytesPerRow, row_bytes};
    }
    float* row_fp32 = scratch_.rows;
    memset(row_fp32, 0, static_cast<size_t>(padded_dim_) * sizeof(float));
    *is_finite = true;
    for (int32_t row = 0; row < keys; ++row) {
      load_row(k + row * row_stride, head_dim_, row_fp32, Vector::broadcast(1.0f));
      *is_finite &= rows_are_finite<T>(row_fp32, padded_dim_);
      store_k_row<kPlanes>(row_fp32, padded_dim_, row, scratch_.k_planes);
    }
    for (int plane = 0; plane < kPlanes; ++plane) {
      memset(scratch_.k_planes + (int64_t{plane} * kBlockKeys + keys) * padded_dim_, 0,
             static_cast<size_t>(round_up(keys, kStep) - keys) * static_cast<size_t>(padded_dim_) * sizeof(uint16_t));
    }
    const int64_t row_bytes = padded_dim_ * static_cast<int64_t>(sizeof(uint16_t));
    return {reinterpret_cast<const char*>(scratch_.k_planes), kBlockKeys * row_bytes, kTileRows * row_bytes,
            kTileBytesPerRow, row_bytes};
  }

  Block load_block(int32_t begin, int32_t keys) {
    Block block;
    block.begin = begin;
    block.keys = keys;
    block.k = load_k(operands_.k + begin * params_.k_stride.row, keys, &block.k_is_finite);
    memset(scratch_.rows, 0, static_cast<size_t>(kGroupRows) * static_cast<size_t>(padded_dim_) * sizeof(float));
    block.v_is_finite = pack_v_tiles(operands_.v + begin * params_.v_stride.row, params_.v_stride.row, keys, head_dim_,
                                     padded_dim_, scratch_.rows, scratch_.v_tiles);
    return block;
  }

  void attend(int32_t group, const Block& block) {
    const int64_t diagonal = int64_t{group_row(group)} + params_.seq_k - params_.seq_q;
    const VisibleKeys visible = visible_keys(task_.causal, diagonal, block.begin, block.keys);
    if (visible.end == 0) return;
    const GroupState state = scratch_.state(group);
    const int32_t keys = round_up(visible.end, kStep);
    if (block.k_is_finite && scratch_.q_is_finite[group]) {
      tile_scores(group, block, keys);
    } else {
      vector_scores(group, block, visible.end);
    }
    mask_scores(scratch_.scores_t, visible, diagonal, block.begin);
    if (!block.v_is_finite) {
      vector_output(group, block, visible.end, state);
      return;
    }
    for (int32_t key = visible.end; key < keys; ++key) {
      for (int c = 0; c < kGroupVectors; ++c) {
        Vector::store(scratch_.scores_t + int64_t{key} * kGroupRows + c * Vector::kWidth,
                      Vector::broadcast(kMinusInfinity));
      }
    }
    softmax_to_tiles<T>(scratch_.scores_t, keys, scale_.log2, state, scratch_.p_tiles);
    tile_output(group, keys, state);
  }

  void tile_scores(int32_t group, const Block& block, int32_t keys) {
    order_memory();
    LeftOperand k = block.k;
    for (int32_t key = 0; key < keys; key += kStep) {
      multiply_tiles<kPlanes, Product::kScores>(k, q_tiles(group), padded_dim_ / kStep, padded_dim_ / kStep,
                              scratch_.scores_t + int64_t{key} * kGroupRows);
      k.data += 2 * k.tile;
    }
    order_memory();
  }

  void tile_output(int32_t group, int32_t keys, GroupState state) {
    const int32_t dim_tiles = padded_dim_ / kTileRows;
    constexpr int64_t kTileBytes = kTileWords * sizeof(uint32_t);
    LeftOperand v = {reinterpret_cast<const char*>(scratch_.v_tiles), (kBlockKeys / kStep) * dim_tiles * kTileBytes,
                     kTileBytes, dim_tiles * kTileBytes, kTileBytesPerRow};
    const __m512 alpha[2] = {Vector::load(state.alpha), Vector::load(state.alpha + Vector::kWidth)};
    for (int32_t dim = 0; dim < padded_dim_; dim += 2 * kTileRows) {
      order_memory();
      multiply_tiles<kPlanes, Product::kOutput>(v, scratch_.p_tiles, kBlockKeys / kStep, keys / kStep, scratch_.product_t);
      order_memory();
      v.data += 2 * v.tile;
      float* out = out_t(group) + int64_t{dim} * kGroupRows;
      for (int32_t i = 0; i < 2 * kTileRows * kGroupVectors; ++i) {
        float* p = out + i * Vector::kWidth;
        Vector::store(p, Vector::fma(Vector::load(p), alpha[i % 2],
                                     Vector::load(scratch_.product_t + i * Vector::kWidth)));
      }
    }
  }

  // The same by vectors, for blocks that hold Inf or NaN.
  void vector_scores(int32_t group, const Block& block, int32_t keys) {
    pack_group(q_rows(group), params_.q_stride.row, group_height(group), head_dim_, padded_dim_, scale_.q_factor,
               scratch_.fp32_rows, scratch_.q_t);
    convert_rows(operands_.k + block.begin * params_.k_stride.row, params_.k_stride.row, keys, head_dim_, padded_dim_,
                 scratch_.fp32_rows);
    compute_scores(scratch_.q_t, scratch_.fp32_rows, padded_dim_, keys, head_dim_, scratch_.scores_t);
  }

  void vector_output(int32_t group, const Block& block, int32_t keys, GroupState state) {
    convert_rows(operands_.v + block.begin * params_.v_stride.row, params_.v_stride.row, keys, head_dim_, padded_dim_,
                 scratch_.fp32_rows);
    softmax_in_place<ExpDegree<T>::value>(scratch_.scores_t, keys, scale_.log2, state);
    accumulate_output(scratch_.scores_t, scratch_.fp32_rows, padded_dim_, keys, head_dim_, state.alpha, out_t(group));
  }

  const Task& task_;
  const attention::ForwardParams& params_;
  const Operands<T> operands_;
  const int32_t head_dim_;
  const int32_t padded_dim_;  // a multiple of 32
  const int32_t groups_;
  const Scale scale_;
  const AmxScratch scratch_;
};

void run_amx(const Task& task, void* memory) {
  const TileSession tiles;
  switch (task.type) {
    case ScalarType::kFloat32:
      return AmxForward<float>(task, memory).run();
    case ScalarType::kFloat16:
      return AmxForward<Half>(task, memory).run();
    case ScalarType::kBFloat16:
      return AmxForward<BFloat16>(task, memory).run();
  }
}

size_t amx_scratch_bytes(ScalarType type, int32_t head_dim, int32_t rows) {
  const int planes = type == ScalarType::kFloat32   ? Planes<float>::value
                     : type == ScalarType::kFloat16 ? Planes<Half>::value
                                                    : Planes<BFloat16>::value;
  return AmxScratch(nullptr, planes, group_count(rows), round_up(head_dim, kStep)).bytes;
}

}  // namespace

extern const Kernel kAmxKernel = {"amx", kGroupRows, amx_scratch_bytes, run_amx};

}  // namespace cpu
}  // namespace flashmoe
