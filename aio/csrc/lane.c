/* A lane: takes whole requests, keeps up to queue_depth of their blocks in flight, sees each block
 * through short transfers and interruptions, and reports each request once, when nothing of it is
 * in flight any more.
 */
#include "lane.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "util.h"

/* With a pause of a millisecond each, ten seconds without a byte are no passing shortage. */
#define MAX_STALLS 10000u
#define STALL_MILLISECONDS 1
/* Whoever cannot wake the lane, a thread with a result or one that stops the engine, has nobody to
 * tell: the lane looks by itself so often. */
#define MAX_SLEEP_MILLISECONDS 1000
/* A lane takes no signals: whatever interrupts its calls, a second of it is for good. The first few
 * need no pause. */
#define MAX_INTERRUPTIONS 1000u
#define PROMPT_INTERRUPTIONS 8u
#define REAP_BATCH 64u
#define SIDE_THREADS 16u
#define POSIX_THREADS 64u

/* ---- called by any thread ---- */

int aio_lane_submit(struct lane *lane, struct job *job) {
    const uint64_t limit = lane->config->max_pending_bytes;
    const uint64_t nbytes = job->request.nbytes;
    pthread_mutex_lock(&lane->lock);
    for (;;) {
        const uint64_t pending = atomic_load(&lane->pending_bytes);
        /* A request above the limit is let in alone, else it would wait for ever. */
        if (lane->stopping || !pending || (pending <= limit && nbytes <= limit - pending))
            break;
        pthread_cond_wait(&lane->room, &lane->lock);
    }
    int error = lane->stopping ? -ECANCELED : 0;
    if (!error && !lane->queue.head) /* else the lane is on its way already */
        error = aio_wake(lane->wake_fd);
    if (!error) {
        atomic_fetch_add(&lane->pending_bytes, nbytes);
        job_queue_push(&lane->queue, job);
    }
    pthread_mutex_unlock(&lane->lock);
    return error;
}

void aio_lane_stop(struct lane *lane) {
    pthread_mutex_lock(&lane->lock);
    lane->stopping = true;
    pthread_cond_broadcast(&lane->room);
    aio_wake(lane->wake_fd);
    pthread_mutex_unlock(&lane->lock);
}

/* ---- the lane's thread: blocks ---- */

static bool is_aligned(const void *address, uint64_t alignment) {
    return (uintptr_t)address % alignment == 0;
}

static void bounce_give_back(struct lane *lane, struct block *block) {
    if (block->bounce)
        lane->bounces[lane->num_bounces++] = block->bounce;
    block->bounce = NULL;
}

/* Maps the bounce buffers, all in one, so that they get huge pages. False: there is no memory. */
static bool bounces_map(struct lane *lane) {
    const uint64_t block_bytes = lane->config->block_bytes;
    if (!lane->bounce_memory) {
        if (aio_map(NUM_BOUNCES * block_bytes, 1, 0, &lane->bounce_memory))
            return false;
        for (uint32_t i = NUM_BOUNCES; i-- > 0;)
            lane->bounces[lane->num_bounces++] = lane->bounce_memory + i * block_bytes;
    }
    return true;
}

static void block_free(struct lane *lane, struct block *block) {
    bounce_give_back(lane, block);
    block->next = lane->free_blocks;
    lane->free_blocks = block;
    lane->num_blocks--;
}

static void block_make_buffered(struct lane *lane, struct block *block) {
    bounce_give_back(lane, block);
    block->direct = false;
    block->fd = block->job->request.file->buffered_fd;
    block->data = block->target;
}

static void block_prep(struct lane *lane, struct block *block) {
    if (block->direct || !lane->side_ops)
        lane->ops->prep(lane->backend, block);
    else
        lane->side_ops->prep(lane->side, block);
}

/* Prepares the next block of a job. False: it needs a bounce buffer and has to wait for one. */
static bool prep_next(struct lane *lane, struct job *job) {
    const aio_request *request = &job->request;
    const aio_file *file = request->file;
    const struct span span = span_at(&job->layout, job->position);
    uint8_t *target = request->data + (span.offset - request->offset);
    bool direct = span.direct && aio_file_is_direct(file);
    bool bounced = direct && !is_aligned(target, file->memory_alignment);
    if (bounced && !bounces_map(lane))
        direct = bounced = false;
    if (bounced && !lane->num_bounces)
        return false; /* all are in flight */
    struct block *block = lane->free_blocks;
    lane->free_blocks = block->next;
    lane->num_blocks++;
    memset(block, 0, sizeof *block);
    block->job = job;
    block->write = request->kind == AIO_WRITE;
    block->offset = span.offset;
    block->nbytes = span.nbytes;
    block->target = block->data = target;
    block->direct = direct;
    block->fd = direct ? file->direct_fd : file->buffered_fd;
    if (bounced) {
        block->data = block->bounce = lane->bounces[--lane->num_bounces];
        if (block->write)
            memcpy(block->data, target, span.nbytes);
    }
    job->position += span.nbytes;
    job->in_flight++;
    block_prep(lane, block);
    return true;
}

