/* The vector types of one instruction set: as wide as WIDTH floats.
 *
 * GCC's and Clang's vector extensions give arithmetic, shifts and comparisons; the file that
 * includes this adds the few operations for which they have no name, each under the same one:
 *
 *     floats fused(floats a, floats b, floats c)          a * b + c, rounded once
 *     floats square_root(floats x)
 *     bool any_nan(floats x)
 *     void add_squares(floats x, doubles sums[2])         of the first and of the second half of x;
 *                                                         exact but for the rounding of the sums
 *     words widen_unsigned(const uint16_t *from)          WIDTH elements each, at any address
 *     words widen_signed(const int16_t *from)
 *     void narrow(words bits, void *to)                   the low halves
 *     floats widen_f16(const uint16_t *from)
 *     void narrow_f16(floats x, uint16_t *to)             to nearest even; NaNs from one_nan only
 *     void stream_64(void *to, const void *from)          copies 64 bytes to a multiple of 64, past
 *                                                         the caches where that can be
 *     void end_stream(void)                               what was streamed is seen by others
 */
#ifndef SWAP_VECTORS_H
#define SWAP_VECTORS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef double doubles __attribute__((vector_size(4 * WIDTH))); /* half as many */

#define INLINE static inline __attribute__((always_inline))

INLINE floats load(const float *from) {
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(floats x, float *to) { memcpy(to, &x, sizeof x); }

#endif
