#include "util.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "api.h"

#define HUGE_PAGE_BYTES ((uint64_t)2 << 20)
#define STACK_BYTES (256u << 10)

uint64_t aio_page_bytes(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

double aio_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* glibc takes what libraries keep for each thread (their static TLS) off its stack, and tells how
 * much that is by this call alone. */
static size_t stack_bytes(const pthread_attr_t *attributes) {
    size_t (*least)(const pthread_attr_t *) = NULL;
    void *found = dlsym(RTLD_DEFAULT, "__pthread_get_minstack");
    if (!found)
        return STACK_BYTES;
    memcpy(&least, &found, sizeof found);
    return STACK_BYTES + least(attributes);
}

int aio_thread_start(pthread_t *thread, void *(*entry)(void *), void *argument, const char *name) {
    pthread_attr_t attributes;
    sigset_t all, before;
    int error = pthread_attr_init(&attributes);
    if (error)
        return -error;
    pthread_attr_setstacksize(&attributes, stack_bytes(&attributes));
    sigfillset(&all);
    /* The thread inherits the mask, so there is no moment in which it could take a signal. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(thread, &attributes, entry, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!error)
        pthread_setname_np(*thread, name);
    return -error;
}

void aio_pause(void) {
    const struct timespec millisecond = {.tv_nsec = 1000000};
    nanosleep(&millisecond, NULL);
}

void aio_wait_for_memory(void) {
    const struct timespec hundredth = {.tv_nsec = 10000000};
    nanosleep(&hundredth, NULL);
}

int aio_wake(int fd) {
    const uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0)
        if (errno != EINTR)
            return errno == EAGAIN ? 0 : -errno; /* EAGAIN: the counter is full, he is woken */
    return 0;
}

void aio_sleep(int fd, int milliseconds) {
    struct pollfd event = {.fd = fd, .events = POLLIN};
    uint64_t count;
    const int ready = poll(&event, 1, milliseconds);
    /* What fails is an early wake-up, which every caller expects; but it may fail for ever. */
    if (ready < 0 || (ready > 0 && read(fd, &count, sizeof count) < 0))
        aio_pause();
}

int aio_map(uint64_t nbytes, bool huge_pages, bool inherited, uint8_t **address) {
    const uint64_t alignment = nbytes >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : aio_page_bytes();
    const uint64_t length = aio_round_up(nbytes, aio_page_bytes());
    if (length < nbytes || length + alignment < length)
        return -ENOMEM;
    uint8_t *mapped = mmap(NULL, length + alignment, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        return -errno;
    /* Worked example: mapped 0x7f00001ff000, alignment 2 MiB: head 0x1000 bytes, tail the rest. */
    const uint64_t head = aio_round_up((uint64_t)(uintptr_t)mapped, alignment) - (uintptr_t)mapped;
    if (head)
        munmap(mapped, head);
    if (alignment > head)
        munmap(mapped + head + length, alignment - head);
    mapped += head;
    if (huge_pages)
        madvise(mapped, length, MADV_HUGEPAGE); /* a wish: a kernel without it serves small pages */
    if (!inherited && madvise(mapped, length, MADV_DONTFORK)) {
        const int error = errno;
        munmap(mapped, length);
        return -error;
    }
    *address = mapped;
    return 0;
}

void aio_unmap(uint8_t *address, uint64_t nbytes) {
    munmap(address, aio_round_up(nbytes, aio_page_bytes()));
}

int aio_mapping_new(aio_mapping *mapping, uint64_t nbytes, int32_t huge_pages, int32_t inherited) {
    mapping->nbytes = nbytes;
    mapping->pid = inherited ? 0 : getpid();
    return aio_map(nbytes, huge_pages, inherited, &mapping->address);
}

void aio_mapping_drop(aio_mapping *mapping) {
    /* In a child that did not inherit it, something else may be there by now. */
    if (mapping->address && (!mapping->pid || mapping->pid == getpid()))
        aio_unmap(mapping->address, mapping->nbytes);
    mapping->address = NULL;
}

int aio_memory_discard(uint8_t *address, uint64_t nbytes) {
    return madvise(address, nbytes, MADV_DONTNEED) ? -errno : 0;
}

int aio_memory_huge(uint8_t *address, uint64_t nbytes, int32_t huge_pages) {
    return madvise(address, nbytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) ? -errno : 0;
}

int aio_lock_memory(uint8_t *address, uint64_t nbytes) {
    return mlock(address, aio_round_up(nbytes, aio_page_bytes())) ? -errno : 0;
}
