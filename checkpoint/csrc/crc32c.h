/* CRC-32C (Castagnoli, reflected, as in RFC 3720) over memory, alone or while copying. */
#ifndef CHECKPOINT_CRC32C_H
#define CHECKPOINT_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The CRC of what `crc` stands for, followed by nbytes at data. The CRC of nothing is 0. */
uint32_t ckpt_crc32c(uint32_t crc, const void *data, size_t nbytes);

/* For each i < count: copies nbytes[i] bytes from src[i] to dst[i] and advances crc[i] over them.
 * Addresses travel as integers. dst[i] = 0 copies nothing; src[i] = 0 stands for zero bytes and
 * leaves crc[i] alone; crc = NULL sums nothing. Ranges must not overlap. Items are done in order.
 */
void ckpt_copy_crc32c(size_t count, const uint64_t *src, const uint64_t *dst,
                      const uint64_t *nbytes, uint32_t *crc);

/* Name of the code that runs on long ranges: "vpclmulqdq", "sse4.2", "armv8-crc" or "tables". */
const char *ckpt_crc32c_isa(void);

/* The ways to sum, the faster ones last. */
enum ckpt_crc32c_way { CKPT_CRC32C_TABLES, CKPT_CRC32C_INSTRUCTION, CKPT_CRC32C_FOLDING };

/* No faster way than this is used, whatever the processor offers; for tests. */
void ckpt_crc32c_at_most(enum ckpt_crc32c_way highest);

#endif