/* ---- the lane's thread: jobs ---- */

static void job_finish(struct lane *lane, struct job *job) {
    job->completion.finished = aio_now();
    job->completion.transferred = aio_min(job->gap, job->position) - job->layout.begin;
    job->completion.direct_refused = aio_file_direct_refused(job->request.file);
    lane->num_jobs--;
    pthread_mutex_lock(&lane->lock);
    atomic_fetch_sub(&lane->pending_bytes, job->request.nbytes);
    pthread_cond_broadcast(&lane->room);
    pthread_mutex_unlock(&lane->lock);
    aio_lane_finished(lane->completions, job);
}

static void job_fail(struct job *job, int error) {
    if (!job->completion.error) /* the first error is the one that tells what happened */
        job->completion.error = error;
}

/* Of what the kernel says. ENODATA is the end of a file here, and there a medium that cannot be
 * read, as direct I/O alone tells it. */
static int error_of_device(int64_t result) { return result == -ENODATA ? EIO : (int)-result; }

static bool job_is_issued(const struct job *job) {
    return job->completion.error || job->position == job->layout.end;
}

/* Lays a job out and makes room in the file. */
static void job_begin(struct lane *lane, struct job *job) {
    const aio_request *request = &job->request;
    const aio_file *file = request->file;
    job->completion.started = aio_now();
    job->layout = layout_of(request->offset, request->nbytes,
                            aio_file_is_direct(file) ? file->unit : 0, lane->config->block_bytes);
    job->position = job->layout.begin;
    job->gap = job->layout.end;
    if (request->kind == AIO_WRITE && request->nbytes) {
        const int error = aio_file_grow(request->file, request->offset, job->layout.end);
        if (error)
            job_fail(job, -error);
    }
}

/* Takes the head off the list of jobs to prepare once its last block is prepared. */
static void job_issued(struct lane *lane) {
    struct job *job = job_queue_pop(&lane->jobs);
    if (!job->in_flight)
        job_finish(lane, job);
}

/* ---- the lane's thread: results ---- */

static void block_retry(struct lane *lane, struct block *block) {
    block_queue_push(&lane->retries, block);
}

/* Again, for an error that may pass, as often as it may take. */
static void block_retry_after(struct lane *lane, struct block *block, int error) {
    if (++block->stalls >= (error == EINTR ? MAX_INTERRUPTIONS : MAX_STALLS)) {
        job_fail(block->job, error);
        return;
    }
    if (error != EINTR || block->stalls > PROMPT_INTERRUPTIONS)
        lane->stalled = true;
    block_retry(lane, block);
}

/* Accounts for `moved` bytes and says whether some are left. */
static bool block_advance(struct lane *lane, struct block *block, uint64_t moved) {
    const aio_file *file = block->job->request.file;
    if (block->bounce && !block->write)
        memcpy(block->target, block->data, moved);
    block->stalls = 0;
    block->offset += moved;
    block->nbytes -= moved;
    block->target += moved;
    block->data += moved;
    if (!block->nbytes) {
        if (block->refused)
            aio_file_refuse_direct(block->job->request.file);
        return false;
    }
    /* A transfer cut off between two units, as by the end of the file, goes on through the page
     * cache. No other block touches these pages. */
    if (block->direct &&
        (block->offset % file->unit || !is_aligned(block->data, file->memory_alignment)))
        block_make_buffered(lane, block);
    return true;
}

/* Looks at one result. True: the block has been put back to be tried again. */
static bool block_goes_on(struct lane *lane, struct block *block) {
    struct job *job = block->job;
    const int64_t result = block->result;
    if (result > 0 && !block_advance(lane, block, (uint64_t)result))
        return false;
    if (job->completion.error)
        return false; /* only what is in flight already is waited for */
    if (result == 0) {
        job_fail(job, block->write ? EIO : ENODATA); /* ENODATA: the end of the file */
    } else if (result == -EINVAL && block->direct) {
        /* The alignments are met. If the page cache takes the block, it was direct I/O that the
         * file will not have; else the error is of another kind, such as a limit on file sizes. */
        block->refused = true;
        block_make_buffered(lane, block);
        block_retry(lane, block);
    } else if (result > 0) {
        block_retry(lane, block);
    } else if (result == -EINTR || result == -EAGAIN) {
        block_retry_after(lane, block, (int)-result);
    } else {
        job_fail(job, error_of_device(result));
    }
    return !job->completion.error;
}

