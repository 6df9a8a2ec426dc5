/* The kernels over whole arrays: picks the table and the threads. */
#include "dispatch.h"
#include "pool.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct adam_context {
    const struct swap_kernels *kernels;
    const struct swap_adam *job;
    const struct swap_adam *old;
};

/* Of a step that is not in place, so many new values are made in the cache at a time, from where
 * they are written past it: memory that is written through the cache is read for that before. */
#define ASIDE (2 * SWAP_MOMENT_BLOCK)

struct aside {
    float weight[ASIDE], rest[ASIDE], exp_avg[ASIDE], exp_avg_sq[ASIDE];
    float exp_avg_scale[ASIDE / SWAP_MOMENT_BLOCK], exp_avg_sq_scale[ASIDE / SWAP_MOMENT_BLOCK];
};

static const size_t moment_sizes[SWAP_NUM_MOMENTS] = {
    [SWAP_MOMENTS_F32] = 4, [SWAP_MOMENTS_BF16] = 2, [SWAP_MOMENTS_U8] = 1};

static void *from_element(void *values, int64_t at, size_t size) {
    return values ? (char *)values + (size_t)at * size : NULL;
}

/* The job from element `at` on, at the beginning of a block, with the state in the arrays of
 * another. */
static struct swap_adam part_of(const struct swap_adam *job, const struct swap_adam *arrays,
                                int64_t at) {
    const size_t moment_size = moment_sizes[job->moments];
    const int64_t block = at / SWAP_MOMENT_BLOCK;
    struct swap_adam part = *job;
    part.weight = from_element(arrays->weight, at, job->layout == SWAP_MASTER_ONLY ? 4 : 2);
    part.rest = from_element(arrays->rest, at, job->layout == SWAP_HALVES ? 2 : 4);
    part.exp_avg = from_element(arrays->exp_avg, at, moment_size);
    part.exp_avg_sq = from_element(arrays->exp_avg_sq, at, moment_size);
    part.exp_avg_scale = from_element(arrays->exp_avg_scale, block, sizeof(float));
    part.exp_avg_sq_scale = from_element(arrays->exp_avg_sq_scale, block, sizeof(float));
    part.grad = (const char *)job->grad + (size_t)at * (job->grad_float == SWAP_F32 ? 4 : 2);
    part.first += at;
    return part;
}

static void step_aside(const struct adam_context *context, int64_t at, int64_t n) {
    const struct swap_adam *job = context->job;
    const struct swap_adam new = part_of(job, job, at), old = part_of(job, context->old, at);
    const size_t count = (size_t)n, moment_size = moment_sizes[job->moments];
    void (*const stream)(void *, const void *, size_t) = context->kernels->stream;
    _Alignas(64) struct aside made;
    struct swap_adam part = new;
    part.weight = made.weight;
    part.rest = made.rest;
    part.exp_avg = made.exp_avg;
    part.exp_avg_sq = made.exp_avg_sq;
    part.exp_avg_scale = made.exp_avg_scale;
    part.exp_avg_sq_scale = made.exp_avg_sq_scale;
    context->kernels->adam(&part, &old, 0, n);
    stream(new.weight, made.weight, count * (job->layout == SWAP_MASTER_ONLY ? 4 : 2));
    if (job->layout != SWAP_MASTER_ONLY)
        stream(new.rest, made.rest, count * (job->layout == SWAP_HALVES ? 2 : 4));
    stream(new.exp_avg, made.exp_avg, count * moment_size);
    stream(new.exp_avg_sq, made.exp_avg_sq, count * moment_size);
    if (job->moments == SWAP_MOMENTS_U8) {
        const size_t blocks = (count + SWAP_MOMENT_BLOCK - 1) / SWAP_MOMENT_BLOCK;
        memcpy(new.exp_avg_scale, made.exp_avg_scale, blocks * sizeof(float));
        memcpy(new.exp_avg_sq_scale, made.exp_avg_sq_scale, blocks * sizeof(float));
    }
}

static void adam_body(void *opaque, int64_t begin, int64_t end) {
    const struct adam_context *context = opaque;
    if (context->old == context->job) {
        context->kernels->adam(context->job, context->old, begin, end);
        return;
    }
    for (int64_t at = begin; at < end; at += ASIDE)
        step_aside(context, at, end - at < ASIDE ? end - at : ASIDE);
    context->kernels->end_stream();
}

static bool below(int32_t value, int32_t limit) { return value >= 0 && value < limit; }

