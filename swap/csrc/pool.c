/* A pool of worker threads that lives as long as the process.
 *
 * Invariants:
 * - a job lives on its caller's stack and is on the list only while it wants helpers; workers touch
 *   it between attaching and detaching, both under `lock`, and the caller leaves only when no
 * worker is attached;
 * - workers hold no lock while they run a body, and start only when a job could use them;
 * - a forked child starts with no workers and an empty list, whatever the parent's threads did.
 */
#include "pool.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

struct job {
    swap_range_body *body;
    void *context;
    int64_t n;
    int64_t piece;
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

static void run_pieces(struct job *job) {
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&job->next, job->piece, memory_order_relaxed);
        if (begin >= job->n)
            return;
        int64_t left = job->n - begin;
        job->body(job->context, begin, begin + (left < job->piece ? left : job->piece));
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
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    work = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    detached = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    jobs = NULL;
    workers = 0;
    idle = 0;
}

static void watch_forks(void) { (void)pthread_atfork(NULL, NULL, forget_parent); }

static void publish(struct job *job) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    while (workers < job->wanted && start_worker())
        continue;
    job->behind = jobs;
    jobs = job;
    for (int i = 0; i < job->wanted && i < idle; i++)
        pthread_cond_signal(&work);
    pthread_mutex_unlock(&lock);
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

void swap_parallel(swap_range_body *body, void *context, int64_t n, int64_t piece, int threads) {
    struct job job = {.body = body, .context = context, .n = n, .piece = piece};
    int64_t pieces = (n + piece - 1) / piece;
    job.wanted = (int)(pieces < threads ? pieces : threads) - 1;
    /* A caller that flushes subnormals or rounds otherwise must get the same bits. */
    fenv_t callers;
    (void)fegetenv(&callers);
    (void)fesetenv(FE_DFL_ENV);
    if (job.wanted > 0) {
        publish(&job);
        run_pieces(&job);
        withdraw(&job);
    } else {
        run_pieces(&job);
    }
    (void)fesetenv(&callers);
}
