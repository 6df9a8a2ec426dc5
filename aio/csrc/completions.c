#include "completions.h"

#include <stdbool.h>
#include <stdlib.h>

void aio_jobs_free(struct job_queue *jobs) {
    struct job *job;
    while ((job = job_queue_pop(jobs)))
        free(job);
}

void aio_completions_init(struct completions *completions) {
    pthread_mutex_init(&completions->lock, NULL);
    pthread_cond_init(&completions->ready, NULL);
    job_queue_init(&completions->finished);
}

void aio_completions_destroy(struct completions *completions) {
    aio_jobs_free(&completions->finished);
    pthread_cond_destroy(&completions->ready);
    pthread_mutex_destroy(&completions->lock);
}

int aio_completions_wait_settled(struct completions *completions, uint32_t num_lanes) {
    pthread_mutex_lock(&completions->lock);
    while (completions->num_settled < num_lanes)
        pthread_cond_wait(&completions->ready, &completions->lock);
    const int error = completions->setup_error;
    pthread_mutex_unlock(&completions->lock);
    return error;
}

uint64_t aio_completions_reap(struct completions *completions, aio_completion *found,
                              uint64_t max) {
    uint64_t count = 0;
    struct job *done = NULL;
    pthread_mutex_lock(&completions->lock);
    while (!completions->finished.head && completions->num_running)
        pthread_cond_wait(&completions->ready, &completions->lock);
    while (count < max && completions->finished.head) {
        struct job *job = job_queue_pop(&completions->finished);
        found[count++] = job->completion;
        job->next = done;
        done = job;
    }
    pthread_mutex_unlock(&completions->lock);
    while (done) {
        struct job *next = done->next;
        free(done);
        done = next;
    }
    return count;
}

void aio_lane_starts(struct completions *completions) {
    pthread_mutex_lock(&completions->lock);
    completions->num_running++;
    pthread_mutex_unlock(&completions->lock);
}

void aio_lane_settled(struct completions *completions, int error) {
    pthread_mutex_lock(&completions->lock);
    completions->num_settled++;
    if (!completions->setup_error)
        completions->setup_error = error;
    pthread_cond_broadcast(&completions->ready);
    pthread_mutex_unlock(&completions->lock);
}

void aio_lane_finished(struct completions *completions, struct job *job) {
    pthread_mutex_lock(&completions->lock);
    const bool was_empty = !completions->finished.head;
    job_queue_push(&completions->finished, job);
    if (was_empty) /* else the reaper is on its way already */
        pthread_cond_broadcast(&completions->ready);
    pthread_mutex_unlock(&completions->lock);
}

void aio_lane_ended(struct completions *completions) {
    pthread_mutex_lock(&completions->lock);
    completions->num_running--;
    pthread_cond_broadcast(&completions->ready);
    pthread_mutex_unlock(&completions->lock);
}