int swap_adam_step(const struct swap_adam *job, const struct swap_adam *old, int threads) {
    if (!below(job->layout, SWAP_NUM_LAYOUTS) || !below(job->grad_float, SWAP_NUM_FLOATS) ||
        !below(job->decay_mode, SWAP_NUM_DECAYS) || !below(job->moments, SWAP_NUM_MOMENTS) ||
        job->n < 0 || job->first < 0 || threads < 1)
        return -EINVAL;
    if (job->moments == SWAP_MOMENTS_U8 && job->first % SWAP_MOMENT_BLOCK != 0)
        return -EINVAL;
    struct adam_context context = {swap_kernels(), job, old ? old : job};
    swap_parallel(adam_body, &context, job->n, threads);
    return 0;
}

struct split_context {
    const struct swap_kernels *kernels;
    const float *master;
    uint16_t *hi;
    int16_t *lo;
};

static void split_body(void *opaque, int64_t begin, int64_t end) {
    const struct split_context *context = opaque;
    context->kernels->split(context->master + begin, context->hi + begin, context->lo + begin,
                            end - begin);
}

int swap_split(const float *master, uint16_t *hi, int16_t *lo, int64_t n, int threads) {
    if (n < 0 || threads < 1)
        return -EINVAL;
    struct split_context context = {swap_kernels(), master, hi, lo};
    swap_parallel(split_body, &context, n, threads);
    return 0;
}

struct merge_context {
    const struct swap_kernels *kernels;
    const uint16_t *hi;
    const int16_t *lo;
    float *master;
};

static void merge_body(void *opaque, int64_t begin, int64_t end) {
    const struct merge_context *context = opaque;
    context->kernels->merge(context->hi + begin, context->lo + begin, context->master + begin,
                            end - begin);
}

int swap_merge(const uint16_t *hi, const int16_t *lo, float *master, int64_t n, int threads) {
    if (n < 0 || threads < 1)
        return -EINVAL;
    struct merge_context context = {swap_kernels(), hi, lo, master};
    swap_parallel(merge_body, &context, n, threads);
    return 0;
}

struct copy_context {
    const struct swap_kernels *kernels;
    const char *from;
    char *to;
};

static void copy_body(void *opaque, int64_t begin, int64_t end) {
    const struct copy_context *context = opaque;
    context->kernels->stream(context->to + begin, context->from + begin, (size_t)(end - begin));
    context->kernels->end_stream();
}

int swap_copy(const void *from, void *to, int64_t nbytes, int threads) {
    if (nbytes < 0 || threads < 1)
        return -EINVAL;
    struct copy_context context = {swap_kernels(), from, to};
    swap_parallel(copy_body, &context, nbytes, threads);
    return 0;
}

struct sum_context {
    const struct swap_kernels *kernels;
    const void *values;
    enum swap_float kind;
    char *copy;   /* or NULL */
    double *sums; /* one for each block */
};

static void sum_body(void *opaque, int64_t begin, int64_t end) {
    const struct sum_context *context = opaque;
    for (int64_t at = begin; at < end; at += SWAP_BLOCK) {
        int64_t stop = end - at < SWAP_BLOCK ? end : at + SWAP_BLOCK;
        context->sums[at / SWAP_BLOCK] =
            context->kernels->sum_of_squares(context->values, context->kind, at, stop);
        if (context->copy) { /* the block is in the cache */
            const size_t size = context->kind == SWAP_F32 ? 4 : 2, first = (size_t)at * size;
            context->kernels->stream(context->copy + first, (const char *)context->values + first,
                                     (size_t)(stop - at) * size);
        }
    }
    context->kernels->end_stream();
}

int swap_block_squares(const void *values, int value_float, int64_t n, void *copy, double *sums,
                       int threads) {
    if (!below(value_float, SWAP_NUM_FLOATS) || n < 0 || threads < 1)
        return -EINVAL;
    if (n == 0)
        return 0;
    struct sum_context context = {swap_kernels(), values, (enum swap_float)value_float, copy, sums};
    swap_parallel(sum_body, &context, n, threads);
    return 0;
}

int swap_sum_of_squares(const void *values, int value_float, int64_t n, void *copy, double *sum,
                        int threads) {
    int64_t blocks = n / SWAP_BLOCK + (n % SWAP_BLOCK > 0);
    if (blocks <= 0)
        return swap_block_squares(values, value_float, n, copy, NULL, threads);
    double *sums = calloc((size_t)blocks, sizeof *sums);
    if (!sums)
        return -ENOMEM;
    int status = swap_block_squares(values, value_float, n, copy, sums, threads);
    for (int64_t block = 0; status == 0 && block < blocks; block++)
        *sum += sums[block];
    free(sums);
    return status;
}
