// Parameters that the host passes to the grouped matrix products of a mixture-of-experts layer. Plain C types only: the
// same header is read by the host compiler (which fills the struct), by NVRTC (whose kernels read it) and by the
// emulation build.
//
// A slot is one of a token's expert choices: slot = token * top_k + choice. Sorting groups the slots by expert, in slot
// order within an expert; a sorted slot is a row. Expert e owns rows expert_offsets[e] up to, not including,
// expert_offsets[e + 1]. Slots that go to no expert of this layer have no row, so there may be fewer rows than slots,
// and only the device knows how many.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
#else
#include <cstdint>
#endif

namespace flashmoe::moe {

// The activation between the two products, for a row's gate g and up u.
enum class Activation : int32_t {
  kSwiglu,         // g * sigmoid(g) * u
  kGeglu,          // gelu(g) * u, with the error function
  kGegluTanh,      // gelu(g) * u, with the usual approximation by tanh
  kReglu,          // max(g, 0) * u
  kClampedSwiglu,  // g' * sigmoid(1.702 g') * (u' + 1), g' = min(g, 7), u' = u clamped to [-7, 7]
};

// One struct for all four products; the comments say which products use a member.
//
//   grouped_gemm                   d[row] = a[row] B_e (+ bias_e)
//   grouped_gemm_gated             z = a[token(row)] B_e (+ bias_e);  d[row] = activation(z);  preactivation[row] = z
//                                  unless null
//   grouped_gemm_gated_backward    s = a[a_row] B_e;  with the activation recomputed from preactivation:
//                                  d[row] = gradient with respect to z, given the activation's gradient
//                                  row_weights[row] * s;
//                                  weighted_activation[row] = row_weights[row] * activation(z);
//                                  row_dots[tile][row] = sum over kDotColumns columns of activation(z) * s
//   grouped_gemm_weight_gradient   d[e] = sum over e's rows of a[a_row]^T b[b_row]: [n, k]; zeros for an expert without
//                                  rows
//
// B_e is laid out as the axis `weights` says: nk, weights [experts, n, k]; kn, weights [experts, k, n]; kn_pairs, as kn
// with the columns of gate and up interleaved. Sums are fp32, in an order that depends only on k: a row's result has
// the same bits whatever the other rows, the tile or its position in the batch.
constexpr int kDotColumns = 128;  // columns per element of row_dots, the same for every tile so that its bits are too

struct GemmParams {
  const void* a;  // gated: [tokens, k]; grouped_gemm, gated_backward: [slots, k]; weight_gradient: [slots, n]
  const void* b;  // weights; weight_gradient: [slots, k]
  void* d;        // [slots, n], gated: [slots, n / 2], gated_backward: [slots, 2 * n], weight_gradient: [experts, n, k]
  const void* bias;  // [experts, n]; null: none
  void*
      preactivation;  // [slots, 2 * intermediate], columns ordered like the weights' rows; gated: written unless null;
                      // gated_backward: read
  void* weighted_activation;      // gated_backward: [slots, n], written
  float* row_dots;                // gated_backward: [ceil(n / kDotColumns)][slots], written
  const float* row_weights;       // [slots], by row
  const int32_t* expert_offsets;  // [experts + 1]; null: one expert with `slots` rows
  // For each row, the slot whose token (slot / top_k) is the row of a, a being [tokens, .]; null: a's row is the row
  // itself. Family sm90 gathers only for the gated product.
  const int32_t* a_slots;
  const int32_t* b_slots;  // weight_gradient: the same for b
  // gated, for few rows: [slots], the expert ids passed to the sort, int32 or int64; ids outside [0, experts) have no
  // row. The kernel requests weights by these ids before the sort has ended. null: it waits for the sort.
  const void* ids;
  int32_t* tile_counter;  // one zeroed counter for persistent schedules, zero again at the end; null: a static schedule
  int64_t a_stride;       // elements from one row to the next; the same unit below
  int64_t b_stride;       // weight_gradient: between rows of b; else between weight rows
  int64_t b_expert_stride;  // from one expert's weights to the next one's
  int64_t d_stride;         // weight_gradient: between rows of d; experts are n rows apart
  int32_t experts;
  int32_t slots;   // tokens * top_k, at least the number of rows
  int32_t tokens;  // rows of a if a_slots is given
  int32_t top_k;
  int32_t n;  // columns of B (gated: gate and up together; gated_backward: one of them)
  int32_t k;  // the dimension summed over; weight_gradient: columns of b
  Activation activation;
  int32_t id_bytes;  // 4 or 8
  int32_t
      is_interleaved;  // gated, gated_backward: gate and up are interleaved in the weights' rows and in the columns of
                       // preactivation and of its gradient; else the gate comes first
};

}  // namespace flashmoe::moe
