/* Arenas and checksums without Python, for the sanitizers: several threads take, fill and drop
 * ranges of arenas that others drop, and sum and copy what is in them.
 *
 * harness ROUNDS: exits with 0 when all is well, else tells on stderr what is not.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "crc32c.h"

#define NUM_THREADS 4
#define RANGES_EACH 3
#define PAGE 4096u
#define PAGES_EACH 5u
#define RANGE_BYTES (PAGES_EACH * PAGE)

static struct ckpt_range ranges[NUM_THREADS][RANGES_EACH];
static int round_number;

static void check(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

/* Bit by bit, which leaves nothing to be wrong about. */
static uint32_t plain_crc(const unsigned char *data, size_t nbytes) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < nbytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0x82f63b78u & -(crc & 1));
    }
    return ~crc;
}

static void use(struct ckpt_range *range, unsigned char fill) {
    unsigned char *data = range->data, copy[RANGE_BYTES];
    for (size_t i = 0; i < range->nbytes; i++) {
        check(!data[i], "memory of an arena is not zero");
        data[i] = (unsigned char)(fill + i * 31u);
    }
    /* An odd beginning and an odd length, so that both ends are partial. */
    const size_t nbytes = range->nbytes - 7;
    const uint32_t expected = plain_crc(data + 3, nbytes);
    check(ckpt_crc32c(0, data + 3, nbytes) == expected, "the checksum differs");
    const uint64_t from = (uint64_t)(uintptr_t)(data + 3), to = (uint64_t)(uintptr_t)copy;
    const uint64_t length = nbytes;
    uint32_t crc = 0;
    ckpt_copy_crc32c(1, &from, &to, &length, &crc);
    check(crc == expected, "the checksum of a copy differs");
    check(!memcmp(copy, data + 3, nbytes), "a copy differs");
}

static void *run(void *number) {
    const uintptr_t thread = (uintptr_t)number;
    for (int i = 0; i < RANGES_EACH; i++) {
        use(&ranges[thread][i], (unsigned char)(thread * 16 + (uintptr_t)(i + round_number)));
        ckpt_range_drop(&ranges[thread][i]);
        ckpt_range_drop(&ranges[thread][i]); /* once is enough, twice is nothing */
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[NUM_THREADS];
    struct ckpt_arena *arena;
    check(argc == 2, "harness ROUNDS");
    for (round_number = 0; round_number < atoi(argv[1]); round_number++) {
        ckpt_crc32c_at_most((enum ckpt_crc32c_way)(round_number % 3));
        check(!ckpt_arena_new(&arena, NUM_THREADS * RANGES_EACH * RANGE_BYTES), "no arena");
        size_t first = 0;
        for (int i = 0; i < NUM_THREADS; i++)
            for (int j = 0; j < RANGES_EACH; j++, first += RANGE_BYTES)
                ckpt_range_take(&ranges[i][j], arena, first, RANGE_BYTES);
        for (uintptr_t i = 0; i < NUM_THREADS; i++)
            check(!pthread_create(&threads[i], NULL, run, (void *)i), "no thread");
        ckpt_arena_drop(&arena); /* before, between or after its ranges */
        for (int i = 0; i < NUM_THREADS; i++)
            pthread_join(threads[i], NULL);
    }
    return 0;
}
