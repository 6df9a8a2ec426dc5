#include "arena.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

struct ckpt_arena {
    unsigned char *memory;
    size_t nbytes;
    atomic_size_t keepers; /* whoever holds the arena itself, and its ranges */
};

static void let_go(struct ckpt_arena *arena) {
    if (atomic_fetch_sub(&arena->keepers, 1) == 1) {
        munmap(arena->memory, arena->nbytes);
        free(arena);
    }
}

int ckpt_arena_new(struct ckpt_arena **arena, size_t nbytes) {
    struct ckpt_arena *made = malloc(sizeof *made);
    if (made == NULL)
        return -ENOMEM;
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        int error = errno;
        free(made);
        return -error;
    }
    made->memory = memory;
    made->nbytes = nbytes;
    atomic_init(&made->keepers, 1);
    *arena = made;
    return 0;
}

void ckpt_arena_drop(struct ckpt_arena **arena) {
    if (*arena != NULL)
        let_go(*arena);
    *arena = NULL;
}

void ckpt_range_take(struct ckpt_range *range, struct ckpt_arena *arena, size_t first,
                     size_t nbytes) {
    atomic_fetch_add(&arena->keepers, 1);
    range->arena = arena;
    range->data = arena->memory + first;
    range->nbytes = nbytes;
}

void ckpt_range_drop(struct ckpt_range *range) {
    if (range->arena == NULL)
        return;
    /* The mapping stays as long as another range is used, and would keep these pages. */
    madvise(range->data, range->nbytes, MADV_DONTNEED);
    let_go(range->arena);
    range->arena = NULL;
}
