/* Mappings that many ranges share, and ranges that give their pages back when they are dropped.
 *
 * They are dropped wherever the last user of a tensor lets go of it, in C, where no signal handler
 * of Python's runs: what one raises inside a finalizer would be swallowed.
 */
#ifndef CHECKPOINT_ARENA_H
#define CHECKPOINT_ARENA_H

#include <stddef.h>

struct ckpt_arena;

/* Part of an arena, which it keeps: nbytes at data, both multiples of the page size. */
struct ckpt_range {
    struct ckpt_arena *arena;
    void *data;
    size_t nbytes;
};

/* Maps nbytes of zeros, which *arena then owns. 0, or -errno. */
int ckpt_arena_new(struct ckpt_arena **arena, size_t nbytes);

/* Lets go of *arena, if it is not NULL; ranges of it stay. */
void ckpt_arena_drop(struct ckpt_arena **arena);

/* Makes *range the nbytes of an arena from its byte `first` on. */
void ckpt_range_take(struct ckpt_range *range, struct ckpt_arena *arena, size_t first,
                     size_t nbytes);

/* Gives the pages back. The arena is unmapped when nothing keeps it any more. */
void ckpt_range_drop(struct ckpt_range *range);

#endif
