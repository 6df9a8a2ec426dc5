/* The kernels for 64-bit Arm, where vectors and fused multiply-add are part of the baseline. */
#if defined(__aarch64__)

#include <arm_neon.h>

#define WIDTH 4
#include "vectors.h"

INLINE floats fused(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }

INLINE floats square_root(floats x) { return vsqrtq_f32(x); }

INLINE bool any_nan(floats x) { return vminvq_u32(vceqq_f32(x, x)) == 0; }

INLINE void add_squares(floats x, doubles sums[2]) {
    float64x2_t first = vcvt_f64_f32(vget_low_f32(x)), second = vcvt_high_f64_f32(x);
    sums[0] = vfmaq_f64(sums[0], first, first);
    sums[1] = vfmaq_f64(sums[1], second, second);
}

INLINE words widen_unsigned(const uint16_t *from) { return vmovl_u16(vld1_u16(from)); }

INLINE words widen_signed(const int16_t *from) { return (words)vmovl_s16(vld1_s16(from)); }

INLINE void narrow(words bits, void *to) { vst1_u16(to, vmovn_u32(bits)); }

INLINE floats widen_f16(const uint16_t *from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

INLINE void narrow_f16(floats x, uint16_t *to) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}

INLINE void stream_64(void *to, const void *from) { memcpy(to, from, 64); }

INLINE void end_stream(void) {}

#define KERNEL_TABLE swap_kernels_neon
#define KERNEL_NAME "neon"
#include "kernels_impl.h"

#else
typedef int swap_no_neon; /* a file must declare something */
#endif
