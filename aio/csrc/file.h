/* One open file: a direct and a buffered descriptor, and their alignments. */
#ifndef AIO_FILE_H
#define AIO_FILE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "api.h"
#include "inode.h"

struct aio_file {
    int direct_fd; /* -1: none */
    int buffered_fd;
    uint32_t memory_alignment;
    /* Direct transfers start and end at multiples of this: the larger of the page size and the
     * offset alignment, so that no page is ever written through both descriptors at once. */
    uint32_t unit;
    atomic_bool direct_refused;
    struct inode *inode; /* what others have open of the file is as long as this */
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