static void block_end(struct lane *lane, struct block *block) {
    struct job *job = block->job;
    if (block->nbytes)
        job->gap = aio_min(job->gap, block->offset);
    block_free(lane, block);
    /* A job that is still on the list of jobs to prepare is finished from there. */
    if (!--job->in_flight && job_is_issued(job) && job != lane->jobs.head)
        job_finish(lane, job);
}

/* ---- the lane's thread: the loop ---- */

static bool lane_take(struct lane *lane) {
    pthread_mutex_lock(&lane->lock);
    for (struct job *job = lane->queue.head; job; job = job->next)
        lane->num_jobs++;
    job_queue_splice(&lane->jobs, &lane->queue);
    const bool stopping = lane->stopping;
    pthread_mutex_unlock(&lane->lock);
    return stopping;
}

static void lane_fill(struct lane *lane) {
    struct block *block;
    while ((block = block_queue_pop(&lane->retries))) {
        if (block->job->completion.error)
            block_end(lane, block);
        else
            block_prep(lane, block);
    }
    while (lane->jobs.head) {
        struct job *job = lane->jobs.head;
        if (!job->completion.started)
            job_begin(lane, job);
        while (!job_is_issued(job))
            if (!lane->free_blocks || !prep_next(lane, job))
                return;
        job_issued(lane);
    }
}

static uint32_t reap_from(struct lane *lane, const struct backend_ops *ops, void *backend) {
    struct block *done[REAP_BATCH];
    const uint32_t count = ops->reap(backend, done, REAP_BATCH);
    for (uint32_t i = 0; i < count; i++)
        if (!block_goes_on(lane, done[i]))
            block_end(lane, done[i]);
    return count;
}

static void lane_wait(struct lane *lane, uint32_t left) {
    int milliseconds = MAX_SLEEP_MILLISECONDS;
    if (lane->num_blocks && lane->ops->poll_milliseconds)
        milliseconds = lane->ops->poll_milliseconds;
    if (left || lane->stalled)
        milliseconds = STALL_MILLISECONDS;
    lane->stalled = false;
    aio_sleep(lane->wake_fd, milliseconds);
}

static void lane_run(struct lane *lane) {
    for (;;) {
        const bool stopping = lane_take(lane);
        lane_fill(lane);
        if (stopping && !lane->num_jobs)
            return;
        uint32_t left = lane->ops->submit(lane->backend);
        if (lane->side_ops)
            left += lane->side_ops->submit(lane->side);
        uint32_t reaped = reap_from(lane, lane->ops, lane->backend);
        if (lane->side_ops)
            reaped += reap_from(lane, lane->side_ops, lane->side);
        if (!reaped || lane->stalled)
            lane_wait(lane, left);
    }
}

/* ---- the lane's thread: start and end ---- */

static int lane_setup(struct lane *lane) {
    const aio_config *config = lane->config;
    struct backend_config backend = {
        .depth = config->queue_depth,
        .wake_fd = lane->wake_fd,
        .threads = (uint32_t)aio_min(config->queue_depth, POSIX_THREADS),
        .lane = lane->index,
        .faults = &config->faults,
    };
    lane->blocks = calloc(config->queue_depth, sizeof *lane->blocks);
    if (!lane->blocks)
        return -ENOMEM;
    for (uint32_t i = 0; i < config->queue_depth; i++) {
        lane->blocks[i].next = lane->free_blocks;
        lane->free_blocks = &lane->blocks[i];
    }
    int error = lane->ops->setup(&backend, &lane->backend);
    if (!error && lane->side_ops) {
        backend.threads = (uint32_t)aio_min(config->queue_depth, SIDE_THREADS);
        error = lane->side_ops->setup(&backend, &lane->side);
    }
    return error;
}

static void lane_teardown(struct lane *lane) {
    if (lane->side)
        lane->side_ops->destroy(lane->side);
    if (lane->backend)
        lane->ops->destroy(lane->backend);
    if (lane->bounce_memory)
        aio_unmap(lane->bounce_memory, NUM_BOUNCES * lane->config->block_bytes);
    free(lane->blocks);
}

void *aio_lane_main(void *argument) {
    struct lane *lane = argument;
    const int error = lane_setup(lane);
    aio_lane_settled(lane->completions, error);
    if (!error)
        lane_run(lane);
    lane_teardown(lane);
    aio_lane_ended(lane->completions);
    return NULL;
}
