/* One open file: a direct and a buffered descriptor, their alignments, and how far it reaches. */
#ifndef AIO_FILE_H
#define AIO_FILE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "api.h"

struct aio_file {
    int direct_fd; /* -1: none */
    int buffered_fd;
    uint32_t memory_alignment;
    /* Direct transfers start and end at multiples of this: the larger of the page size and the
     * offset alignment, so that no page is ever written through both descriptors at once. */
    uint32_t unit;
    atomic_bool direct_refused;
    pthread_mutex_t lock; /* guards the two below */
    uint64_t size;        /* the file is known to reach at least this far */
    bool cannot_allocate;
};

/* Makes room for a write up to `end`, where the file does not reach it yet. 0 or -errno. */
int aio_file_grow(aio_file *file, uint64_t offset, uint64_t end);

/* From now on everything goes through the page cache. */
void aio_file_refuse_direct(aio_file *file);

static inline bool aio_file_is_direct(const aio_file *file) {
    return file->direct_fd >= 0 &&
           !atomic_load_explicit(&file->direct_refused, memory_order_relaxed);
}

#endif
