/* A lane: a queue of requests, and a thread that makes transfers of them. */
#ifndef AIO_LANE_H
#define AIO_LANE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "api.h"
#include "backend.h"
#include "completions.h"

/* Blocks in flight whose address the device cannot take. Enough to keep a device busy; more would
 * only take memory from whoever plans with it. */
#define NUM_BOUNCES 8u

struct lane {
    const aio_config *config;
    struct completions *completions; /* of the engine */
    uint32_t index;
    pthread_t thread;
    int wake_fd; /* eventfd: new requests, completions, stop */

    pthread_mutex_t lock; /* guards queue and stopping */
    pthread_cond_t room;  /* pending_bytes has fallen */
    struct job_queue queue;
    bool stopping;
    /* Of requests accepted and not finished. Written under the lock, read without it to compare
     * lanes. */
    _Atomic uint64_t pending_bytes;

    /* The rest is the lane thread's own. */
    struct job_queue jobs; /* taken from the queue, blocks left to prepare */
    uint64_t num_jobs;     /* taken and not finished */
    struct block *blocks;  /* queue_depth of them */
    struct block *free_blocks;
    struct block_queue retries;    /* to be prepared again */
    uint32_t num_blocks;           /* in use */
    bool stalled;                  /* the kernel is short of something: pause before the next try */
    uint8_t *bounce_memory;        /* of all bounce buffers; NULL until one is needed */
    uint8_t *bounces[NUM_BOUNCES]; /* the free ones */
    uint32_t num_bounces;
    const struct backend_ops *ops, *side_ops; /* side: for buffered blocks; NULL when ops does */
    void *backend, *side;
};

/* Entry of the lane's thread. */
void *aio_lane_main(void *lane);
/* Takes one request, waiting for room. 0; -ECANCELED: the lane is stopping; another -errno: it
 * cannot be woken. */
int aio_lane_submit(struct lane *lane, struct job *job);
void aio_lane_stop(struct lane *lane);

#endif
