/* The kernels themselves, as plain loops that compilers turn into vector code.
 *
 * Included once for each instruction set by a file that has set the compiler's target and defined
 * KERNEL_TABLE (the table to define), KERNEL_NAME and, where the target has it, KERNEL_FMA (the
 * hardware's fused multiply-add).
 *
 * The elementwise formulas and their rounding are those of torch's fused CPU Adam for fp32, which
 * contracts three multiply-adds; here those three are written out as fused() and the compiler must
 * contract nothing (-ffp-contract=off), so that every instruction set gives the same bits. Moments
 * are touched by load_moment and store_moment alone, and kernels know the absolute index of each
 * element: other dtypes for moments, with stochastic rounding or scales for each SWAP_BLOCK, go
 * there.
 */
#include "dispatch.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

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

INLINE bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

/* a * b + c, rounded once. */
INLINE float fused(float a, float b, float c) {
#ifdef KERNEL_FMA
    return __builtin_fmaf(a, b, c);
#else
    /* The product of two floats is exact in double. The sum is rounded to odd: when it is inexact
     * and even, it moves to its neighbour on the side of the error. A double so rounded keeps on
     * which side of a float's tie the exact sum lies, so rounding it again to float is right. */
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
#endif
}

/* Which NaN an operation gives differs between machines; what is stored must not. */
INLINE float one_nan(float value) { return value != value ? float_of(0x7fc00000u) : value; }

INLINE float bf16_to_float(uint16_t half) { return float_of((uint32_t)half << 16); }

/* To nearest, ties to even. NaN must come from one_nan. */
INLINE uint16_t float_to_bf16(float value) {
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

INLINE float f16_to_float(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
    /* The exponent is rebased by a multiplication, which is exact and gets subnormals right too. */
    uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
    return float_of(bits | (uint32_t)(half & 0x8000u) << 16);
}

/* To nearest, ties to even; what is too large becomes infinite. NaN must come from one_nan. */
INLINE uint16_t float_to_f16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    /* Normal: move the exponent's bias from 127 to 15 and round; a carry moves to the next
     * exponent. */
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* Subnormal: the lowest bit of a float around one half weighs 2**-24, as that of such a half.
     */
    uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? tiny : normal;
    half = magnitude >= 0x47800000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

/* The master from its halves; see split_bits. */
INLINE uint32_t merge_bits(uint16_t hi, int16_t lo) {
    return ((uint32_t)hi << 16) + (uint32_t)(int32_t)lo;
}

/* The nearest bfloat16 with ties away from zero, and the low half of the bits, which taken as a
 * signed number is what is left. Example: 0x3f808000, a tie, gives 0x3f81 and -0x8000. */
INLINE uint16_t hi_of_bits(uint32_t bits) { return (uint16_t)((bits + 0x8000u) >> 16); }
INLINE int16_t lo_of_bits(uint32_t bits) { return (int16_t)(uint16_t)bits; }

INLINE float load_float(enum swap_float kind, const void *values, int64_t i) {
    if (kind == SWAP_F32)
        return ((const float *)values)[i];
    uint16_t half = ((const uint16_t *)values)[i];
    return kind == SWAP_BF16 ? bf16_to_float(half) : f16_to_float(half);
}

INLINE float load_moment(const float *moments, int64_t i) { return moments[i]; }
INLINE void store_moment(float *moments, int64_t i, float value) { moments[i] = one_nan(value); }

INLINE void adam(const struct swap_adam *job, int64_t begin, int64_t end, enum swap_layout layout,
                 enum swap_float grad_float, enum swap_decay decay_mode) {
    uint16_t *restrict weight = job->weight;
    int16_t *restrict low = job->rest;
    float *restrict master = layout == SWAP_MASTER_ONLY ? job->weight : job->rest;
    float *restrict exp_avg = job->exp_avg;
    float *restrict exp_avg_sq = job->exp_avg_sq;
    const void *restrict grad = job->grad;
    const float decay = job->decay, grad_scale = job->grad_scale;
    const float beta2 = job->beta2, one_minus_beta2 = job->one_minus_beta2;
    const float bias2_sqrt = job->bias2_sqrt, eps = job->eps;
    const float minus_step_size = job->minus_step_size;
    /* Interpolating from the nearer end keeps the far end exact, as torch's lerp does. */
    const bool from_old = job->one_minus_beta1 < 0.5f;
    const float toward_grad = from_old ? job->one_minus_beta1 : job->one_minus_beta1 - 1.0f;

    for (int64_t i = begin; i < end; i++) {
        float g = load_float(grad_float, grad, i) * grad_scale;
        float p = layout == SWAP_HALVES ? float_of(merge_bits(weight[i], low[i])) : master[i];
        float m = load_moment(exp_avg, i), v = load_moment(exp_avg_sq, i);
        if (decay_mode == SWAP_DECAY_WEIGHT)
            p *= decay;
        else
            g = fused(p, decay, g);
        m = fused(toward_grad, g - m, from_old ? m : g);
        v = fused(one_minus_beta2 * g, g, v * beta2);
        p = one_nan(p + minus_step_size * m / (sqrtf(v) / bias2_sqrt + eps));
        store_moment(exp_avg, i, m);
        store_moment(exp_avg_sq, i, v);
        if (layout == SWAP_HALVES) {
            weight[i] = hi_of_bits(bits_of(p));
            low[i] = lo_of_bits(bits_of(p));
        } else {
            master[i] = p;
        }
        if (layout == SWAP_COPY_BF16)
            weight[i] = float_to_bf16(p);
        if (layout == SWAP_COPY_F16)
            weight[i] = float_to_f16(p);
    }
}

/* LANES sums side by side, then halved pairwise: an order that every vector width can keep. Squares
 * of floats are exact in double. */
#define LANES 32

INLINE double block_sum(const void *values, int64_t begin, int64_t end, enum swap_float kind) {
    double lanes[LANES] = {0.0};
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            double value = load_float(kind, values, i + lane);
            lanes[lane] += value * value;
        }
    for (int lane = 0; i + lane < end; lane++) {
        double value = load_float(kind, values, i + lane);
        lanes[lane] += value * value;
    }
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] += lanes[lane + width];
    return lanes[0];
}

