/* The kernels over whole arrays: picks the table and the threads. */
#include "dispatch.h"
#include "pool.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

struct adam_context {
    const struct swap_kernels *kernels;
    const struct swap_adam *job;
};

static void adam_body(void *opaque, int64_t begin, int64_t end) {
    const struct adam_context *context = opaque;
    context->kernels->adam(context->job, begin, end);
}

static bool below(int32_t value, int32_t limit) { return value >= 0 && value < limit; }

int swap_adam_step(const struct swap_adam *job, int threads) {
    if (!below(job->layout, SWAP_NUM_LAYOUTS) || !below(job->grad_float, SWAP_NUM_FLOATS) ||
        !below(job->decay_mode, SWAP_NUM_DECAYS) || !below(job->moments, SWAP_NUM_MOMENTS) ||
        job->n < 0 || job->first < 0 || threads < 1)
        return -EINVAL;
    if (job->moments == SWAP_MOMENTS_U8 && job->first % SWAP_MOMENT_BLOCK != 0)
        return -EINVAL;
    struct adam_context context = {swap_kernels(), job};
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
    context->kernels->copy(context->to + begin, context->from + begin, (size_t)(end - begin));
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
            context->kernels->copy(context->copy + first, (const char *)context->values + first,
                                   (size_t)(stop - at) * size);
        }
    }
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
