/* The kernels for 64-bit Arm, where vectors and fused multiply-add are part of the baseline. */
#if defined(__aarch64__)

#define KERNEL_TABLE swap_kernels_neon
#define KERNEL_NAME "neon"
#define KERNEL_FMA
#include "kernels_impl.h"

#else
typedef int swap_no_neon; /* a file must declare something */
#endif
