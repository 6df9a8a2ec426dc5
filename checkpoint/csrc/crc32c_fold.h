/* CRC-32C by folding: 256 bytes at a time with carry-less products of 512 bits, while copying. */
#ifndef CHECKPOINT_CRC32C_FOLD_H
#define CHECKPOINT_CRC32C_FOLD_H

#include <stddef.h>
#include <stdint.h>

#define CKPT_FOLD_BYTES 256u

/* Whether processor and system have AVX-512 and VPCLMULQDQ. The others below need them. */
int ckpt_can_fold(void);

/* Reduces nbytes, a multiple of CKPT_FOLD_BYTES and not 0, to CKPT_FOLD_BYTES with the same CRC:
 * a register `reg` (inverted CRC) advanced over all of `from` is a register 0 advanced over `rest`.
 * Copies on the way to `to` unless it is NULL, past the caches where `to` is a multiple of 64.
 */
void ckpt_fold(uint32_t reg, uint8_t *to, const uint8_t *from, size_t nbytes,
               uint8_t rest[CKPT_FOLD_BYTES]);

/* Copies past the caches. `to` is a multiple of 64. */
void ckpt_stream(uint8_t *to, const uint8_t *from, size_t nbytes);

#endif
