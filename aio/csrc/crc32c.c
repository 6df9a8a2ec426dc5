/* CRC-32C three ways: tables for any machine, the crc32 instructions of SSE4.2 and of ARMv8, and
 * folding (crc32c_fold.c) for long ranges where the processor can.
 *
 * The instruction takes 8 bytes every cycle but its result is ready only after 3, so one chain of
 * them runs at a third of the speed. Long inputs are therefore cut into three lanes that are summed
 * side by side and joined: CRC is linear, crc(a ++ b) = shift(crc(a), |b|) ^ crc(b), where shift
 * advances a register over |b| zero bytes. For the fixed lane lengths that shift is four lookups.
 */
#include "api.h"
#include "crc32c_fold.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <nmmintrin.h>
#define CRC_TARGET __attribute__((target("sse4.2")))
#define CRC_NAME "sse4.2"
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define CRC_TARGET __attribute__((target("+crc")))
#define CRC_NAME "armv8-crc"
#endif

#define POLYNOMIAL 0x82F63B78u /* reflected Castagnoli */
#define LONG_LANE 4096u
#define SHORT_LANE 256u
#define COPY_BLOCK 16384u /* stays in the first-level cache between the copy and the sum */
#define FOLD_FROM 2048u   /* below, what is left at the end of a fold weighs too much */
#define STREAM_FROM 65536u

typedef struct {
    uint32_t by_byte[4][256];
} shift_table;

static uint32_t byte_table[8][256];
static shift_table long_shift, short_shift;
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;
static enum aio_crc32c_way best_way;
static atomic_int highest_way = AIO_CRC32C_FOLDING;

static void make_byte_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ ((crc & 1u) ? POLYNOMIAL : 0u);
        byte_table[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++)
            byte_table[k][i] =
                (byte_table[k - 1][i] >> 8) ^ byte_table[0][byte_table[k - 1][i] & 0xFFu];
}

static uint32_t over_zeros(uint32_t crc, size_t nbytes) {
    while (nbytes--)
        crc = (crc >> 8) ^ byte_table[0][crc & 0xFFu];
    return crc;
}

/* The product of two polynomials over the one of the CRC, as zlib's crc32_combine takes it. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        product ^= (a & bit) ? b : 0u;
        b = (b >> 1) ^ ((b & 1u) ? POLYNOMIAL : 0u);
    }
    return product;
}

/* What a register is multiplied by to advance it over so many zero bytes: x^(8 * nbytes). */
static uint32_t power_of(uint64_t nbytes) {
    uint32_t power = 1u << 31, square = over_zeros(1u << 31, 1);
    for (; nbytes; nbytes >>= 1) {
        if (nbytes & 1u)
            power = multiply(square, power);
        square = multiply(square, square);
    }
    return power;
}

static void make_shift_table(shift_table *table, uint64_t nbytes) {
    uint32_t of_bit[32]; /* the shift is linear: what it does to each bit says it all */
    uint32_t power = power_of(nbytes);
    for (int bit = 0; bit < 32; bit++)
        of_bit[bit] = multiply(power, 1u << bit);
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t sum = 0;
            for (int bit = 0; bit < 8; bit++)
                sum ^= ((value >> bit) & 1u) ? of_bit[8 * byte + bit] : 0u;
            table->by_byte[byte][value] = sum;
        }
}

static inline uint32_t shift(const shift_table *table, uint32_t reg) {
    return table->by_byte[0][reg & 0xFFu] ^ table->by_byte[1][(reg >> 8) & 0xFFu] ^
           table->by_byte[2][(reg >> 16) & 0xFFu] ^ table->by_byte[3][reg >> 24];
}

static int has_instruction(void) {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2) != 0;
#elif defined(__aarch64__)
    return (getauxval(AT_HWCAP) & (1ul << 7)) != 0; /* HWCAP_CRC32 */
#else
    return 0;
#endif
}