static void split(const float *restrict master, uint16_t *restrict hi, int16_t *restrict lo,
                  int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        uint32_t bits = bits_of(master[i]);
        uint32_t nearest = hi_of_bits(bits);
        /* Only NaNs at the edges of their range round to something else. */
        bool lost = is_nan_bits(bits) && !is_nan_bits(nearest << 16);
        hi[i] = (uint16_t)(lost ? (bits >> 16 & 0x8000u) | 0x7fc0u : nearest);
        lo[i] = lost ? 0 : lo_of_bits(bits);
    }
}

static void merge(const uint16_t *restrict hi, const int16_t *restrict lo, float *restrict master,
                  int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        master[i] = float_of(merge_bits(hi[i], lo[i]));
}

#define ADAM(layout, grad, decay)                                                                  \
    static void adam_##layout##_##grad##_##decay(const struct swap_adam *job, int64_t begin,       \
                                                 int64_t end) {                                    \
        adam(job, begin, end, SWAP_##layout, SWAP_##grad, SWAP_DECAY_##decay);                     \
    }
#define ADAM_OF_GRAD(layout, grad) ADAM(layout, grad, WEIGHT) ADAM(layout, grad, GRADIENT)
#define ADAM_OF_LAYOUT(layout)                                                                     \
    ADAM_OF_GRAD(layout, F32) ADAM_OF_GRAD(layout, BF16) ADAM_OF_GRAD(layout, F16)

ADAM_OF_LAYOUT(HALVES)
ADAM_OF_LAYOUT(COPY_BF16)
ADAM_OF_LAYOUT(COPY_F16)
ADAM_OF_LAYOUT(MASTER_ONLY)

#define BLOCK_SUM(kind)                                                                            \
    static double block_sum_##kind(const void *values, int64_t begin, int64_t end) {               \
        return block_sum(values, begin, end, SWAP_##kind);                                         \
    }

BLOCK_SUM(F32)
BLOCK_SUM(BF16)
BLOCK_SUM(F16)

#define BOTH_DECAYS(layout, grad)                                                                  \
    [SWAP_##grad] = {[SWAP_DECAY_WEIGHT] = adam_##layout##_##grad##_WEIGHT,                        \
                     [SWAP_DECAY_GRADIENT] = adam_##layout##_##grad##_GRADIENT}
#define ALL_GRADS(layout)                                                                          \
    [SWAP_##layout] = {BOTH_DECAYS(layout, F32), BOTH_DECAYS(layout, BF16),                        \
                       BOTH_DECAYS(layout, F16)}

const struct swap_kernels KERNEL_TABLE = {
    .name = KERNEL_NAME,
    .adam = {ALL_GRADS(HALVES), ALL_GRADS(COPY_BF16), ALL_GRADS(COPY_F16), ALL_GRADS(MASTER_ONLY)},
    .block_sum = {[SWAP_F32] = block_sum_F32,
                  [SWAP_BF16] = block_sum_BF16,
                  [SWAP_F16] = block_sum_F16},
    .split = split,
    .merge = merge,
};
