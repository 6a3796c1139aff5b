// What the host passes to the grouped matrix products of a mixture-of-experts layer. Plain C types only: the same header is read
// by the host compiler (which fills it), by NVRTC (whose kernels read it) and by the emulation build.
//
// A slot is one choice of one token: token * top_k + choice. Sorting puts the slots of each expert together, in the order of their
// slots; a sorted slot is a row. Expert e has the rows expert_offsets[e] to expert_offsets[e + 1]; slots that go to no expert of
// this layer have no row, so there may be fewer rows than slots, and only the device knows how many.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
#else
#include <cstdint>
#endif

namespace flashmoe::moe {

// What stands between the two products, of a row's gate g and up u.
enum class Activation : int32_t {
  kSwiglu,         // g * sigmoid(g) * u
  kGeglu,          // gelu(g) * u, with the error function
  kGegluTanh,      // gelu(g) * u, with the usual approximation by tanh
  kReglu,          // max(g, 0) * u
  kClampedSwiglu,  // g' * sigmoid(1.702 g') * (u' + 1), g' = min(g, 7), u' = u clamped to [-7, 7]
};

// One struct for all four products; each says which members it uses.
//
//   grouped_gemm                   d[row] = a[row] B_e (+ bias_e)
//   grouped_gemm_gated             z = a[token(row)] B_e (+ bias_e);  d[row] = activation(z);  preactivation[row] = z if wanted
//   grouped_gemm_gated_backward    s = a[a_row] B_e;  with the activation recomputed from preactivation:
//                                  d[row] = gradient of z for the gradient row_weights[row] * s of the activation;
//                                  weighted_activation[row] = row_weights[row] * activation(z);
//                                  row_dots[tile][row] = sum over kDotColumns columns of activation(z) * s
//   grouped_gemm_weight_gradient   d[e] = sum over e's rows of a[a_row]^T b[b_row]: [n, k]; zeros for an expert without rows
//
// B_e: the words of the axis `weights`: nk, weights [experts, n, k]; kn, weights [experts, k, n]; kn_pairs, as kn with the columns
// of gate and up interleaved. Sums are fp32, in an order that depends on k alone: a row's result is the same bits whatever the other
// rows, the tile, or the position in the batch.
constexpr int kDotColumns = 128;  // of a dot in row_dots, whatever the tile: so its bits depend on no choice of one

struct GemmParams {
  const void* a;  // gated: [tokens, k]; grouped_gemm, gated_backward: [slots, k]; weight_gradient: [slots, n]
  const void* b;  // weights; weight_gradient: [slots, k]
  void* d;        // [slots, n], gated: [slots, n / 2], gated_backward: [slots, 2 * n], weight_gradient: [experts, n, k]
  const void* bias;  // [experts, n]; null: none
  void*
      preactivation;  // [slots, 2 * intermediate], the columns in the order of the weights' rows; gated: written, null: not
                      // wanted; gated_backward: read
  void* weighted_activation;      // gated_backward: [slots, n], written
  float* row_dots;                // gated_backward: [ceil(n / kDotColumns)][slots], written
  const float* row_weights;       // [slots], by row
  const int32_t* expert_offsets;  // [experts + 1]; null: of one expert with `slots` rows
  // By row the slot whose token (slot / top_k) is a's row, a being [tokens, .]; null: a's row is the row itself. Family sm90
  // gathers for the gated product alone.
  const int32_t* a_slots;
  const int32_t* b_slots;  // weight_gradient: likewise for b
  // gated, for few rows: [slots] the experts as the sort was given them, int32 or int64; none outside [0, experts) has a row. Weights
  // are requested by them before the sort has ended. null: they wait for it.
  const void* ids;
  int32_t*
      tile_counter;  // one zeroed counter for persistent schedules, and zero again at the end; null: a static schedule
  int64_t a_stride;  // elements from a row to the next; the same for the others
  int64_t b_stride;  // weight_gradient: of b's rows; else from a weight row to the next
  int64_t b_expert_stride;  // from an expert's weights to the next one's
  int64_t d_stride;         // weight_gradient: of d's rows; experts are n rows apart
  int32_t experts;
  int32_t slots;   // tokens * top_k, at least the number of rows
  int32_t tokens;  // rows of a where a_slots is given
  int32_t top_k;
  int32_t n;  // columns of B (gated: of gate and up together; gated_backward: of one of them)
  int32_t k;  // what is summed over; weight_gradient: columns of b
  Activation activation;
  int32_t id_bytes;  // 4 or 8
  int32_t
      is_interleaved;  // gated, gated_backward: the weights' rows, and the columns of preactivation and of its gradient, are gate
                       // and up interleaved; else the gate's come first
};

}  // namespace flashmoe::moe