static void make_tables(void) {
    make_byte_table();
    make_shift_table(&long_shift, LONG_LANE);
    make_shift_table(&short_shift, SHORT_LANE);
    best_way = !has_instruction() ? AIO_CRC32C_TABLES
               : aio_can_fold()   ? AIO_CRC32C_FOLDING
                                  : AIO_CRC32C_INSTRUCTION;
}

static enum aio_crc32c_way way(void) {
    pthread_once(&tables_once, make_tables);
    int highest = atomic_load_explicit(&highest_way, memory_order_relaxed);
    return (int)best_way < highest ? best_way : (enum aio_crc32c_way)highest;
}

static uint64_t load64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* Registers below are the inverted CRC, as the instruction keeps them. */
static uint32_t update_tables(uint32_t reg, const uint8_t *p, size_t nbytes) {
    for (; nbytes >= 8; nbytes -= 8, p += 8) {
        uint32_t low = reg ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                              (uint32_t)p[3] << 24);
        reg = byte_table[7][low & 0xFFu] ^ byte_table[6][(low >> 8) & 0xFFu] ^
              byte_table[5][(low >> 16) & 0xFFu] ^ byte_table[4][low >> 24] ^ byte_table[3][p[4]] ^
              byte_table[2][p[5]] ^ byte_table[1][p[6]] ^ byte_table[0][p[7]];
    }
    for (; nbytes; nbytes--, p++)
        reg = (reg >> 8) ^ byte_table[0][(reg ^ *p) & 0xFFu];
    return reg;
}

#ifdef CRC_TARGET
CRC_TARGET static inline uint32_t step8(uint32_t reg, uint64_t value) {
#if defined(__x86_64__)
    return (uint32_t)_mm_crc32_u64(reg, value);
#else
    return __crc32cd(reg, value);
#endif
}

CRC_TARGET static inline uint32_t three_lanes(uint32_t reg, const uint8_t *p, size_t lane,
                                              const shift_table *table) {
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < lane; i += 8) {
        reg = step8(reg, load64(p + i));
        second = step8(second, load64(p + lane + i));
        third = step8(third, load64(p + 2 * lane + i));
    }
    return shift(table, shift(table, reg) ^ second) ^ third;
}

CRC_TARGET static uint32_t update_instruction(uint32_t reg, const uint8_t *p, size_t nbytes) {
    for (; nbytes >= 3 * LONG_LANE; nbytes -= 3 * LONG_LANE, p += 3 * LONG_LANE)
        reg = three_lanes(reg, p, LONG_LANE, &long_shift);
    for (; nbytes >= 3 * SHORT_LANE; nbytes -= 3 * SHORT_LANE, p += 3 * SHORT_LANE)
        reg = three_lanes(reg, p, SHORT_LANE, &short_shift);
    for (; nbytes >= 8; nbytes -= 8, p += 8)
        reg = step8(reg, load64(p));
    return update_tables(reg, p, nbytes);
}
#else
#define CRC_NAME "tables"
static uint32_t update_instruction(uint32_t reg, const uint8_t *p, size_t nbytes) {
    return update_tables(reg, p, nbytes);
}
#endif

static uint32_t advance(uint32_t reg, const uint8_t *p, size_t nbytes) {
    if (way() == AIO_CRC32C_TABLES)
        return update_tables(reg, p, nbytes);
    return update_instruction(reg, p, nbytes);
}

/* What can be folded of a range is, `to` being where it is copied to or NULL; gives how much. */
static size_t fold_most(uint32_t *reg, uint8_t *to, const uint8_t *from, size_t nbytes) {
    if (nbytes < FOLD_FROM || way() != AIO_CRC32C_FOLDING)
        return 0;
    uint8_t rest[AIO_FOLD_BYTES];
    size_t most = nbytes - nbytes % AIO_FOLD_BYTES;
    aio_fold(*reg, to, from, most, rest);
    *reg = advance(0, rest, sizeof rest);
    return most;
}

uint32_t aio_crc32c(uint32_t crc, const uint8_t *data, uint64_t nbytes) {
    uint32_t reg = ~crc;
    size_t done = fold_most(&reg, NULL, data, (size_t)nbytes);
    return ~advance(reg, data + done, (size_t)nbytes - done);
}

