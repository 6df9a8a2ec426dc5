/* One table of kernels for each instruction set; isa.c picks the table, kernels.c runs it in
 * threads. */
#ifndef SWAP_DISPATCH_H
#define SWAP_DISPATCH_H

#include "kernels.h"

/* Each kernel works on elements [begin, end) and nothing else. */
typedef void swap_adam_range(const struct swap_adam *job, int64_t begin, int64_t end);

struct swap_kernels {
    const char *name;
    swap_adam_range *adam[SWAP_NUM_LAYOUTS][SWAP_NUM_FLOATS][SWAP_NUM_DECAYS];
    /* The sum of squares of one block of at most SWAP_BLOCK elements. */
    double (*block_sum[SWAP_NUM_FLOATS])(const void *values, int64_t begin, int64_t end);
    void (*split)(const float *master, uint16_t *hi, int16_t *lo, int64_t begin, int64_t end);
    void (*merge)(const uint16_t *hi, const int16_t *lo, float *master, int64_t begin, int64_t end);
};

#if defined(__x86_64__)
extern const struct swap_kernels swap_kernels_avx512;
extern const struct swap_kernels swap_kernels_avx2;
#elif defined(__aarch64__)
extern const struct swap_kernels swap_kernels_neon;
#endif
extern const struct swap_kernels swap_kernels_scalar;

/* The table in use. */
const struct swap_kernels *swap_kernels(void);

#endif
