/* io_uring, by its three system calls. Direct descriptors only: what it does with buffered writes
 * differs from one file system and kernel to the next, and the pread pool does it well enough.
 *
 * Buffers and files are not registered. With the huge pages of a slab the kernel pins one page for
 * two blocks of 1 MiB, so there is next to nothing to save (measured: 0.01 s of processor time a
 * GiB, against 0.07 s with small pages), and a registered buffer that is unmapped and mapped again
 * would silently go on using its old pages.
 *
 * Needs Linux 5.6, for reads and writes without an iovec. The rings are shared with the kernel:
 * whoever writes an index publishes it with a release store, and the other side acquires it.
 */
#include "backend.h"

#if __has_include(<linux/io_uring.h>)

#include <errno.h>
#include <linux/io_uring.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "util.h"

/* Of newer headers than this build may have. */
#ifndef IORING_SETUP_SUBMIT_ALL
#define IORING_SETUP_SUBMIT_ALL (1U << 7)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

/* What to ask for, best first. The lane's thread alone uses the ring, so completions can be put
 * off until it asks for them, and it is not interrupted in between. */
static const uint32_t wishes[] = {
    IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, /* 6.1 */
    IORING_SETUP_SUBMIT_ALL,                                                           /* 5.18 */
    0,
};

struct ring {
    int fd;
    int wake_fd;
    struct block_queue prepared; /* not yet taken by the kernel */
    struct block_queue refused;  /* by io_uring_enter, with a result */
    uint32_t in_flight;          /* taken and not reaped */

    void *memory; /* both rings */
    size_t memory_bytes;
    struct io_uring_sqe *sqes;
    size_t sqes_bytes;
    uint32_t *sq_head, *sq_tail, *sq_array, sq_mask;
    uint32_t *cq_head, *cq_tail, cq_mask;
    struct io_uring_cqe *cqes;
};

static int ring_enter(const struct ring *ring, uint32_t to_submit, uint32_t flags) {
    const long count = syscall(SYS_io_uring_enter, ring->fd, to_submit, 0u, flags, NULL, (size_t)0);
    return count < 0 ? -errno : (int)count;
}

static int ring_register(const struct ring *ring, uint32_t what, const void *argument,
                         uint32_t count) {
    return syscall(SYS_io_uring_register, ring->fd, what, argument, count) < 0 ? -errno : 0;
}

static int ring_open(struct ring *ring, uint32_t depth, struct io_uring_params *params) {
    for (size_t i = 0; i < sizeof wishes / sizeof *wishes; i++) {
        memset(params, 0, sizeof *params);
        params->flags = wishes[i];
        const long fd = syscall(SYS_io_uring_setup, depth, params);
        if (fd >= 0) {
            ring->fd = (int)fd;
            return 0;
        }
        if (errno != EINVAL)
            return -errno;
    }
    return -EINVAL;
}

static void *ring_mmap(const struct ring *ring, size_t nbytes, off_t what) {
    void *mapped =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, what);
    return mapped == MAP_FAILED ? NULL : mapped;
}

