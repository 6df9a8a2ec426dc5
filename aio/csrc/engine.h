/* The engine: lanes, and the one queue on which all of them put what they have finished.
 *
 * Locks are never nested: a lane's lock guards its queue, the engine's its completions.
 */
#ifndef AIO_ENGINE_H
#define AIO_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "api.h"
#include "backend.h"
#include "blocks.h"

/* A request on its way: queued, begun, finished, each on a list of its own. */
struct job {
    aio_request request;
    struct layout layout;
    uint64_t position;  /* the next block starts here */
    uint64_t in_flight; /* blocks that the lane or a backend holds */
    uint64_t gap;       /* after an error: no block before this offset was left undone */
    aio_completion completion;
    struct job *next;
};

struct job_queue {
    struct job *head, **tail;
};

static inline void job_queue_init(struct job_queue *queue) {
    queue->head = 0;
    queue->tail = &queue->head;
}

static inline void job_queue_push(struct job_queue *queue, struct job *job) {
    job->next = 0;
    *queue->tail = job;
    queue->tail = &job->next;
}

static inline struct job *job_queue_pop(struct job_queue *queue) {
    struct job *job = queue->head;
    if (job) {
        queue->head = job->next;
        if (!queue->head)
            queue->tail = &queue->head;
    }
    return job;
}

/* Moves all of `from` to the end of `to`. */
static inline void job_queue_splice(struct job_queue *to, struct job_queue *from) {
    if (from->head) {
        *to->tail = from->head;
        to->tail = from->tail;
        job_queue_init(from);
    }
}

/* Blocks in flight whose address the device cannot take. Enough to keep a device busy; more would
 * only take memory from whoever plans with it. */
#define NUM_BOUNCES 8u

struct lane {
    aio_engine *engine;
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

struct aio_engine {
    aio_config config;
    pid_t pid; /* of the process that has the lanes */
    struct lane *lanes;
    uint32_t num_lanes; /* started */

    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t ready; /* finished has grown, or num_running has changed */
    struct job_queue finished;
    uint32_t num_running; /* lanes whose thread goes on */
    uint32_t num_settled; /* lanes whose backend was set up, or could not be */
    int setup_error;
};

/* Entry of the lane's thread. */
void *aio_lane_main(void *lane);
/* Takes one request, waiting for room. False: the lane is stopping. */
bool aio_lane_submit(struct lane *lane, struct job *job);
void aio_lane_stop(struct lane *lane);

/* For lanes: setup has ended with 0 or -errno; a job is done; the thread ends. */
void aio_engine_settled(aio_engine *engine, int error);
void aio_engine_finished(aio_engine *engine, struct job *job);
void aio_engine_lane_ended(aio_engine *engine);

#endif
