/* The kernels themselves, written once over the vectors of vectors.h.
 *
 * Included for each instruction set by a file that has defined those and KERNEL_TABLE and
 * KERNEL_NAME.
 *
 * The formulas and their rounding are those of torch's fused CPU Adam for fp32, whose compiler
 * contracts three multiply-adds; here those are written out as fused(), and the compiler must
 * contract nothing (-ffp-contract=off), so that every instruction set gives the same bits.
 *
 * Loops go by lines of LINE elements, a cache line of 16-bit values. A range's last, partial line
 * is copied to one that is whole, so that there is no second form of any formula.
 */
#include "dispatch.h"

#include <stddef.h>

#define LINE 32

/* How far ahead of its use memory is asked for, in elements. Hardware prefetchers follow each
 * array, but with five to seven of them they come too late. From 64 to 128 it makes no difference.
 */
#define AHEAD 96

/* Which NaN an operation gives differs between machines; what is stored must not. */
INLINE floats one_nan(floats x) {
    words nan = (words)(x != x);
    return (floats)((nan & 0x7fc00000u) | (~nan & (words)x));
}

INLINE floats load_bf16(const uint16_t *from) { return (floats)(widen_unsigned(from) << 16); }

/* To nearest, ties to even; x has no NaN but one_nan's. */
INLINE void store_bf16(floats x, uint16_t *to) {
    words bits = (words)x;
    narrow((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, to);
}

/* The high half is the nearest bfloat16, ties away from zero; the low half, taken as a signed
 * number, is what is left of the bits. Example: 0x3f808000, a tie, gives 0x3f81 and -0x8000. */
INLINE floats load_halves(const uint16_t *hi, const int16_t *lo) {
    return (floats)((widen_unsigned(hi) << 16) + widen_signed(lo));
}

/* x has no NaN that rounds to anything else; see keep_nan. */
INLINE void store_halves(floats x, uint16_t *hi, int16_t *lo) {
    words bits = (words)x;
    narrow((bits + 0x8000u) >> 16, hi);
    narrow(bits, lo);
}

/* NaNs at the edges of their range, whose high half would be infinite or zero, become quiet ones.
 */
INLINE floats keep_nan(floats x) {
    floats nearest = (floats)(((words)x + 0x8000u) & 0xffff0000u);
    words lost = (words)(x != x) & (words)(nearest == nearest);
    words quiet = ((words)x & 0x80000000u) | 0x7fc00000u;
    return (floats)((lost & quiet) | (~lost & (words)x));
}

INLINE floats load_as(enum swap_float kind, const void *values, int64_t i) {
    if (kind == SWAP_F32)
        return load((const float *)values + i);
    if (kind == SWAP_BF16)
        return load_bf16((const uint16_t *)values + i);
    return widen_f16((const uint16_t *)values + i);
}

struct weights {
    enum swap_layout layout;
    uint16_t *weight;
    int16_t *low;
    float *master;
};

INLINE floats load_master(const struct weights *at, int64_t i) {
    return at->layout == SWAP_HALVES ? load_halves(at->weight + i, at->low + i)
                                     : load(at->master + i);
}

INLINE void store_master(floats p, const struct weights *at, int64_t i) {
    if (at->layout == SWAP_HALVES)
        store_halves(p, at->weight + i, at->low + i);
    else
        store(p, at->master + i);
    if (at->layout == SWAP_COPY_BF16)
        store_bf16(p, at->weight + i);
    if (at->layout == SWAP_COPY_F16)
        narrow_f16(p, at->weight + i);
}

/* Asks for the line of `size`-byte values at index i. */
INLINE void prefetch_line(const void *values, int size, int64_t i, bool to_write) {
    for (int byte = 0; byte < LINE * size; byte += 64) {
        const char *address = (const char *)values + i * size + byte;
        if (to_write)
            __builtin_prefetch(address, 1, 3);
        else
            __builtin_prefetch(address, 0, 3);
    }
}

/* Asks for the lines at index i of all arrays. A copy of weights is written only. */
INLINE void prefetch_lines(const struct swap_adam *job, const struct weights *weights, int64_t i,
                           bool to_write) {
    prefetch_line(job->exp_avg, 4, i, to_write);
    prefetch_line(job->exp_avg_sq, 4, i, to_write);
    if (weights->layout == SWAP_HALVES || (weights->layout != SWAP_MASTER_ONLY && to_write))
        prefetch_line(weights->weight, 2, i, to_write);
    if (weights->layout == SWAP_HALVES)
        prefetch_line(weights->low, 2, i, to_write);
    else
        prefetch_line(weights->master, 4, i, to_write);
}

/* Interpolating from the nearer end keeps the far end exact, as torch's lerp does. */
INLINE floats interpolate(floats m, floats g, float weight_of_g, bool near_m) {
    floats zero = {0.0f};
    return near_m ? fused(zero + weight_of_g, g - m, m)
                  : fused(zero + (weight_of_g - 1.0f), g - m, g);
}

INLINE struct weights weights_of(const struct swap_adam *job, enum swap_layout layout) {
    return (struct weights){layout, job->weight, job->rest,
                            layout == SWAP_MASTER_ONLY ? job->weight : job->rest};
}

INLINE void adam(const struct swap_adam *shared, const struct swap_adam *old, int64_t begin,
                 int64_t end, enum swap_layout layout, enum swap_float grad_float,
                 enum swap_decay decay_mode, bool near_m) {
    const struct swap_adam own = *shared, from = *old, *job = &own; /* no store can change them */
    const struct weights weights = weights_of(&own, layout), before = weights_of(&from, layout);
    const bool in_place = from.exp_avg == own.exp_avg;
    const floats zero = {0.0f};
    float *exp_avg = job->exp_avg, *exp_avg_sq = job->exp_avg_sq;
    const float *old_exp_avg = from.exp_avg, *old_exp_avg_sq = from.exp_avg_sq;

    for (int64_t line = begin; line < end; line += LINE) {
        if (in_place)
            prefetch_lines(&from, &before, line + AHEAD, true);
        else
            prefetch_lines(&from, &before, line + AHEAD, false);
        prefetch_line(job->grad, grad_float == SWAP_F32 ? 4 : 2, line + AHEAD, false);
        for (int64_t i = line; i < line + LINE; i += WIDTH) {
            floats p = load_master(&before, i);
            floats g = load_as(grad_float, job->grad, i) * job->grad_scale;
            floats m = load(old_exp_avg + i);
            floats v = load(old_exp_avg_sq + i);
            if (decay_mode == SWAP_DECAY_WEIGHT)
                p *= job->decay;
            else
                g = fused(p, zero + job->decay, g);
            m = interpolate(m, g, job->one_minus_beta1, near_m);
            v = fused(job->one_minus_beta2 * g, g, v * job->beta2);
            p += job->minus_step_size * m / (square_root(v) / job->bias2_sqrt + job->eps);
            if (__builtin_expect(any_nan(p), false)) { /* p is NaN wherever m or v is */
                p = one_nan(p);
                m = one_nan(m);
                v = one_nan(v);
            }
            store(m, exp_avg + i);
            store(v, exp_avg_sq + i);
            store_master(p, &weights, i);
        }
    }
}

#define ADAM(layout, grad, decay)                                                                  \
    static void adam_##layout##_##grad##_##decay(                                                  \
        const struct swap_adam *job, const struct swap_adam *old, int64_t begin, int64_t end) {    \
        if (job->one_minus_beta1 < 0.5f)                                                           \
            adam(job, old, begin, end, SWAP_##layout, SWAP_##grad, SWAP_DECAY_##decay, true);      \
        else                                                                                       \
            adam(job, old, begin, end, SWAP_##layout, SWAP_##grad, SWAP_DECAY_##decay, false);     \
    }
#define ADAM_OF_LAYOUT(layout)                                                                     \
    ADAM(layout, F32, WEIGHT)                                                                      \
    ADAM(layout, F32, GRADIENT)                                                                    \
    ADAM(layout, BF16, WEIGHT)                                                                     \
    ADAM(layout, BF16, GRADIENT)                                                                   \
    ADAM(layout, F16, WEIGHT)                                                                      \
    ADAM(layout, F16, GRADIENT)

ADAM_OF_LAYOUT(HALVES)
ADAM_OF_LAYOUT(COPY_BF16)
ADAM_OF_LAYOUT(COPY_F16)
ADAM_OF_LAYOUT(MASTER_ONLY)

#define BOTH_DECAYS(layout, grad)                                                                  \
    [SWAP_##grad] = {[SWAP_DECAY_WEIGHT] = adam_##layout##_##grad##_WEIGHT,                        \
                     [SWAP_DECAY_GRADIENT] = adam_##layout##_##grad##_GRADIENT}
#define ALL_GRADS(layout)                                                                          \
    [SWAP_##layout] = {BOTH_DECAYS(layout, F32), BOTH_DECAYS(layout, BF16),                        \
                       BOTH_DECAYS(layout, F16)}

typedef void adam_lines(const struct swap_adam *job, const struct swap_adam *old, int64_t begin,
                        int64_t end);

static adam_lines *const adam_kinds[SWAP_NUM_LAYOUTS][SWAP_NUM_FLOATS][SWAP_NUM_DECAYS] = {
    ALL_GRADS(HALVES), ALL_GRADS(COPY_BF16), ALL_GRADS(COPY_F16), ALL_GRADS(MASTER_ONLY)};

/* A line of any kind of values. */
union line {
    float wide[LINE];
    uint16_t narrow[LINE];
    int16_t low[LINE];
};

/* Updates the `n` elements at index `at`, less than a line, in a line of their own. */
static void adam_partial_line(adam_lines *lines, const struct swap_adam *job,
                              const struct swap_adam *old, int64_t at, int64_t n) {
    const size_t index = (size_t)at, count = (size_t)n;
    const size_t grad_size = job->grad_float == SWAP_F32 ? 4 : 2;
    const size_t weight_size = job->layout == SWAP_MASTER_ONLY ? 4 : 2;
    const size_t rest_size = job->layout == SWAP_HALVES ? 2 : 4;
    union line weight = {{0.0f}}, rest = weight, grad = weight, exp_avg = weight,
               exp_avg_sq = weight;

    memcpy(&weight, (const char *)old->weight + index * weight_size, count * weight_size);
    if (old->rest)
        memcpy(&rest, (const char *)old->rest + index * rest_size, count * rest_size);
    memcpy(&grad, (const char *)job->grad + index * grad_size, count * grad_size);
    memcpy(&exp_avg, (const float *)old->exp_avg + at, count * sizeof(float));
    memcpy(&exp_avg_sq, (const float *)old->exp_avg_sq + at, count * sizeof(float));
    struct swap_adam own = *job;
    own.weight = &weight;
    own.rest = &rest;
    own.grad = &grad;
    own.exp_avg = exp_avg.wide;
    own.exp_avg_sq = exp_avg_sq.wide;
    lines(&own, &own, 0, LINE);
    memcpy((char *)job->weight + index * weight_size, &weight, count * weight_size);
    if (job->rest)
        memcpy((char *)job->rest + index * rest_size, &rest, count * rest_size);
    memcpy((float *)job->exp_avg + at, &exp_avg, count * sizeof(float));
    memcpy((float *)job->exp_avg_sq + at, &exp_avg_sq, count * sizeof(float));
}

/* Elements [begin, end) of a job whose moments are floats. */
static void adam_floats(const struct swap_adam *job, const struct swap_adam *old, int64_t begin,
                        int64_t end) {
    adam_lines *lines = adam_kinds[job->layout][job->grad_float][job->decay_mode];
    int64_t partial = end - (end - begin) % LINE;
    lines(job, old, begin, partial);
    if (partial < end)
        adam_partial_line(lines, job, old, partial, end - partial);
}

#include "moments_impl.h"

static void stream(void *to, const void *from, size_t nbytes) {
    char *target = to;
    const char *source = from;
    size_t head = (size_t)(-(uintptr_t)target % 64);
    head = head < nbytes ? head : nbytes;
    memcpy(target, source, head);
    size_t at = head;
    for (; at + 64 <= nbytes; at += 64)
        stream_64(target + at, source + at);
    memcpy(target + at, source + at, nbytes - at);
}

static void split(const float *master, uint16_t *hi, int16_t *lo, int64_t n) {
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH)
        store_halves(keep_nan(load(master + i)), hi + i, lo + i);
    if (i < n) {
        size_t count = (size_t)(n - i);
        float masters[WIDTH] = {0.0f};
        uint16_t his[WIDTH];
        int16_t los[WIDTH];
        memcpy(masters, master + i, count * sizeof *masters);
        store_halves(keep_nan(load(masters)), his, los);
        memcpy(hi + i, his, count * sizeof *his);
        memcpy(lo + i, los, count * sizeof *los);
    }
}

static void merge(const uint16_t *hi, const int16_t *lo, float *master, int64_t n) {
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH)
        store(load_halves(hi + i, lo + i), master + i);
    if (i < n) {
        size_t count = (size_t)(n - i);
        float masters[WIDTH];
        uint16_t his[WIDTH] = {0};
        int16_t los[WIDTH] = {0};
        memcpy(his, hi + i, count * sizeof *his);
        memcpy(los, lo + i, count * sizeof *los);
        store(load_halves(his, los), masters);
        memcpy(master + i, masters, count * sizeof *masters);
    }
}

/* Adds the squares of the line at index i to one lane for each of its elements. The square of a
 * float is exact in double, so that it does not matter where one is fused with its addition. */
INLINE void add_line(enum swap_float kind, const void *values, int64_t i, doubles *lanes) {
    for (int at = 0; at < LINE; at += WIDTH)
        add_squares(load_as(kind, values, i + at), lanes + 2 * at / WIDTH);
}

INLINE double sum_lines(enum swap_float kind, const void *values, int64_t begin, int64_t end) {
    doubles vectors[2 * LINE / WIDTH] = {{0.0}};
    double lanes[LINE];
    int64_t i = begin;
    for (; i + LINE <= end; i += LINE)
        add_line(kind, values, i, vectors);
    if (i < end) {
        const size_t size = kind == SWAP_F32 ? 4 : 2;
        union line partial = {{0.0f}};
        memcpy(&partial, (const char *)values + (size_t)i * size, (size_t)(end - i) * size);
        add_line(kind, &partial, 0, vectors);
    }
    memcpy(lanes, vectors, sizeof lanes);
    for (int width = LINE / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] += lanes[lane + width];
    return lanes[0];
}

static double sum_of_squares(const void *values, enum swap_float kind, int64_t begin, int64_t end) {
    if (kind == SWAP_F32)
        return sum_lines(SWAP_F32, values, begin, end);
    if (kind == SWAP_BF16)
        return sum_lines(SWAP_BF16, values, begin, end);
    return sum_lines(SWAP_F16, values, begin, end);
}

const struct swap_kernels KERNEL_TABLE = {
    .name = KERNEL_NAME,
    .adam = adam_range,
    .sum_of_squares = sum_of_squares,
    .stream = stream,
    .end_stream = end_stream,
    .split = split,
    .merge = merge,
};
