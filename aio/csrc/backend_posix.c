/* pread and pwrite on a pool of threads: works on every kernel and every file system. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "backend.h"
#include "util.h"

struct pool {
    int wake_fd;
    struct block_queue prepared; /* the lane's own */

    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t work;
    struct block_queue waiting, done;
    uint32_t num_busy, num_threads, max_threads;
    bool stopping;
    pthread_t threads[];
};

static void transfer(struct block *block) {
    const off_t offset = (off_t)block->offset;
    const ssize_t moved = block->write ? pwrite(block->fd, block->data, block->nbytes, offset)
                                       : pread(block->fd, block->data, block->nbytes, offset);
    block->result = moved < 0 ? -errno : moved;
}

/* With the lock held. */
static void push_done(struct pool *pool, struct block *block) {
    if (!pool->done.count) /* else the lane is on its way already */
        aio_wake(pool->wake_fd);
    block_queue_push(&pool->done, block);
}

static void *pool_main(void *argument) {
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct block *block = block_queue_pop(&pool->waiting);
        if (block) {
            pool->num_busy++;
            pthread_mutex_unlock(&pool->lock);
            transfer(block);
            pthread_mutex_lock(&pool->lock);
            pool->num_busy--;
            push_done(pool, block);
        } else if (pool->stopping) {
            break;
        } else {
            pthread_cond_wait(&pool->work, &pool->lock);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static int posix_setup(const struct backend_config *config, void **context) {
    struct pool *pool = calloc(1, sizeof *pool + config->threads * sizeof(pthread_t));
    if (!pool)
        return -ENOMEM;
    pool->wake_fd = config->wake_fd;
    pool->max_threads = config->threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    block_queue_init(&pool->prepared);
    block_queue_init(&pool->waiting);
    block_queue_init(&pool->done);
    *context = pool;
    return 0;
}

static void posix_prep(void *context, struct block *block) {
    struct pool *pool = context;
    block_queue_push(&pool->prepared, block);
}

/* With the lock held: threads are started when there is work for them and never before. */
static void add_threads(struct pool *pool) {
    while (pool->waiting.count > pool->num_threads - pool->num_busy &&
           pool->num_threads < pool->max_threads) {
        if (aio_thread_start(&pool->threads[pool->num_threads], pool_main, pool, "aio-posix"))
            return; /* the process has reached a limit: those there are will do it */
        pool->num_threads++;
    }
}

static uint32_t posix_submit(void *context) {
    struct pool *pool = context;
    struct block *block;
    if (!pool->prepared.count)
        return 0;
    pthread_mutex_lock(&pool->lock);
    while ((block = block_queue_pop(&pool->prepared))) {
        block_queue_push(&pool->waiting, block);
        pthread_cond_signal(&pool->work);
    }
    add_threads(pool);
    while (!pool->num_threads && (block = block_queue_pop(&pool->waiting))) {
        transfer(block); /* not one thread to be had: slow, but it gets done */
        push_done(pool, block);
    }
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

static uint32_t posix_reap(void *context, struct block **done, uint32_t max) {
    struct pool *pool = context;
    uint32_t count = 0;
    pthread_mutex_lock(&pool->lock);
    while (count < max && pool->done.count)
        done[count++] = block_queue_pop(&pool->done);
    pthread_mutex_unlock(&pool->lock);
    return count;
}

static void posix_destroy(void *context) {
    struct pool *pool = context;
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

const struct backend_ops aio_posix_backend = {
    .name = "posix",
    .takes_buffered = true,
    .poll_milliseconds = 0,
    .setup = posix_setup,
    .prep = posix_prep,
    .submit = posix_submit,
    .reap = posix_reap,
    .destroy = posix_destroy,
};
