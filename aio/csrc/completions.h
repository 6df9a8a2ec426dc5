/* Requests on their way, and where all lanes of an engine put those that they have finished. */
#ifndef AIO_COMPLETIONS_H
#define AIO_COMPLETIONS_H

#include <pthread.h>
#include <stdint.h>

#include "api.h"
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

void aio_jobs_free(struct job_queue *jobs);

struct completions {
    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t ready; /* finished has grown, or a number has changed */
    struct job_queue finished;
    uint32_t num_running; /* lanes whose thread goes on, or is about to be started */
    uint32_t num_settled; /* lanes whose backend was set up, or could not be */
    int setup_error;
};

void aio_completions_init(struct completions *completions);
void aio_completions_destroy(struct completions *completions);
/* Waits until `num_lanes` have settled; the first error of them, or 0. */
int aio_completions_wait_settled(struct completions *completions, uint32_t num_lanes);
/* Waits for finished requests and takes up to `max` of them. 0: no lane runs any more. */
uint64_t aio_completions_reap(struct completions *completions, aio_completion *found, uint64_t max);

/* Of a lane: its thread is about to start; setup has ended with 0 or -errno; a job is done; the
 * thread ends, or could not be started. */
void aio_lane_starts(struct completions *completions);
void aio_lane_settled(struct completions *completions, int error);
void aio_lane_finished(struct completions *completions, struct job *job);
void aio_lane_ended(struct completions *completions);

#endif
