/* What a lane needs from a way of doing I/O. A new backend is one file with one `backend_ops`
 * and its name in backends.c.
 *
 * A backend belongs to one lane and is called from that lane's thread only. A block is the lane's
 * until `prep`, the backend's until `reap` gives it back. Errors of single transfers are results
 * of blocks, never of calls.
 */
#ifndef AIO_BACKEND_H
#define AIO_BACKEND_H

#include <linux/aio_abi.h>
#include <stdbool.h>
#include <stdint.h>

#include "api.h"

struct job;

/* One transfer, made once: it may come back short, and the lane sees to the rest. */
struct block {
    struct job *job;    /* the lane's */
    struct block *next; /* of whoever has the block */
    int fd;
    bool write;
    bool direct;     /* through the direct descriptor */
    bool refused;    /* the direct descriptor said EINVAL */
    uint64_t offset; /* in the file */
    uint64_t nbytes;
    uint8_t *data;    /* what is handed to the kernel: the caller's memory or the bounce buffer */
    uint8_t *target;  /* the caller's memory */
    uint8_t *bounce;  /* start of the bounce buffer, or NULL */
    uint32_t stalls;  /* results in a row that moved nothing */
    int64_t result;   /* bytes, or -errno */
    struct iocb iocb; /* the libaio backend's */
};

struct backend_config {
    uint32_t depth;   /* blocks between prep and reap, at most */
    int wake_fd;      /* eventfd to signal when there may be something to reap */
    uint32_t threads; /* for a backend that has some */
    uint32_t lane;
    const aio_faults *faults;
};

struct backend_ops {
    const char *name;
    bool takes_buffered; /* submitting a buffered block does not hold the lane up */
    /* How it reaches the kernel, a static string; NULL: there is no more to say. */
    const char *(*detail)(void);
    int poll_milliseconds; /* the lane looks again after this; 0: wake_fd is enough */
    int (*setup)(const struct backend_config *config, void **context); /* 0 or -errno */
    void (*prep)(void *context, struct block *block);
    /* Hands what was prepared to the kernel and returns how many blocks it would not take yet;
     * they stay with the backend for the next submit. */
    uint32_t (*submit)(void *context);
    /* Stores up to `max` finished blocks, waits for none. */
    uint32_t (*reap)(void *context, struct block **done, uint32_t max);
    void (*destroy)(void *context); /* with nothing in flight */
};

/* What lanes of other backends submit buffered blocks to. */
extern const struct backend_ops aio_posix_backend;

/* NULL where this build has no such backend. */
const struct backend_ops *aio_backend_find(int32_t backend);

/* A first-in-first-out queue of blocks. */
struct block_queue {
    struct block *head, **tail;
    uint32_t count;
};

static inline void block_queue_init(struct block_queue *queue) {
    queue->head = 0;
    queue->tail = &queue->head;
    queue->count = 0;
}

static inline void block_queue_push(struct block_queue *queue, struct block *block) {
    block->next = 0;
    *queue->tail = block;
    queue->tail = &block->next;
    queue->count++;
}

static inline struct block *block_queue_pop(struct block_queue *queue) {
    struct block *block = queue->head;
    if (block) {
        queue->head = block->next;
        if (!queue->head)
            queue->tail = &queue->head;
        queue->count--;
    }
    return block;
}

#endif
