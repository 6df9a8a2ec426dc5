/* The C engine without Python, for the sanitizers: several threads submit unaligned writes and
 * reads over every backend while one reaps, and every byte is compared. Others sum what is written
 * meanwhile, by each function, and compare the sums with those of before.
 *
 * harness FILE BACKEND: exits with 0 when all is well, else tells on stderr what is not.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api.h"

#define NUM_THREADS 3
#define NUM_PIECES 60
#define PIECE_BYTES 37111u /* no multiple of anything: neighbours share pages */
#define NUM_SUMMERS 2
#define THREAD_BYTES ((uint64_t)NUM_PIECES * PIECE_BYTES)

static aio_engine *engine;
static aio_file *file;
static uint8_t *written, *read_back;
static atomic_ulong num_reaped, num_failed;
static atomic_int is_over;
static uint32_t sums[NUM_PIECES];

static void check(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s (%s)\n", what, strerror(errno));
        exit(1);
    }
}

static void submit(uint64_t begin, int32_t kind, uint8_t *base) {
    aio_request requests[NUM_PIECES];
    for (uint64_t i = 0; i < NUM_PIECES; i++) {
        const uint64_t offset = begin + i * PIECE_BYTES;
        requests[i] = (aio_request){
            .token = offset,
            .file = file,
            .data = base + offset,
            .offset = offset,
            .nbytes = PIECE_BYTES,
            .kind = kind,
        };
    }
    check(!aio_engine_submit(engine, requests, NUM_PIECES, -1), "not all accepted");
}

static void *submit_writes(void *begin) {
    submit(*(uint64_t *)begin, AIO_WRITE, written);
    return NULL;
}

static void *submit_reads(void *begin) {
    submit(*(uint64_t *)begin, AIO_READ, read_back);
    return NULL;
}

static void *reap(void *unused) {
    aio_completion completions[16];
    uint64_t count;
    (void)unused;
    while ((count = aio_engine_reap(engine, completions, 16))) {
        for (uint64_t i = 0; i < count; i++)
            if (completions[i].error || completions[i].transferred != PIECE_BYTES)
                atomic_fetch_add(&num_failed, 1);
        atomic_fetch_add(&num_reaped, count);
    }
    return NULL;
}

/* What the engine writes is only read by it. */
static void *sum(void *unused) {
    uint8_t *copy = malloc(PIECE_BYTES);
    uint32_t blocks[NUM_PIECES];
    (void)unused;
    check(copy != NULL, "no memory");
    do {
        aio_crc32c_blocks(written, NUM_PIECES * PIECE_BYTES, PIECE_BYTES, blocks);
        check(!memcmp(blocks, sums, sizeof(sums)), "a sum of blocks differs");
        for (int i = 0; i < NUM_PIECES; i++) {
            const uint64_t from = (uint64_t)(uintptr_t)(written + (uint64_t)i * PIECE_BYTES);
            const uint64_t to = (uint64_t)(uintptr_t)copy, nbytes = PIECE_BYTES;
            uint32_t crc = 0;
            aio_copy_crc32c(1, &from, &to, &nbytes, &crc);
            check(crc == sums[i] && aio_crc32c(0, copy, nbytes) == crc, "a sum of a copy differs");
        }
    } while (!atomic_load(&is_over));
    free(copy);
    return NULL;
}

static void run(void *(*entry)(void *), unsigned long expected) {
    pthread_t threads[NUM_THREADS];
    uint64_t begins[NUM_THREADS];
    for (uint64_t i = 0; i < NUM_THREADS; i++) {
        begins[i] = i * THREAD_BYTES;
        check(!pthread_create(&threads[i], NULL, entry, &begins[i]), "no thread");
    }
    for (int i = 0; i < NUM_THREADS; i++)
        pthread_join(threads[i], NULL);
    while (atomic_load(&num_reaped) < expected)
        usleep(1000);
}

static int32_t number_of(const char *name) {
    int32_t number = 0;
    while (aio_backend_name(number) && strcmp(aio_backend_name(number), name))
        number++;
    return number;
}

int main(int argc, char **argv) {
    const uint64_t nbytes = NUM_THREADS * THREAD_BYTES;
    aio_config config = {
        .lanes = 2,
        .queue_depth = 5,
        .block_bytes = 16384,
        .max_pending_bytes = 3 * PIECE_BYTES,
        .faults = {.seed = 11, .gate_fd = -1, .short_transfer = 0.3, .interrupted = 0.1},
    };
    aio_alignment alignment;
    pthread_t reaper, summers[NUM_SUMMERS];
    check(argc == 3, "harness FILE BACKEND");
    config.backend = number_of(argv[2]);
    const int fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    check(fd >= 0, "cannot open");
    check(!aio_file_alignment(fd, &alignment), "no alignment");
    const int direct = alignment.offset ? open(argv[1], O_RDWR | O_DIRECT) : -1;
    written = malloc(nbytes);
    read_back = calloc(1, nbytes);
    const uint32_t memory = alignment.memory ? alignment.memory : 1;
    check(!aio_file_new(&file, direct, fd, memory, alignment.offset, 0), "no file");
    check(written && read_back, "no memory");
    for (uint64_t i = 0; i < nbytes; i++)
        written[i] = (uint8_t)((i * 2654435761u) >> 13);

    const int error = aio_engine_create(&config, &engine);
    if (error == -ENOSYS || error == -EPERM)
        return 77; /* the kernel does not have this backend */
    check(!error, "cannot create");
    check(!pthread_create(&reaper, NULL, reap, NULL), "no reaper");
    for (int i = 0; i < NUM_PIECES; i++)
        sums[i] = aio_crc32c(0, written + (uint64_t)i * PIECE_BYTES, PIECE_BYTES);
    for (int i = 0; i < NUM_SUMMERS; i++)
        check(!pthread_create(&summers[i], NULL, sum, NULL), "no thread that sums");
    run(submit_writes, NUM_THREADS * NUM_PIECES);
    run(submit_reads, 2 * NUM_THREADS * NUM_PIECES);
    atomic_store(&is_over, 1);
    for (int i = 0; i < NUM_SUMMERS; i++)
        pthread_join(summers[i], NULL);
    aio_engine_stop(engine);
    pthread_join(reaper, NULL);
    aio_engine_drop(&engine);

    check(!atomic_load(&num_failed), "a request failed");
    check(!memcmp(written, read_back, nbytes), "the bytes differ");
    check(lseek(fd, 0, SEEK_END) == (off_t)nbytes, "the length differs");
    aio_file_drop(&file);
    free(written);
    free(read_back);
    close(fd);
    if (direct >= 0)
        close(direct);
    return 0;
}
