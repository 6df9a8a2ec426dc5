/* Small helpers with no state: clock, rounding, threads, eventfd. */
#ifndef AIO_UTIL_H
#define AIO_UTIL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

static inline uint64_t aio_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t aio_max(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* `unit` is a power of two: 4095 -> 0 down and 4096 up, with a unit of 4096. */
static inline uint64_t aio_round_down(uint64_t value, uint64_t unit) { return value & ~(unit - 1); }
static inline uint64_t aio_round_up(uint64_t value, uint64_t unit) {
    return aio_round_down(value + unit - 1, unit);
}

/* Of this machine: 4096, or up to 65536 on some ARM kernels. */
uint64_t aio_page_bytes(void);

/* CLOCK_MONOTONIC in seconds: what Python's time.perf_counter() and time.monotonic() read. */
double aio_now(void);

/* Memory as aio_mapping_new maps it, for who keeps the size himself. 0 or -errno. */
int aio_map(uint64_t nbytes, bool huge_pages, bool inherited, uint8_t **address);
void aio_unmap(uint8_t *address, uint64_t nbytes);

/* Starts a thread that takes no signals, so that Python's handlers stay with Python's threads. */
int aio_thread_start(pthread_t *thread, void *(*entry)(void *), void *argument, const char *name);

/* What else an interrupted or failed call is for a thread that takes no signals: a reason to try
 * again, but not at once and without end. */
void aio_pause(void);

/* Makes an eventfd readable. 0 or -errno: then whoever sleeps on it goes on sleeping. */
int aio_wake(int fd);
/* Waits until an eventfd is readable or `milliseconds` have gone by, and clears it. */
void aio_sleep(int fd, int milliseconds);

#endif
