/* The kernels for any processor, with nothing beyond the baseline of its architecture.
 *
 * Vectors are a form of writing here: the compiler turns them into what there is.
 */
#include <math.h>

#define WIDTH 4
#include "vectors.h"

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The product of two floats is exact in double. The sum is rounded to odd: when it is inexact and
 * even, it moves to its neighbour on the side of the error. A double so rounded keeps on which side
 * of a float's tie the exact sum lies, so rounding it again to float is right. */
INLINE float fused_one(float a, float b, float c) {
    double product = (double)a * (double)b;
    double sum = product + (double)c;
    double part = sum - product;
    double error = (product - (sum - part)) + ((double)c - part);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    bool inexact = error > 0.0 || error < 0.0; /* false for NaN, which an infinite sum gives */
    uint64_t step = (error > 0.0) == (sum > 0.0) ? (uint64_t)1 : ~(uint64_t)0;
    bits += inexact && !(bits & 1) ? step : 0;
    memcpy(&sum, &bits, sizeof sum);
    return (float)sum;
}

INLINE float widen_f16_one(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
    /* A multiplication rebases the exponent: it is exact and gets subnormals right too. */
    uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
    return float_of(bits | (uint32_t)(half & 0x8000u) << 16);
}

INLINE uint16_t narrow_f16_one(float x) {
    uint32_t bits = bits_of(x);
    uint32_t magnitude = bits & 0x7fffffffu;
    /* Normal: the exponent's bias goes from 127 to 15; rounding may carry into the exponent. */
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* Subnormal: the lowest bit of a float near one half weighs 2**-24, as that of the result. */
    uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? tiny : normal;
    half = magnitude >= 0x47800000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

INLINE floats fused(floats a, floats b, floats c) {
    for (int lane = 0; lane < WIDTH; lane++)
        c[lane] = fused_one(a[lane], b[lane], c[lane]);
    return c;
}

INLINE floats square_root(floats x) {
    for (int lane = 0; lane < WIDTH; lane++)
        x[lane] = sqrtf(x[lane]);
    return x;
}

INLINE bool any_nan(floats x) {
    bool any = false;
    for (int lane = 0; lane < WIDTH; lane++)
        any |= x[lane] != x[lane];
    return any;
}

INLINE void add_squares(floats x, doubles sums[2]) {
    for (int lane = 0; lane < WIDTH; lane++) {
        double value = (double)x[lane];
        sums[lane / (WIDTH / 2)][lane % (WIDTH / 2)] += value * value;
    }
}

INLINE words widen_unsigned(const uint16_t *from) {
    uint16_t halves[WIDTH];
    memcpy(halves, from, sizeof halves);
    words bits = {0};
    for (int lane = 0; lane < WIDTH; lane++)
        bits[lane] = halves[lane];
    return bits;
}

INLINE words widen_signed(const int16_t *from) {
    int16_t halves[WIDTH];
    memcpy(halves, from, sizeof halves);
    words bits = {0};
    for (int lane = 0; lane < WIDTH; lane++)
        bits[lane] = (uint32_t)(int32_t)halves[lane];
    return bits;
}

INLINE void narrow(words bits, void *to) {
    uint16_t low[WIDTH];
    for (int lane = 0; lane < WIDTH; lane++)
        low[lane] = (uint16_t)bits[lane];
    memcpy(to, low, sizeof low);
}

INLINE floats widen_f16(const uint16_t *from) {
    uint16_t halves[WIDTH];
    memcpy(halves, from, sizeof halves);
    floats x = {0.0f};
    for (int lane = 0; lane < WIDTH; lane++)
        x[lane] = widen_f16_one(halves[lane]);
    return x;
}

INLINE void narrow_f16(floats x, uint16_t *to) {
    uint16_t halves[WIDTH];
    for (int lane = 0; lane < WIDTH; lane++)
        halves[lane] = narrow_f16_one(x[lane]);
    memcpy(to, halves, sizeof halves);
}

INLINE void stream_64(void *to, const void *from) { memcpy(to, from, 64); }

INLINE void end_stream(void) {}

#define KERNEL_TABLE swap_kernels_scalar
#define KERNEL_NAME "scalar"
#include "kernels_impl.h"
