#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "util.h"

static int lane_start(aio_engine *engine, uint32_t index) {
    struct lane *lane = &engine->lanes[index];
    lane->config = &engine->config;
    lane->completions = &engine->completions;
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

void aio_engine_stop(aio_engine *engine) {
    for (uint32_t i = 0; i < engine->num_lanes; i++)
        aio_lane_stop(&engine->lanes[i]);
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
    aio_completions_destroy(&engine->completions);
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
    aio_completions_init(&engine->completions);
    while (!error && engine->num_lanes < config->lanes) {
        aio_lane_starts(&engine->completions);
        error = lane_start(engine, engine->num_lanes);
        if (error)
            aio_lane_ended(&engine->completions);
        else
            engine->num_lanes++;
    }
    const int setup_error = aio_completions_wait_settled(&engine->completions, engine->num_lanes);
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
            aio_jobs_free(jobs);
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
        const int refusal = aio_lane_submit(lane, job);
        if (refusal) {
            free(job);
            aio_jobs_free(&jobs);
            return refusal;
        }
        requests[i].accepted = 1;
    }
    return 0;
}

uint64_t aio_engine_reap(aio_engine *engine, aio_completion *completions, uint64_t max) {
    return aio_completions_reap(&engine->completions, completions, max);
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
