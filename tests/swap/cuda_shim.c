/* The CUDA kernels as C for the CPU: their text is compiled as it is, over stand-ins for what
 * CUDA brings.
 *
 * The threads of a block are contexts that take turns, each from one barrier to the next.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <ucontext.h>

#include "kernels.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static

struct position {
    unsigned int x;
};
static struct position threadIdx, blockIdx, gridDim;

static void __syncthreads(void);

static inline float __uint_as_float(unsigned int bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline void atomicMax(unsigned int *at, unsigned int value) {
    *at = value > *at ? value : *at;
}

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

#include "kernels.cu"

#define SAME_PLACE(field)                                                                          \
    _Static_assert(offsetof(struct adam_job, field) == offsetof(struct swap_adam, field), #field)

_Static_assert(sizeof(struct adam_job) == sizeof(struct swap_adam), "one struct");
SAME_PLACE(weight);
SAME_PLACE(rest);
SAME_PLACE(exp_avg);
SAME_PLACE(exp_avg_sq);
SAME_PLACE(exp_avg_scale);
SAME_PLACE(exp_avg_sq_scale);
SAME_PLACE(grad);
SAME_PLACE(n);
SAME_PLACE(layout);
SAME_PLACE(grad_float);
SAME_PLACE(decay_mode);
SAME_PLACE(moments);
SAME_PLACE(parameter);
SAME_PLACE(step);
SAME_PLACE(first);
SAME_PLACE(decay);
SAME_PLACE(grad_scale);
SAME_PLACE(one_minus_beta1);
SAME_PLACE(beta2);
SAME_PLACE(one_minus_beta2);
SAME_PLACE(bias2_sqrt);
SAME_PLACE(eps);
SAME_PLACE(minus_step_size);
_Static_assert(BLOCK == SWAP_MOMENT_BLOCK, "one block of threads for each block of moments");
_Static_assert(F32 == (int)SWAP_F32 && BF16 == (int)SWAP_BF16 && F16 == (int)SWAP_F16, "floats");
_Static_assert(HALVES == (int)SWAP_HALVES && COPY_BF16 == (int)SWAP_COPY_BF16, "layouts");
_Static_assert(COPY_F16 == (int)SWAP_COPY_F16 && MASTER_ONLY == (int)SWAP_MASTER_ONLY, "layouts");
_Static_assert(DECAY_WEIGHT == (int)SWAP_DECAY_WEIGHT, "decay");
_Static_assert(DECAY_GRADIENT == (int)SWAP_DECAY_GRADIENT, "decay");
_Static_assert(MOMENTS_F32 == (int)SWAP_MOMENTS_F32, "moments");
_Static_assert(MOMENTS_BF16 == (int)SWAP_MOMENTS_BF16, "moments");
_Static_assert(MOMENTS_U8 == (int)SWAP_MOMENTS_U8, "moments");

_Static_assert(SUM_BLOCK == SWAP_BLOCK, "sums");

static ucontext_t scheduler, threads[BLOCK];
static char stacks[BLOCK][1 << 15];
static bool is_finished[BLOCK];
static struct adam_job adam;
static struct squares_job squares;

static void __syncthreads(void) { swapcontext(&threads[threadIdx.x], &scheduler); }

static void run_adam(void) {
    adam_step(adam);
    is_finished[threadIdx.x] = true;
}

static void run_squares(void) {
    block_squares(squares);
    is_finished[threadIdx.x] = true;
}

static void begin_threads(void (*run)(void), unsigned int num_threads) {
    for (unsigned int i = 0; i < num_threads; i++) {
        getcontext(&threads[i]);
        threads[i].uc_stack.ss_sp = stacks[i];
        threads[i].uc_stack.ss_size = sizeof stacks[i];
        threads[i].uc_link = &scheduler;
        is_finished[i] = false;
        makecontext(&threads[i], run, 0);
    }
}

/* Runs each thread up to its next barrier; gives how many ended. */
static unsigned int run_to_barrier(unsigned int num_threads) {
    unsigned int finished = 0;
    for (unsigned int i = 0; i < num_threads; i++) {
        threadIdx.x = i;
        swapcontext(&scheduler, &threads[i]);
        finished += is_finished[i];
    }
    return finished;
}

/* 0, or -1 if some threads of a block wait at a barrier that others never come to. */
static int run_grid(void (*run)(void), unsigned int num_blocks, unsigned int num_threads) {
    gridDim.x = num_blocks;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; blockIdx.x++) {
        unsigned int finished = 0;
        begin_threads(run, num_threads);
        while (finished == 0)
            finished = run_to_barrier(num_threads);
        if (finished != num_threads)
            return -1;
    }
    return 0;
}

int adam_grid(const struct swap_adam *step, unsigned int num_blocks) {
    memcpy(&adam, step, sizeof adam);
    return run_grid(run_adam, num_blocks, BLOCK);
}

int squares_grid(const void *values, double *sums, int64_t n, int kind, unsigned int num_blocks) {
    squares = (struct squares_job){values, sums, n, kind};
    return run_grid(run_squares, num_blocks, LINE);
}