static int ring_map(struct ring *ring, const struct io_uring_params *params) {
    /* One mapping for both rings (5.4), and no completion is ever dropped (5.5). */
    const uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
    if ((params->features & needed) != needed)
        return -ENOSYS;
    const size_t sq_bytes = params->sq_off.array + params->sq_entries * sizeof(uint32_t);
    const size_t cq_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    ring->memory_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->memory = ring_mmap(ring, ring->memory_bytes, IORING_OFF_SQ_RING);
    ring->sqes_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    ring->sqes = ring_mmap(ring, ring->sqes_bytes, IORING_OFF_SQES);
    if (!ring->memory || !ring->sqes)
        return -ENOMEM;
    uint8_t *base = ring->memory;
    ring->sq_head = (uint32_t *)(void *)(base + params->sq_off.head);
    ring->sq_tail = (uint32_t *)(void *)(base + params->sq_off.tail);
    ring->sq_array = (uint32_t *)(void *)(base + params->sq_off.array);
    ring->sq_mask = *(uint32_t *)(void *)(base + params->sq_off.ring_mask);
    ring->cq_head = (uint32_t *)(void *)(base + params->cq_off.head);
    ring->cq_tail = (uint32_t *)(void *)(base + params->cq_off.tail);
    ring->cq_mask = *(uint32_t *)(void *)(base + params->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(void *)(base + params->cq_off.cqes);
    return 0;
}

static void uring_destroy(void *context) {
    struct ring *ring = context;
    if (ring->memory)
        munmap(ring->memory, ring->memory_bytes);
    if (ring->sqes)
        munmap(ring->sqes, ring->sqes_bytes);
    if (ring->fd >= 0)
        close(ring->fd);
    free(ring);
}

/* Whether this kernel has the two operations. */
static int ring_probe(const struct ring *ring) {
    const uint32_t count = IORING_OP_WRITE + 1;
    struct io_uring_probe *probe =
        calloc(1, sizeof *probe + count * sizeof(struct io_uring_probe_op));
    if (!probe)
        return -ENOMEM;
    int error = ring_register(ring, IORING_REGISTER_PROBE, probe, count);
    if (!error && !(probe->ops[IORING_OP_READ].flags & probe->ops[IORING_OP_WRITE].flags &
                    IO_URING_OP_SUPPORTED))
        error = -ENOSYS;
    free(probe);
    return error == -EINVAL ? -ENOSYS : error; /* older than the question itself */
}

static int uring_setup(const struct backend_config *config, void **context) {
    struct io_uring_params params;
    struct ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return -ENOMEM;
    ring->fd = -1;
    ring->wake_fd = config->wake_fd;
    block_queue_init(&ring->prepared);
    block_queue_init(&ring->refused);
    int error = ring_open(ring, config->depth, &params);
    if (!error)
        error = ring_map(ring, &params);
    if (!error)
        error = ring_probe(ring);
    if (!error)
        error = ring_register(ring, IORING_REGISTER_EVENTFD, &config->wake_fd, 1);
    if (error) {
        uring_destroy(ring);
        return error;
    }
    *context = ring;
    return 0;
}

static void uring_prep(void *context, struct block *block) {
    struct ring *ring = context;
    block_queue_push(&ring->prepared, block);
}

static void ring_describe(struct io_uring_sqe *entry, const struct block *block) {
    memset(entry, 0, sizeof *entry);
    entry->opcode = block->write ? IORING_OP_WRITE : IORING_OP_READ;
    entry->fd = block->fd;
    entry->off = block->offset;
    entry->addr = (uint64_t)(uintptr_t)block->data;
    entry->len = (uint32_t)block->nbytes;
    entry->user_data = (uint64_t)(uintptr_t)block;
}

/* Offers all prepared blocks to the kernel. How many it took, or -errno. */
static int ring_offer(struct ring *ring) {
    /* What it did not take last time is still behind its head: it is written again. The kernel
     * reads the submission ring only within io_uring_enter. */
    uint32_t tail = __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE);
    for (struct block *block = ring->prepared.head; block; block = block->next) {
        const uint32_t slot = tail++ & ring->sq_mask;
        ring_describe(&ring->sqes[slot], block);
        ring->sq_array[slot] = slot;
    }
    __atomic_store_n(ring->sq_tail, tail, __ATOMIC_RELEASE);
    return ring_enter(ring, ring->prepared.count, 0);
}

static uint32_t uring_submit(void *context) {
    struct ring *ring = context;
    while (ring->prepared.count) {
        const int taken = ring_offer(ring);
        for (int i = 0; i < taken; i++) {
            block_queue_pop(&ring->prepared);
            ring->in_flight++;
        }
        if (taken > 0)
            continue;
        if (ring->in_flight)
            break; /* short of memory or of room, which the next completion makes */
        struct block *block = block_queue_pop(&ring->prepared);
        block->result = taken && taken != -EBUSY ? taken : -EAGAIN; /* EBUSY: no room either */
        block_queue_push(&ring->refused, block);
    }
    return ring->prepared.count;
}

static uint32_t uring_reap(void *context, struct block **done, uint32_t max) {
    struct ring *ring = context;
    uint32_t count = 0;
    while (count < max && ring->refused.count)
        done[count++] = block_queue_pop(&ring->refused);
    if (!ring->in_flight)
        return count;
    const uint32_t num_refused = count;
    uint32_t head = *ring->cq_head; /* written by this thread alone */
    uint32_t tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    if (head == tail) {
        /* Lets the kernel post what has ended. The eventfd has been read already, so that a call
         * that failed must see to its own repetition. */
        if (ring_enter(ring, 0, IORING_ENTER_GETEVENTS) < 0) {
            aio_pause();
            aio_wake(ring->wake_fd);
        }
        tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    }
    for (; count < max && head != tail; head++) {
        const struct io_uring_cqe *event = &ring->cqes[head & ring->cq_mask];
        struct block *block = (struct block *)(uintptr_t)event->user_data;
        block->result = event->res;
        done[count++] = block;
    }
    __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
    ring->in_flight -= count - num_refused;
    return count;
}

const struct backend_ops aio_uring_backend = {
    .name = "io_uring",
    .takes_buffered = false,
    .poll_milliseconds = 0,
    .setup = uring_setup,
    .prep = uring_prep,
    .submit = uring_submit,
    .reap = uring_reap,
    .destroy = uring_destroy,
};

#else

const struct backend_ops aio_uring_backend = {.name = "io_uring"}; /* no headers: no setup */

#endif
