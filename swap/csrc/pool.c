/* Runs a job in threads: those of the caller's OpenMP team, or a pool's that lives as long as the
 * process.
 *
 * A thread that computes with torch has a team, whose threads spin for a while after every
 * operation: there they are at hand, and would keep others from their processors. A thread that
 * asked for the pool has none, and should not get one, which would spin beside the first.
 *
 * Invariants of the pool:
 * - a job lives on its caller's stack and is on the list only while it wants helpers; workers touch
 *   it from attaching to detaching, both under `lock`, and its caller waits until none is attached;
 * - workers hold no lock while they run a body, and start only when a job could use them;
 * - a forked child starts with no workers and an empty list, whatever the parent's threads did.
 */
#define _GNU_SOURCE /* for RTLD_DEFAULT */
#include "pool.h"

#include "kernels.h"

#include <dlfcn.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* Pieces are long, because prefetchers take about a microsecond to follow all arrays again, and get
 * shorter towards the end, so that the threads finish together though one was held up. */
#define MIN_PIECE (8 * SWAP_BLOCK)
#define MAX_PIECE (64 * SWAP_BLOCK)
#define PIECES_LEFT_PER_THREAD 4

struct job {
    swap_range_body *body;
    void *context;
    int64_t n;
    int threads;
    _Atomic int64_t next; /* first element that nobody has taken */
    int wanted;           /* helpers that may still attach */
    int attached;
    struct job *behind;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static pthread_cond_t detached = PTHREAD_COND_INITIALIZER;
static struct job *jobs;
static int workers;
static int idle;

/* What compilers call for `#pragma omp parallel`, of the OpenMP runtime that the process has loaded
 * (torch brings one); NULL if there is none. */
typedef void parallel_region(void (*body)(void *), void *data, unsigned threads, unsigned flags);
static parallel_region *team;
static _Thread_local bool is_pool_wanted;

static int64_t next_piece(int64_t left, int threads) {
    int64_t piece = left / threads / PIECES_LEFT_PER_THREAD / SWAP_BLOCK * SWAP_BLOCK;
    if (piece < MIN_PIECE)
        piece = MIN_PIECE;
    if (piece > MAX_PIECE)
        piece = MAX_PIECE;
    return piece < left ? piece : left;
}

static void run_pieces(struct job *job) {
    int64_t begin = atomic_load_explicit(&job->next, memory_order_relaxed);
    while (begin < job->n) {
        int64_t end = begin + next_piece(job->n - begin, job->threads);
        if (!atomic_compare_exchange_weak_explicit(&job->next, &begin, end, memory_order_relaxed,
                                                   memory_order_relaxed))
            continue; /* begin is what another thread left there */
        job->body(job->context, begin, end);
        begin = atomic_load_explicit(&job->next, memory_order_relaxed);
    }
}

/* Takes the job at the head of the list; call with the lock held. */
static struct job *attach(void) {
    struct job *job = jobs;
    job->attached++;
    if (--job->wanted == 0)
        jobs = job->behind;
    return job;
}

static void *worker(void *unused) {
    (void)unused;
    (void)fesetenv(FE_DFL_ENV);
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!jobs) {
            idle++;
            pthread_cond_wait(&work, &lock);
            idle--;
        }
        struct job *job = attach();
        pthread_mutex_unlock(&lock);
        run_pieces(job);
        pthread_mutex_lock(&lock);
        if (--job->attached == 0)
            pthread_cond_broadcast(&detached);
    }
    return NULL;
}

/* Call with the lock held. Signals stay with the threads of the interpreter. */
static bool start_worker(void) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes))
        return false;
    sigset_t all, before;
    sigfillset(&all);
    pthread_t thread;
    bool started = !pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED) &&
                   !pthread_sigmask(SIG_SETMASK, &all, &before);
    if (started) {
        started = !pthread_create(&thread, &attributes, worker, NULL);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&attributes);
    workers += started;
    return started;
}

/* The parent's threads do not exist here and may have held the lock. */
static void forget_parent(void) {
    team = NULL; /* so it is with the threads of a team */
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    work = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    detached = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    jobs = NULL;
    workers = 0;
    idle = 0;
}

/* As the library is loaded: a process may fork before its first kernel, with a team that its child
 * does not have. */
__attribute__((constructor)) static void prepare(void) {
    void *symbol = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    memcpy(&team, &symbol, sizeof team);
    (void)pthread_atfork(NULL, NULL, forget_parent);
}

static void publish(struct job *job) {
    pthread_mutex_lock(&lock);
    while (workers < job->wanted && start_worker())
        continue;
    job->behind = jobs;
    jobs = job;
    int to_wake = job->wanted < idle ? job->wanted : idle;
    pthread_mutex_unlock(&lock);
    while (to_wake-- > 0)
        pthread_cond_signal(&work);
}

static void withdraw(struct job *job) {
    pthread_mutex_lock(&lock);
    for (struct job **at = &jobs; *at; at = &(*at)->behind) {
        if (*at == job) {
            *at = job->behind;
            break;
        }
    }
    while (job->attached > 0)
        pthread_cond_wait(&detached, &lock);
    pthread_mutex_unlock(&lock);
}

/* A thread that flushes subnormals or rounds otherwise must compute the same bits. */
static void run_pieces_in_default_environment(void *job) {
    fenv_t own;
    (void)fegetenv(&own);
    (void)fesetenv(FE_DFL_ENV);
    run_pieces(job);
    (void)fesetenv(&own);
}

void swap_use_pool(void) { is_pool_wanted = true; }

void swap_parallel(swap_range_body *body, void *context, int64_t n, int threads) {
    struct job job = {.body = body, .context = context, .n = n, .threads = threads};
    int64_t most_pieces = (n + MIN_PIECE - 1) / MIN_PIECE;
    int most = (int)(most_pieces < threads ? most_pieces : threads);
    if (most > 1 && team && !is_pool_wanted) {
        team(run_pieces_in_default_environment, &job, (unsigned)threads, 0);
        return;
    }
    if (most > 1) {
        job.wanted = most - 1;
        publish(&job);
    }
    run_pieces_in_default_environment(&job);
    if (most > 1)
        withdraw(&job);
}
