/* The kernels for x86 processors with AVX2, FMA and F16C. */
#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define WIDTH 8
#include "vectors.h"

INLINE floats fused(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }

INLINE floats square_root(floats x) { return _mm256_sqrt_ps(x); }

INLINE bool any_nan(floats x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }

INLINE void add_squares(floats x, doubles sums[2]) {
    __m256d first = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    __m256d second = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    sums[0] = _mm256_fmadd_pd(first, first, sums[0]);
    sums[1] = _mm256_fmadd_pd(second, second, sums[1]);
}

INLINE words widen_unsigned(const uint16_t *from) {
    return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}

INLINE words widen_signed(const int16_t *from) {
    return (words)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
}

INLINE void narrow(words bits, void *to) {
    /* Packing saturates, so the high halves go first; it works on each half of the register. */
    __m256i low = _mm256_and_si256((__m256i)bits, _mm256_set1_epi32(0xffff));
    __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storeu_si128((__m128i *)to, packed);
}

INLINE floats widen_f16(const uint16_t *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

INLINE void narrow_f16(floats x, uint16_t *to) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE void stream_64(void *to, const void *from) {
    const __m256i *source = (const __m256i *)from;
    __m256i *target = (__m256i *)to;
    _mm256_stream_si256(target, _mm256_loadu_si256(source));
    _mm256_stream_si256(target + 1, _mm256_loadu_si256(source + 1));
}

INLINE void end_stream(void) { _mm_sfence(); }

#define KERNEL_TABLE swap_kernels_avx2
#define KERNEL_NAME "avx2"
#include "kernels_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int swap_no_avx2; /* a file must declare something */
#endif
