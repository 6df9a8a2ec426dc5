/* The kernels for x86 processors with AVX2 and FMA. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define KERNEL_TABLE swap_kernels_avx2
#define KERNEL_NAME "avx2"
#define KERNEL_FMA
#include "kernels_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int swap_no_avx2; /* a file must declare something */
#endif
