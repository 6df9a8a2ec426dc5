/* Which table of kernels runs: the fastest one that this machine has, or the one that was asked
 * for. */
#include "dispatch.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define MAX_TABLES 3

static const struct swap_kernels *tables[MAX_TABLES];
static int num_tables;
static atomic_int chosen;

#if defined(__x86_64__)
/* Not every compiler's __builtin_cpu_supports knows this name. */
static bool has_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

static void find_tables(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        tables[num_tables++] = &swap_kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        tables[num_tables++] = &swap_kernels_avx2;
#elif defined(__aarch64__)
    tables[num_tables++] = &swap_kernels_neon;
#endif
    tables[num_tables++] = &swap_kernels_scalar;
}

static void ensure_tables(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_tables);
}

const struct swap_kernels *swap_kernels(void) {
    ensure_tables();
    return tables[atomic_load_explicit(&chosen, memory_order_relaxed)];
}

const char *swap_isa_name(int index) {
    ensure_tables();
    return index >= 0 && index < num_tables ? tables[index]->name : NULL;
}

int swap_isa(void) { return atomic_load_explicit(&chosen, memory_order_relaxed); }

int swap_set_isa(int index) {
    if (!swap_isa_name(index))
        return -EINVAL;
    atomic_store_explicit(&chosen, index, memory_order_relaxed);
    return 0;
}
