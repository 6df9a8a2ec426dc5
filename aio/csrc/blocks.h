/* How a request is cut into blocks. Pure arithmetic, no I/O.
 *
 * A request covers the bytes [begin, end) of its file. Whole units go through the direct
 * descriptor, in blocks; what is left before and after goes through the buffered one. With a unit
 * of 4096 and blocks of 1 MiB, the bytes [5000, 2110000) become
 *
 *     [   5000,    8192)  buffered, the head
 *     [   8192, 1056768)  direct, 1 MiB
 *     [1056768, 2105344)  direct, 1 MiB
 *     [2105344, 2109440)  direct, one page
 *     [2109440, 2110000)  buffered, the tail
 *
 * Invariant: the unit is at least a page. A page that a request covers in part is written through
 * the page cache only, and a page written directly is covered by one request alone. So two
 * requests that share no byte never meet in one page through two descriptors, where the write-back
 * of a stale page could undo a direct write.
 *
 * The kernel's page cache may hold many pages as one folio, and gives up its coherence when a folio
 * with a dirty page cannot be dropped for a direct write to another one: the next fsync then fails.
 * Our own buffered edges are smaller than a page and read without read-ahead, so they make no such
 * folios; another process that reads the file meanwhile does.
 */
#ifndef AIO_BLOCKS_H
#define AIO_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

struct layout {
    uint64_t begin, direct_begin, direct_end, end; /* in this order; file offsets */
    uint64_t block_bytes;
};

struct span {
    uint64_t offset, nbytes;
    bool direct;
};

/* `unit` 0: there is no direct descriptor. */
struct layout layout_of(uint64_t offset, uint64_t nbytes, uint64_t unit, uint64_t block_bytes);

/* The block that starts at `position`, begin <= position < end. */
struct span span_at(const struct layout *layout, uint64_t position);

#endif
