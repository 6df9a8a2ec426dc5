/* Polynomials are kept reflected: bit i of a 128-bit lane stands for x^(127-i), so that the first
 * byte of a message holds its highest powers. A lane (low, high) that is followed by n bits weighs
 *
 *     low * x^(n + 64) + high * x^n   mod P
 *
 * which two carry-less products with constants bring down to one lane n bits later. The product of
 * two reflected words comes out multiplied by x, which the constants make up for.
 *
 * Source: V. Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ, Intel
 * 2009; here four registers of four lanes each are on the way at once.
 */
#include "crc32c_fold.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define FOLD_TARGET __attribute__((target("avx512f,vpclmulqdq")))

#define POLYNOMIAL 0x82F63B78u
#define LINE 64u

/* x^n mod P, reflected, as the upper half of a word. */
static uint64_t power(unsigned n) {
    uint32_t value = 0x80000000u;
    while (n--)
        value = (value >> 1) ^ ((value & 1u) ? POLYNOMIAL : 0u);
    return (uint64_t)value << 32;
}

/* What folds a lane over the distance between two turns; made once, as that takes longer than to
 * fold a page. */
static uint64_t over_low, over_high;

int aio_can_fold(void) {
    const unsigned distance = 8 * AIO_FOLD_BYTES;
    over_low = power(distance + 63);
    over_high = power(distance - 1);
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

FOLD_TARGET static inline __m512i folded(__m512i sum, __m512i by, __m512i next) {
    __m512i low = _mm512_clmulepi64_epi128(sum, by, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(sum, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* exclusive or of three */
}

enum store { NOWHERE, CACHED, STREAMED };

FOLD_TARGET static inline void put(uint8_t *to, __m512i line, enum store store) {
    if (store == STREAMED)
        _mm512_stream_si512((void *)to, line);
    else if (store == CACHED)
        _mm512_storeu_si512(to, line);
}

FOLD_TARGET static inline __attribute__((always_inline)) void fold(uint32_t reg, uint8_t *to,
                                                                   const uint8_t *from,
                                                                   size_t nbytes, uint8_t *rest,
                                                                   enum store store) {
    const __m512i by =
        _mm512_broadcast_i32x4(_mm_set_epi64x((long long)over_high, (long long)over_low));
    __m512i sum[4];
    for (size_t k = 0; k < 4; k++) {
        sum[k] = _mm512_loadu_si512(from + k * LINE);
        put(to + k * LINE, sum[k], store);
    }
    sum[0] = _mm512_xor_si512(sum[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)reg)));
    for (size_t i = AIO_FOLD_BYTES; i < nbytes; i += AIO_FOLD_BYTES)
        for (size_t k = 0; k < 4; k++) {
            __m512i line = _mm512_loadu_si512(from + i + k * LINE);
            put(to + i + k * LINE, line, store);
            sum[k] = folded(sum[k], by, line);
        }
    for (size_t k = 0; k < 4; k++)
        _mm512_storeu_si512(rest + k * LINE, sum[k]);
}

FOLD_TARGET void aio_fold(uint32_t reg, uint8_t *to, const uint8_t *from, size_t nbytes,
                          uint8_t rest[AIO_FOLD_BYTES]) {
    if (!to)
        fold(reg, NULL, from, nbytes, rest, NOWHERE);
    else if ((uintptr_t)to % LINE)
        fold(reg, to, from, nbytes, rest, CACHED);
    else
        fold(reg, to, from, nbytes, rest, STREAMED);
}

void aio_fold_fence(void) { _mm_sfence(); }

FOLD_TARGET void aio_stream(uint8_t *to, const uint8_t *from, size_t nbytes) {
    size_t i = 0;
    for (; i + LINE <= nbytes; i += LINE)
        put(to + i, _mm512_loadu_si512(from + i), STREAMED);
    memcpy(to + i, from + i, nbytes - i);
}

#else
int aio_can_fold(void) { return 0; }

void aio_fold(uint32_t reg, uint8_t *to, const uint8_t *from, size_t nbytes,
              uint8_t rest[AIO_FOLD_BYTES]) {
    (void)reg, (void)nbytes;
    if (to)
        memcpy(to, from, nbytes);
    memset(rest, 0, AIO_FOLD_BYTES);
}

void aio_fold_fence(void) {}

void aio_stream(uint8_t *to, const uint8_t *from, size_t nbytes) { memcpy(to, from, nbytes); }
#endif
