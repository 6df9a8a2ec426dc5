/* Runs loops over elements in several threads. */
#ifndef SWAP_POOL_H
#define SWAP_POOL_H

#include <stdint.h>

/* Handles elements [begin, end); called from several threads at once. */
typedef void swap_range_body(void *context, int64_t begin, int64_t end);

/* Cuts [0, n) into pieces that begin at multiples of SWAP_BLOCK and hands them to at most `threads`
 * threads, the caller being one of them. Returns when all are done. May be called from several
 * threads at once, and again in a forked child. Where no thread can be started the caller does all
 * the work. Bodies run in the default floating-point environment. */
void swap_parallel(swap_range_body *body, void *context, int64_t n, int threads);

#endif
