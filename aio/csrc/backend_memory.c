/* For tests: transfers between memory and the page cache, made in the lane's thread, with seeded
 * faults and in a seeded order. The same seed and the same requests give the same faults.
 */
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend.h"
#include "util.h"

struct store {
    const aio_faults *faults;
    uint64_t random;
    struct block_queue prepared;
    uint32_t count;
    struct block *done[]; /* count of them, in no order */
};

/* splitmix64: uniform in [0, 1). */
static double draw(struct store *store) {
    uint64_t z = (store->random += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static bool happens(struct store *store, double probability) {
    return probability > 0 && draw(store) < probability;
}

static int memory_setup(const struct backend_config *config, void **context) {
    struct store *store = calloc(1, sizeof *store + config->depth * sizeof(struct block *));
    if (!store)
        return -ENOMEM;
    store->faults = config->faults;
    store->random = config->faults->seed + config->lane; /* lanes do not share a sequence */
    block_queue_init(&store->prepared);
    *context = store;
    return 0;
}

static void memory_prep(void *context, struct block *block) {
    struct store *store = context;
    block_queue_push(&store->prepared, block);
}

static int64_t transfer(const struct block *block, uint64_t nbytes) {
    const off_t offset = (off_t)block->offset;
    const ssize_t moved = block->write ? pwrite(block->fd, block->data, nbytes, offset)
                                       : pread(block->fd, block->data, nbytes, offset);
    return moved < 0 ? -errno : moved;
}

static int64_t transfer_with_faults(struct store *store, const struct block *block) {
    const aio_faults *faults = store->faults;
    uint64_t nbytes = block->nbytes;
    if (faults->refuse_direct && block->direct)
        return -EINVAL;
    if (happens(store, faults->again))
        return -EAGAIN;
    if (happens(store, faults->interrupted))
        return -EINTR;
    if (happens(store, faults->error))
        return -faults->error_number;
    if (nbytes > 1 && happens(store, faults->short_transfer)) {
        nbytes = 1 + (uint64_t)(draw(store) * (double)(nbytes - 1));
        if (block->direct) /* a device moves whole sectors */
            nbytes = aio_max(aio_round_down(nbytes, 512), 512);
    }
    return transfer(block, nbytes);
}

static uint32_t memory_submit(void *context) {
    struct store *store = context;
    while (store->prepared.count && !happens(store, store->faults->short_submit)) {
        struct block *block = block_queue_pop(&store->prepared);
        block->result = transfer_with_faults(store, block);
        store->done[store->count++] = block;
    }
    return store->prepared.count;
}

static bool gate_is_shut(const struct store *store) {
    struct pollfd gate = {.fd = store->faults->gate_fd, .events = POLLIN};
    return gate.fd >= 0 && poll(&gate, 1, 0) <= 0;
}

static uint32_t memory_reap(void *context, struct block **done, uint32_t max) {
    struct store *store = context;
    uint32_t count = 0;
    if (gate_is_shut(store))
        return 0;
    while (count < max && store->count) {
        const uint32_t pick = (uint32_t)(draw(store) * store->count);
        done[count++] = store->done[pick];
        store->done[pick] = store->done[--store->count];
    }
    return count;
}

static void memory_destroy(void *context) { free(context); }

const struct backend_ops aio_memory_backend = {
    .name = "memory",
    .takes_buffered = true,
    .poll_milliseconds = 1, /* a gate that opens does not signal the lane */
    .setup = memory_setup,
    .prep = memory_prep,
    .submit = memory_submit,
    .reap = memory_reap,
    .destroy = memory_destroy,
};
