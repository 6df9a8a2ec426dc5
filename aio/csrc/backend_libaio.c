/* Kernel AIO: io_submit and io_getevents, through libaio.so.1 where it is installed and through
 * syscall(2) where it is not. Direct descriptors only: on a buffered one io_submit would block.
 */
#include <dlfcn.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "backend.h"
#include "util.h"

/* ---- the four calls; each returns a count, 0 or -errno, as libaio's do ---- */

struct calls {
    const char *detail;
    int (*setup)(int num_events, aio_context_t *context);
    int (*destroy)(aio_context_t context);
    int (*submit)(aio_context_t context, long count, struct iocb **blocks);
    int (*getevents)(aio_context_t context, long min, long max, struct io_event *events,
                     struct timespec *timeout);
};

static int raw_setup(int num_events, aio_context_t *context) {
    return syscall(SYS_io_setup, num_events, context) ? -errno : 0;
}

static int raw_destroy(aio_context_t context) {
    return syscall(SYS_io_destroy, context) ? -errno : 0;
}

static int raw_submit(aio_context_t context, long count, struct iocb **blocks) {
    const long taken = syscall(SYS_io_submit, context, count, blocks);
    return taken < 0 ? -errno : (int)taken;
}

static int raw_getevents(aio_context_t context, long min, long max, struct io_event *events,
                         struct timespec *timeout) {
    const long count = syscall(SYS_io_getevents, context, min, max, events, timeout);
    return count < 0 ? -errno : (int)count;
}

static struct calls calls = {"raw system calls, libaio.so.1 is not installed", raw_setup,
                             raw_destroy, raw_submit, raw_getevents};
static pthread_once_t calls_bound = PTHREAD_ONCE_INIT;

/* POSIX wants dlsym's result copied as bytes: C has no cast from object to function pointers. */
static void *symbol(void *library, const char *name, void *function) {
    void *address = dlsym(library, name);
    memcpy(function, &address, sizeof address);
    return address;
}

static void bind_calls(void) {
    static const char *const names[] = {"libaio.so.1", "libaio.so.1t64"};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        struct calls found = {.detail = names[i]};
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library)
            continue;
        if (symbol(library, "io_setup", &found.setup) &&
            symbol(library, "io_destroy", &found.destroy) &&
            symbol(library, "io_submit", &found.submit) &&
            symbol(library, "io_getevents", &found.getevents)) {
            calls = found; /* the library stays open as long as the process */
            return;
        }
        dlclose(library);
    }
}

static const char *libaio_detail(void) {
    pthread_once(&calls_bound, bind_calls);
    return calls.detail;
}

/* ---- the backend ---- */

struct kernel_queue {
    aio_context_t context;
    int wake_fd;
    uint32_t in_flight;          /* in the kernel */
    struct block_queue prepared; /* not yet in the kernel */
    struct block_queue refused;  /* by io_submit, with a result */
    uint32_t depth;
    struct iocb *iocbs[]; /* scratch for io_submit */
};

static int libaio_setup(const struct backend_config *config, void **context) {
    libaio_detail();
    struct kernel_queue *queue = calloc(1, sizeof *queue + config->depth * sizeof(struct iocb *));
    if (!queue)
        return -ENOMEM;
    queue->wake_fd = config->wake_fd;
    queue->depth = config->depth;
    block_queue_init(&queue->prepared);
    block_queue_init(&queue->refused);
    const int error = calls.setup((int)config->depth, &queue->context);
    if (error) {
        free(queue);
        return error;
    }
    *context = queue;
    return 0;
}

static void libaio_prep(void *context, struct block *block) {
    struct kernel_queue *queue = context;
    memset(&block->iocb, 0, sizeof block->iocb);
    block->iocb.aio_data = (uint64_t)(uintptr_t)block;
    block->iocb.aio_lio_opcode = block->write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block->iocb.aio_fildes = (uint32_t)block->fd;
    block->iocb.aio_buf = (uint64_t)(uintptr_t)block->data;
    block->iocb.aio_nbytes = block->nbytes;
    block->iocb.aio_offset = (int64_t)block->offset;
    block->iocb.aio_flags = IOCB_FLAG_RESFD;
    block->iocb.aio_resfd = (uint32_t)queue->wake_fd;
    block_queue_push(&queue->prepared, block);
}

/* io_submit fails as a whole only for its first iocb: that one gets the error as its result. */
static void refuse_first(struct kernel_queue *queue, int error) {
    struct block *block = block_queue_pop(&queue->prepared);
    block->result = error;
    block_queue_push(&queue->refused, block);
}

static uint32_t libaio_submit(void *context) {
    struct kernel_queue *queue = context;
    while (queue->prepared.count) {
        long count = 0;
        for (struct block *block = queue->prepared.head; block; block = block->next)
            queue->iocbs[count++] = &block->iocb;
        const int taken = calls.submit(queue->context, count, queue->iocbs);
        for (int i = 0; i < taken; i++) {
            block_queue_pop(&queue->prepared);
            queue->in_flight++;
        }
        if (taken > 0)
            continue;
        if ((taken == 0 || taken == -EAGAIN || taken == -EINTR) && queue->in_flight)
            break; /* the next completion makes room; and the lane tries again soon */
        refuse_first(queue, taken ? taken : -EAGAIN);
    }
    return queue->prepared.count;
}

static uint32_t libaio_reap(void *context, struct block **done, uint32_t max) {
    struct kernel_queue *queue = context;
    struct io_event events[64];
    struct timespec at_once = {0, 0};
    uint32_t count = 0;
    while (count < max && queue->refused.count)
        done[count++] = block_queue_pop(&queue->refused);
    if (!queue->in_flight || count == max)
        return count;
    const long room = (long)aio_min(max - count, sizeof events / sizeof *events);
    const int reaped = calls.getevents(queue->context, 0, room, events, &at_once);
    if (reaped < 0) { /* the eventfd has been read already: nobody else would ask again */
        aio_pause();
        aio_wake(queue->wake_fd);
    }
    for (int i = 0; i < reaped; i++) {
        struct block *block = (struct block *)(uintptr_t)events[i].data;
        block->result = events[i].res;
        done[count++] = block;
        queue->in_flight--;
    }
    return count;
}

static void libaio_destroy(void *context) {
    struct kernel_queue *queue = context;
    calls.destroy(queue->context);
    free(queue);
}

const struct backend_ops aio_libaio_backend = {
    .name = "libaio",
    .takes_buffered = false,
    .detail = libaio_detail,
    .poll_milliseconds = 0,
    .setup = libaio_setup,
    .prep = libaio_prep,
    .submit = libaio_submit,
    .reap = libaio_reap,
    .destroy = libaio_destroy,
};
