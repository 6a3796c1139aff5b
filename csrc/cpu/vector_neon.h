// Four floats, NEON with fused multiply-add, which every AArch64 has. Internal linkage, like everything that is
// compiled for one instruction set.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "cpu/scalar_types.h"

namespace flashmoe::cpu {
namespace {

struct Vector {
  using Float = float32x4_t;
  static constexpr int kWidth = 4;
  static constexpr int kMaxTileRows = 12;  // of a tile 2 vectors wide: 24 accumulators, 2 operands, broadcasts

  static Float zero() { return vdupq_n_f32(0.0f); }
  static Float broadcast(float x) { return vdupq_n_f32(x); }
  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float sub(Float a, Float b) { return vsubq_f32(a, b); }
  static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static Float div(Float a, Float b) { return vdivq_f32(a, b); }
  static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  // b if either is NaN. (The instruction for a maximum gives NaN.)
  static Float max(Float a, Float b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  // yes where a == b, else no.
  static Float where_equal(Float a, Float b, Float yes, Float no) { return vbslq_f32(vceqq_f32(a, b), yes, no); }
  static bool any_differs(Float a, Float b) { return vminvq_u32(vceqq_f32(a, b)) == 0; }  // NaN differs
  // x in the lanes from `first` on, else other. first may be outside 0..width.
  static Float from_lane(int32_t first, Float x, Float other) {
    static constexpr int32_t kLanes[] = {0, 1, 2, 3};
    return vbslq_f32(vcgtq_s32(vdupq_n_s32(first), vld1q_s32(kLanes)), other, x);
  }

  // 2^n and t - n, where n = t rounded. t is at most a little above 0; 2^-127 and below count as 0, and no subnormal
  // arises on the way.
  static Float split_exponent(Float t, Float* fraction) {
    t = max(vdupq_n_f32(-127.0f), t);                     // NaN stays
    const Float magic = vdupq_n_f32(0x1.8p23f + 127.0f);  // t + magic has n + 127 in its low mantissa bits
    const Float shifted = vaddq_f32(t, magic);
    *fraction = vsubq_f32(t, vsubq_f32(shifted, magic));
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23));
  }

  static Float load(const float* p) { return vld1q_f32(p); }
  static Float load(const BFloat16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
  static Float load(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }

  static void store(float* p, Float x) { vst1q_f32(p, x); }
  static void store(BFloat16* p, Float x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(&p->bits, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16));
  }
  static void store(Half* p, Float x) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

  // dst[j][i] = row(i)[j], 4 x 4 of 32-bit elements.
  template <class Row>
  static void transpose(Row row, float* dst, int64_t dst_stride) {
    const float64x2_t even01 = vreinterpretq_f64_f32(vtrn1q_f32(row(0), row(1)));  // columns 0 and 2 of rows 0 and 1
    const float64x2_t odd01 = vreinterpretq_f64_f32(vtrn2q_f32(row(0), row(1)));
    const float64x2_t even23 = vreinterpretq_f64_f32(vtrn1q_f32(row(2), row(3)));
    const float64x2_t odd23 = vreinterpretq_f64_f32(vtrn2q_f32(row(2), row(3)));
    store(dst, vreinterpretq_f32_f64(vtrn1q_f64(even01, even23)));
    store(dst + dst_stride, vreinterpretq_f32_f64(vtrn1q_f64(odd01, odd23)));
    store(dst + 2 * dst_stride, vreinterpretq_f32_f64(vtrn2q_f64(even01, even23)));
    store(dst + 3 * dst_stride, vreinterpretq_f32_f64(vtrn2q_f64(odd01, odd23)));
  }
};

}  // namespace
}  // namespace flashmoe::cpu
