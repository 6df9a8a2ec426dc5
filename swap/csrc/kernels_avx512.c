/* The kernels for x86 processors with AVX-512 F, BW, DQ and VL. */
#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))),        \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define WIDTH 16
#include "vectors.h"

INLINE floats fused(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }

INLINE floats square_root(floats x) { return _mm512_sqrt_ps(x); }

INLINE bool any_nan(floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }

INLINE void add_squares(floats x, doubles sums[2]) {
    __m512d first = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    __m512d second = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    sums[0] = _mm512_fmadd_pd(first, first, sums[0]);
    sums[1] = _mm512_fmadd_pd(second, second, sums[1]);
}

INLINE words widen_unsigned(const uint16_t *from) {
    return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

INLINE words widen_signed(const int16_t *from) {
    return (words)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

INLINE void narrow(words bits, void *to) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)bits));
}

INLINE floats widen_f16(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

INLINE void narrow_f16(floats x, uint16_t *to) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE void stream_64(void *to, const void *from) {
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
}

INLINE void end_stream(void) { _mm_sfence(); }

#define KERNEL_TABLE swap_kernels_avx512
#define KERNEL_NAME "avx512"
#include "kernels_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int swap_no_avx512; /* a file must declare something */
#endif
