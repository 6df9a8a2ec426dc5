#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "util.h"

const struct backend_ops *aio_backend_find(int32_t backend) {
    switch (backend) {
    case AIO_POSIX:
        return &aio_posix_backend;
    case AIO_LIBAIO:
        return &aio_libaio_backend;
    case AIO_IO_URING:
        return aio_uring_backend.setup ? &aio_uring_backend : NULL;
    case AIO_MEMORY:
        return &aio_memory_backend;
    default:
        return NULL;
    }
}

const char *aio_backend_detail(int32_t backend) {
    return backend == AIO_LIBAIO ? aio_libaio_detail() : "";
}

static int lane_start(aio_engine *engine, uint32_t index) {
    struct lane *lane = &engine->lanes[index];
    lane->engine = engine;
    lane->index = index;
    lane->ops = aio_backend_find(engine->config.backend);
    lane->side_ops = lane->ops->takes_buffered ? NULL : &aio_posix_backend;
    lane->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (lane->wake_fd < 0)
        return -errno;
    pthread_mutex_init(&lane->lock, NULL);
    pthread_cond_init(&lane->room, NULL);
    job_queue_init(&lane->queue);
    job_queue_init(&lane->jobs);
    block_queue_init(&lane->retries);
    const int error = aio_thread_start(&lane->thread, aio_lane_main, lane, "aio-lane");
    if (error) {
        pthread_cond_destroy(&lane->room);
        pthread_mutex_destroy(&lane->lock);
        close(lane->wake_fd);
    }
    return error == -EAGAIN ? -AIO_NO_THREAD : error;
}

/* Waits until every started lane has set its backend up. */
static int wait_settled(aio_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    while (engine->num_settled < engine->num_lanes)
        pthread_cond_wait(&engine->ready, &engine->lock);
    const int error = engine->setup_error;
    pthread_mutex_unlock(&engine->lock);
    return error;
}

void aio_engine_stop(aio_engine *engine) {
    for (uint32_t i = 0; i < engine->num_lanes; i++)
        aio_lane_stop(&engine->lanes[i]);
}

static void jobs_free(struct job_queue *jobs) {
    struct job *job;
    while ((job = job_queue_pop(jobs)))
        free(job);
}

static void engine_free(aio_engine *engine) {
    aio_engine_stop(engine);
    for (uint32_t i = 0; i < engine->num_lanes; i++) {
        struct lane *lane = &engine->lanes[i];
        pthread_join(lane->thread, NULL);
        pthread_cond_destroy(&lane->room);
        pthread_mutex_destroy(&lane->lock);
        close(lane->wake_fd);
    }
    jobs_free(&engine->finished);
    pthread_cond_destroy(&engine->ready);
    pthread_mutex_destroy(&engine->lock);
    free(engine->lanes);
    free(engine);
}

int aio_engine_create(const aio_config *config, aio_engine **result) {
    int error = 0;
    if (!aio_backend_find(config->backend))
        return -ENOSYS;
    aio_engine *engine = calloc(1, sizeof *engine);
    struct lane *lanes = calloc(config->lanes, sizeof *lanes);
    if (!engine || !lanes) {
        free(engine);
        free(lanes);
        return -ENOMEM;
    }
    engine->config = *config;
    engine->pid = getpid();
    engine->lanes = lanes;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->ready, NULL);
    job_queue_init(&engine->finished);
    while (!error && engine->num_lanes < config->lanes) {
        pthread_mutex_lock(&engine->lock);
        engine->num_running++;
        pthread_mutex_unlock(&engine->lock);
        error = lane_start(engine, engine->num_lanes);
        if (error)
            aio_engine_lane_ended(engine);
        else
            engine->num_lanes++;
    }
    const int setup_error = wait_settled(engine);
    error = error ? error : setup_error;
    if (error) {
        engine_free(engine);
        return error;
    }
    *result = engine;
    return 0;
}

static struct lane *least_loaded(aio_engine *engine) {
    struct lane *best = &engine->lanes[0];
    for (uint32_t i = 1; i < engine->num_lanes; i++) {
        struct lane *lane = &engine->lanes[i];
        if (atomic_load(&lane->pending_bytes) < atomic_load(&best->pending_bytes))
            best = lane;
    }
    return best;
}

/* All or none. */
static int jobs_make(const aio_request *requests, uint64_t count, struct job_queue *jobs) {
    job_queue_init(jobs);
    for (uint64_t i = 0; i < count; i++) {
        struct job *job = calloc(1, sizeof *job);
        if (!job) {
            jobs_free(jobs);
            return -ENOMEM;
        }
        job->request = requests[i];
        job->completion.token = requests[i].token;
        job_queue_push(jobs, job);
    }
    return 0;
}

int aio_engine_submit(aio_engine *engine, aio_request *requests, uint64_t count, int32_t index) {
    struct job_queue jobs;
    const int error = jobs_make(requests, count, &jobs);
    if (error)
        return error;
    for (uint64_t i = 0; i < count; i++) {
        struct lane *lane = index < 0 ? least_loaded(engine) : &engine->lanes[index];
        struct job *job = job_queue_pop(&jobs);
        if (!aio_lane_submit(lane, job)) {
            free(job);
            jobs_free(&jobs);
            return -ECANCELED;
        }
        requests[i].accepted = 1;
    }
    return 0;
}

uint64_t aio_engine_reap(aio_engine *engine, aio_completion *completions, uint64_t max) {
    uint64_t count = 0;
    struct job *done = NULL;
    pthread_mutex_lock(&engine->lock);
    while (!engine->finished.head && engine->num_running)
        pthread_cond_wait(&engine->ready, &engine->lock);
    while (count < max && engine->finished.head) {
        struct job *job = job_queue_pop(&engine->finished);
        completions[count++] = job->completion;
        job->next = done;
        done = job;
    }
    pthread_mutex_unlock(&engine->lock);
    while (done) {
        struct job *next = done->next;
        free(done);
        done = next;
    }
    return count;
}

static bool is_of_this_process(const aio_engine *engine) {
    return engine && engine->pid == getpid();
}

void aio_engine_leave(aio_engine **engine) {
    if (is_of_this_process(*engine))
        aio_engine_stop(*engine);
}

void aio_engine_drop(aio_engine **engine) {
    if (is_of_this_process(*engine))
        engine_free(*engine);
    *engine = NULL;
}

void aio_engine_settled(aio_engine *engine, int error) {
    pthread_mutex_lock(&engine->lock);
    engine->num_settled++;
    if (!engine->setup_error)
        engine->setup_error = error;
    pthread_cond_broadcast(&engine->ready);
    pthread_mutex_unlock(&engine->lock);
}

void aio_engine_finished(aio_engine *engine, struct job *job) {
    pthread_mutex_lock(&engine->lock);
    const bool was_empty = !engine->finished.head;
    job_queue_push(&engine->finished, job);
    if (was_empty) /* else the reaper is on its way already */
        pthread_cond_broadcast(&engine->ready);
    pthread_mutex_unlock(&engine->lock);
}

void aio_engine_lane_ended(aio_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    engine->num_running--;
    pthread_cond_broadcast(&engine->ready);
    pthread_mutex_unlock(&engine->lock);
}
