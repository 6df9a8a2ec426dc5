/* One table of kernels for each instruction set; isa.c picks the table, kernels.c runs it in
 * threads. */
#ifndef SWAP_DISPATCH_H
#define SWAP_DISPATCH_H

#include "kernels.h"

#include <stddef.h>

struct swap_kernels {
    const char *name;
    /* Elements [begin, end) of the job and nothing else. Values are read from the arrays of `old`,
     * which may be the job. */
    void (*adam)(const struct swap_adam *job, const struct swap_adam *old, int64_t begin,
                 int64_t end);
    /* The sum over elements [begin, end), at most SWAP_BLOCK of them. */
    double (*sum_of_squares)(const void *values, enum swap_float kind, int64_t begin, int64_t end);
    /* Copies to memory that is not read soon; other threads see it after end_stream(). */
    void (*stream)(void *to, const void *from, size_t nbytes);
    void (*end_stream)(void);
    void (*split)(const float *master, uint16_t *hi, int16_t *lo, int64_t n);
    void (*merge)(const uint16_t *hi, const int16_t *lo, float *master, int64_t n);
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
