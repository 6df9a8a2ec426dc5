/* Arenas without Python, for the sanitizers: several threads fill and drop ranges of arenas that
 * others drop.
 *
 * harness ROUNDS: exits with 0 when all is well, else tells on stderr what is not.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "arena.h"

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

static void use(struct ckpt_range *range, unsigned char fill) {
    unsigned char *data = range->data;
    for (size_t i = 0; i < range->nbytes; i++) {
        check(!data[i], "memory of an arena is not zero");
        data[i] = (unsigned char)(fill + i * 31u);
    }
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
