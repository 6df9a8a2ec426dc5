/* The kernels for any processor: no instruction set beyond the baseline and no fused multiply-add.
 */
#define KERNEL_TABLE swap_kernels_scalar
#define KERNEL_NAME "scalar"
#include "kernels_impl.h"
