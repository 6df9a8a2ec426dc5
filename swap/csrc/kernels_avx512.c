/* The kernels for x86 processors with AVX-512 F, BW, DQ and VL. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))),    \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif

#define KERNEL_TABLE swap_kernels_avx512
#define KERNEL_NAME "avx512"
#define KERNEL_FMA
#include "kernels_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int swap_no_avx512; /* a file must declare something */
#endif
