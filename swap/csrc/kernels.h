/* What the kernels of swap take and give; everything here is called from Python through cffi.
 *
 * All functions work in place on caller-owned arrays that must stay alive and must not overlap
 * until the call returns. Any alignment and any length is legal. Results do not depend on the
 * instruction set nor on the number of threads: every element is computed by the same IEEE
 * operations in the same order, in the default floating-point environment whatever the caller's is.
 *
 * Everything between the two cffi marks is also the `cdef` of swap/_build.py: of macros, there are
 * plain numbers in there.
 */
#ifndef SWAP_KERNELS_H
#define SWAP_KERNELS_H

#include <stdint.h>

/* cffi: begin */
#define SWAP_BLOCK 4096
#define SWAP_MOMENT_BLOCK 256

enum swap_float { SWAP_F32, SWAP_BF16, SWAP_F16, SWAP_NUM_FLOATS };

/* How the fp32 master weight and the weight that computes are kept. */
enum swap_layout {
    SWAP_HALVES,      /* weight: bf16 high halves, rest: int16 low halves */
    SWAP_COPY_BF16,   /* weight: bf16 copy (written only), rest: fp32 master */
    SWAP_COPY_F16,    /* weight: fp16 copy (written only), rest: fp32 master */
    SWAP_MASTER_ONLY, /* weight: fp32 master, rest: NULL */
    SWAP_NUM_LAYOUTS
};

enum swap_decay { SWAP_DECAY_WEIGHT, SWAP_DECAY_GRADIENT, SWAP_NUM_DECAYS };

/* How exp_avg and exp_avg_sq are kept. */
enum swap_moments {
    SWAP_MOMENTS_F32,
    SWAP_MOMENTS_BF16, /* rounded stochastically */
    SWAP_MOMENTS_U8,   /* so too, with a float scale for each SWAP_MOMENT_BLOCK elements */
    SWAP_NUM_MOMENTS
};

/* One Adam step over `n` elements. The scalars are as the elementwise formulas in kernels_impl.h
 * use them, already rounded from double. */
struct swap_adam {
    void *weight;
    void *rest;
    void *exp_avg;
    void *exp_avg_sq;
    float *exp_avg_scale; /* NULL but for SWAP_MOMENTS_U8 */
    float *exp_avg_sq_scale;
    const void *grad;
    int64_t n;
    int32_t layout;     /* enum swap_layout */
    int32_t grad_float; /* enum swap_float */
    int32_t decay_mode; /* enum swap_decay */
    int32_t moments;    /* enum swap_moments */
    uint64_t parameter; /* what random bits for rounding are a function of: */
    uint64_t step;
    int64_t first; /* element of the parameter that element 0 is; whole blocks for U8 */
    float decay;   /* factor on the weight, or weight of the weight in the gradient */
    float grad_scale;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float bias2_sqrt;
    float eps;
    float minus_step_size;
};

/* These return 0 or -errno: -EINVAL for an enum out of range, -ENOMEM. `threads` includes the
 * caller and is at least 1; fewer are used where a thread would get too little to do.
 *
 * A step begins with the values in the arrays of `old`, which are like those of `job` and overlap
 * none of them, and writes the new ones to those of `job`; of `old` nothing else is looked at.
 * NULL: in place. */
int swap_adam_step(const struct swap_adam *job, const struct swap_adam *old, int threads);
int swap_split(const float *master, uint16_t *hi, int16_t *lo, int64_t n, int threads);
int swap_merge(const uint16_t *hi, const int16_t *lo, float *master, int64_t n, int threads);

/* Copies `nbytes` to memory that is not read soon. */
int swap_copy(const void *from, void *to, int64_t nbytes, int threads);

/* Sets sums[i] to the sum of squares, in double, of the i-th block of SWAP_BLOCK elements; the last
 * block may be shorter. With `copy`, copies the values there in the same pass over memory. */
int swap_block_squares(const void *values, int value_float, int64_t n, void *copy, double *sums,
                       int threads);

/* Adds to *sum, one after the other, the sums of squares of consecutive blocks of
 * SWAP_BLOCK elements; each block is summed in double. `copy` as above. */
int swap_sum_of_squares(const void *values, int value_float, int64_t n, void *copy, double *sum,
                        int threads);

/* From now on the calling thread shares its work with a pool of threads, not with a team of OpenMP
 * threads of its own. For threads that do not compute with torch. */
void swap_use_pool(void);

/* Names of the instruction sets that this machine can run, fastest first; NULL past the last. */
const char *swap_isa_name(int index);
/* The one in use, as an index into those names. swap_set_isa returns 0, or -EINVAL if out of range.
 */
int swap_isa(void);
int swap_set_isa(int index);
/* cffi: end */

#endif
