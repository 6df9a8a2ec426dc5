/* CRC-32C by folding: 256 bytes at a time with carry-less products of 512 bits, while copying. */
#ifndef AIO_CRC32C_FOLD_H
#define AIO_CRC32C_FOLD_H

#include <stddef.h>
#include <stdint.h>

#define AIO_FOLD_BYTES 256u

/* Whether processor and system have AVX-512 and VPCLMULQDQ. The others below need them, and this
 * to have been called once before. */
int aio_can_fold(void);

/* Reduces nbytes, a multiple of AIO_FOLD_BYTES and not 0, to AIO_FOLD_BYTES with the same CRC:
 * a register `reg` (inverted CRC) advanced over all of `from` is a register 0 advanced over `rest`.
 * Copies on the way to `to` unless it is NULL, past the caches where `to` is a multiple of 64.
 */
void aio_fold(uint32_t reg, uint8_t *to, const uint8_t *from, size_t nbytes,
              uint8_t rest[AIO_FOLD_BYTES]);

/* Copies past the caches. `to` is a multiple of 64. */
void aio_stream(uint8_t *to, const uint8_t *from, size_t nbytes);

/* To be called after copies of both, before anybody is told of them. */
void aio_fold_fence(void);

#endif