void aio_crc32c_blocks(const uint8_t *data, uint64_t nbytes, uint64_t block_bytes, uint32_t *crc) {
    for (uint64_t done = 0; done < nbytes; done += block_bytes) {
        uint64_t part = nbytes - done < block_bytes ? nbytes - done : block_bytes;
        *crc++ = aio_crc32c(0, data + done, part);
    }
}

static uint32_t copy_and_sum(uint32_t crc, uint8_t *to, const uint8_t *from, size_t nbytes) {
    uint32_t reg = ~crc;
    size_t done = fold_most(&reg, to, from, nbytes);
    while (done < nbytes) {
        size_t part = nbytes - done < COPY_BLOCK ? nbytes - done : COPY_BLOCK;
        memcpy(to + done, from + done, part);
        reg = advance(reg, to + done, part);
        done += part;
    }
    return ~reg;
}

/* What was stored past the caches is seen by others only after a fence. */
static void finish_copies(void) {
    if (way() == AIO_CRC32C_FOLDING)
        aio_fold_fence();
}

static void copy(uint8_t *to, const uint8_t *from, size_t nbytes) {
    if (nbytes >= STREAM_FROM && (uintptr_t)to % 64 == 0 && way() == AIO_CRC32C_FOLDING)
        aio_stream(to, from, nbytes);
    else
        memcpy(to, from, nbytes);
}

static void copy_range(uint8_t *to, const uint8_t *from, size_t nbytes, uint32_t *crc) {
    if (!from)
        memset(to, 0, nbytes);
    else if (!crc) {
        if (to)
            copy(to, from, nbytes);
    } else if (!to)
        *crc = aio_crc32c(*crc, from, nbytes);
    else
        *crc = copy_and_sum(*crc, to, from, nbytes);
}

static const uint8_t *source_at(uint64_t address) { return (const uint8_t *)(uintptr_t)address; }

static uint8_t *target_at(uint64_t address) { return (uint8_t *)(uintptr_t)address; }

void aio_copy_crc32c(uint64_t count, const uint64_t *src, const uint64_t *dst,
                     const uint64_t *nbytes, uint32_t *crc) {
    for (uint64_t i = 0; i < count; i++)
        copy_range(target_at(dst[i]), source_at(src[i]), nbytes[i], crc ? crc + i : NULL);
    finish_copies();
}

void aio_copy_crc32c_units(uint64_t count, const uint64_t *ranges, uint32_t *crc) {
    for (uint64_t i = 0; i < count; i++, ranges++) {
        uint64_t from = ranges[0], to = ranges[count], left = ranges[2 * count];
        uint64_t unit = ranges[4 * count], room = unit - ranges[3 * count];
        uint32_t before = (uint32_t)ranges[5 * count];
        for (; left; before = 0, room = unit) {
            uint64_t part = left < room ? left : room;
            *crc = before;
            copy_range(target_at(to), source_at(from), part, crc++);
            from += from ? part : 0;
            to += to ? part : 0;
            left -= part;
        }
    }
    finish_copies();
}

uint32_t aio_crc32c_join(const uint32_t *crc, uint64_t count, uint64_t unit_bytes,
                         uint64_t last_bytes) {
    shift_table table;
    uint32_t joined = crc[0];
    pthread_once(&tables_once, make_tables);
    if (count > 2)
        make_shift_table(&table, unit_bytes);
    for (uint64_t i = 1; i + 1 < count; i++)
        joined = shift(&table, joined) ^ crc[i];
    return count > 1 ? multiply(power_of(last_bytes), joined) ^ crc[count - 1] : joined;
}

const char *aio_crc32c_isa(void) {
    static const char *const names[] = {"tables", CRC_NAME, "vpclmulqdq"};
    return names[way()];
}

void aio_crc32c_at_most(enum aio_crc32c_way highest) {
    atomic_store_explicit(&highest_way, (int)highest, memory_order_relaxed);
}
