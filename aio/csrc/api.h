/* What Python sees of the C engine: plain structs and calls that return 0 or -errno.
 *
 * Everything between the two cffi marks is also the `cdef` of aio/_build.py: no macros in there.
 */
#ifndef AIO_API_H
#define AIO_API_H

#include <stdint.h>

/* cffi: begin */
enum aio_kind { AIO_READ, AIO_WRITE };
enum aio_shortage { AIO_NO_THREAD = 65536 }; /* beyond every errno: EAGAIN, but of a thread */

typedef struct aio_engine aio_engine;
typedef struct aio_file aio_file;

/* How the memory backend misbehaves. Probabilities are per transfer, 0 to 1. */
typedef struct {
    uint64_t seed;
    double short_transfer; /* moves a part only */
    double again;          /* result -EAGAIN, nothing moved */
    double interrupted;    /* result -EINTR, nothing moved */
    double error;          /* result -error_number, nothing moved */
    double short_submit;   /* probability that submit leaves a block queued */
    int32_t refuse_direct; /* 1: every direct transfer results in -EINVAL */
    int32_t error_number;
    int32_t gate_fd; /* nothing completes until this descriptor is readable; -1: no gate */
} aio_faults;

typedef struct {
    int32_t backend; /* its number, see aio_backend_name */
    uint32_t lanes;
    uint32_t queue_depth;       /* blocks in flight, a lane */
    uint64_t block_bytes;       /* multiple of the page size */
    uint64_t max_pending_bytes; /* submit waits above this, a lane */
    aio_faults faults;
} aio_config;

/* A descriptor and nothing else, so that a call can leave it with its owner. -1: none. */
typedef struct {
    int32_t number;
} aio_descriptor;

/* A new file that goes with its owner; `path` is NULL where there is none. */
typedef struct {
    aio_descriptor descriptor;
    int32_t pid;
    char *path;
} aio_temporary;

/* Memory that a process has mapped. */
typedef struct {
    uint8_t *address; /* NULL: none */
    uint64_t nbytes;
    int32_t pid; /* of the only process that has it; 0: forked children have it, too */
} aio_mapping;

/* What statx says about direct I/O on one file. Zero alignments: there is no direct I/O. */
typedef struct {
    int32_t known; /* 0: kernel or file system do not tell */
    uint32_t memory;
    uint32_t offset;
} aio_alignment;

/* One transfer of any size, offset and address. `data` and `file` must stay valid until the
 * completion with this token has been reaped. */
typedef struct {
    uint64_t token;
    aio_file *file;
    uint8_t *data;
    uint64_t offset;
    uint64_t nbytes;
    int32_t kind;     /* enum aio_kind */
    int32_t accepted; /* set to 1 by aio_engine_submit: there will be a completion */
} aio_request;

typedef struct {
    uint64_t token;
    uint64_t transferred;   /* bytes from the start that moved; fewer than asked with an error */
    double started;         /* CLOCK_MONOTONIC seconds when its first block was prepared */
    double finished;        /* CLOCK_MONOTONIC seconds when its last block was reaped */
    int32_t error;          /* 0 or a positive errno */
    int32_t direct_refused; /* 1: the file turned out to take no direct I/O */
} aio_completion;

/* Starts the lanes. 0 and *engine, or -errno of the first lane whose backend cannot be set up, or
 * -AIO_NO_THREAD; then nothing is left behind. */
int aio_engine_create(const aio_config *config, aio_engine **engine);
/* Queues requests in order on `lane`, or each on the least loaded lane when it is negative. Waits
 * while a lane is over max_pending_bytes. 0; -ENOMEM, with none queued; or, with those queued that
 * are accepted, -ECANCELED once the engine is stopping, and another -errno where a lane cannot be
 * woken. */
int aio_engine_submit(aio_engine *engine, aio_request *requests, uint64_t count, int32_t lane);
/* Waits for completions and returns how many it stored, at most `max`. 0: the engine was stopped
 * and everything it had accepted has been reaped. For one thread at a time. */
uint64_t aio_engine_reap(aio_engine *engine, aio_completion *completions, uint64_t max);
/* Refuses new requests and lets the lanes end when they have drained. Returns at once. */
void aio_engine_stop(aio_engine *engine);
/* The two ways to let go of an engine, if there is one. A forked child has none of its threads:
 * there they do nothing. */
/* For the user: stops it. */
void aio_engine_leave(aio_engine **engine);
/* For the owner: frees it, once it is stopped and its lanes have ended. */
void aio_engine_drop(aio_engine **engine);
/* The name of the backend of that number, a static string; NULL past the last. They count from 0,
 * best first; those after "posix" are taken by name only. */
const char *aio_backend_name(int32_t backend);
/* How the backend reaches the kernel, in words: a static string. */
const char *aio_backend_detail(int32_t backend);

/* Opens a path, in an open directory (-1: the working directory), for a descriptor that has none.
 * 0 or -errno, -EINTR among them. */
int aio_descriptor_open(aio_descriptor *descriptor, int32_t directory, const char *path,
                        int32_t flags, uint32_t mode);
/* Closes it, if it is open, once. 0 or -errno; it is closed after an error, too. */
int aio_descriptor_close(aio_descriptor *descriptor);
/* Gives the space of a range of a file back, which reads as zeros then and is as long as before.
 * -EOPNOTSUPP where the file system cannot. */
int aio_descriptor_punch(const aio_descriptor *descriptor, uint64_t offset, uint64_t nbytes);
/* Makes a file to write, which must not exist. 0 or -errno, -EINTR among them. */
int aio_temporary_create(aio_temporary *temporary, const char *path, uint32_t mode);
/* Removes the file, unless it has another name by now or this is a child of the process that made
 * it, and closes it. 0 or -errno of the removal. May be repeated. */
int aio_temporary_drop(aio_temporary *temporary);

/* Takes no ownership of the descriptors; direct_fd is -1 where there is no direct I/O. 0 and
 * *file, or -errno. */
int aio_file_new(aio_file **file, int32_t direct_fd, int32_t buffered_fd, uint32_t memory_alignment,
                 uint32_t offset_alignment, uint64_t size);
/* Frees the file, if there is one. */
void aio_file_drop(aio_file **file);
int aio_file_alignment(int32_t fd, aio_alignment *alignment);
/* Reserves a range and grows the file to its end. -EOPNOTSUPP where the file system cannot. After
 * another error, -EINTR among them, the file has its old length, or that of a write in flight that
 * made it longer, through whatever this process has open on it. `unhindered` lets signals wait, for
 * a file system that starts anew after each. */
int aio_file_allocate(aio_file *file, uint64_t offset, uint64_t nbytes, int32_t unhindered);
/* Makes a range that has space zeros, without writing them. -EOPNOTSUPP where the file system
 * cannot. -EINTR as any other error. */
int aio_file_zero(const aio_file *file, uint64_t offset, uint64_t nbytes);
/* Makes the file at least this long, without reserving anything. -EINTR as any other error. */
int aio_file_extend(aio_file *file, uint64_t end);
/* Makes the file exactly this long. -EINTR as any other error. */
int aio_file_truncate(aio_file *file, uint64_t size);
/* Gives others a hundredth of a second to give memory back, and takes none. */
void aio_wait_for_memory(void);
/* 1 once the kernel has refused a direct transfer that kept the stated alignments. */
int aio_file_direct_refused(const aio_file *file);

/* Anonymous memory at a multiple of 2 MiB, or of the page size when that is smaller. Not inherited:
 * a forked child has nothing there, and the parent's pages are never copied on its account. */
int aio_mapping_new(aio_mapping *mapping, uint64_t nbytes, int32_t huge_pages, int32_t inherited);
/* Unmaps it where it is mapped. */
void aio_mapping_drop(aio_mapping *mapping);
/* Gives whole pages back to the system; they are zero when they are touched next. 0, or -errno for
 * pages that are locked. */
int aio_memory_discard(uint8_t *address, uint64_t nbytes);
/* Whether huge pages are wished for where memory is touched from now on. 0 or -errno. */
int aio_memory_huge(uint8_t *address, uint64_t nbytes, int32_t huge_pages);
/* Faults all pages in and keeps them in memory. */
int aio_lock_memory(uint8_t *address, uint64_t nbytes);

/* CRC-32C (Castagnoli, reflected, as in RFC 3720): that of what `crc` stands for, followed by
 * nbytes at data. The CRC of nothing is 0. */
uint32_t aio_crc32c(uint32_t crc, const uint8_t *data, uint64_t nbytes);
/* The CRC of each block of so many bytes, the last of which may be shorter. */
void aio_crc32c_blocks(const uint8_t *data, uint64_t nbytes, uint64_t block_bytes, uint32_t *crc);
/* For each i < count: copies nbytes[i] bytes from src[i] to dst[i] and advances crc[i] over them.
 * Addresses travel as integers. dst[i] = 0 copies nothing; src[i] = 0 stands for zero bytes and
 * leaves crc[i] alone; crc = NULL sums nothing. Ranges must not overlap. Items are done in order.
 */
void aio_copy_crc32c(uint64_t count, const uint64_t *src, const uint64_t *dst,
                     const uint64_t *nbytes, uint32_t *crc);
/* The same in units. `ranges` has src, dst and nbytes of all ranges, how far inside of a unit each
 * begins, bytes of its units, and the CRC of what that unit has before it: six times `count` words.
 * crc gets the CRCs of all units that the ranges touch, range by range, the last of each over what
 * the range has of it. */
void aio_copy_crc32c_units(uint64_t count, const uint64_t *ranges, uint32_t *crc);
/* The CRC of count > 0 units in a row from theirs: each of unit_bytes, the last of last_bytes. */
uint32_t aio_crc32c_join(const uint32_t *crc, uint64_t count, uint64_t unit_bytes,
                         uint64_t last_bytes);
/* Name of the code that runs on long ranges: "vpclmulqdq", "sse4.2", "armv8-crc" or "tables". */
const char *aio_crc32c_isa(void);
/* The ways to sum, the faster ones last. */
enum aio_crc32c_way { AIO_CRC32C_TABLES, AIO_CRC32C_INSTRUCTION, AIO_CRC32C_FOLDING };
/* No faster way than this is used, whatever the processor offers; for tests. */
void aio_crc32c_at_most(enum aio_crc32c_way highest);
/* cffi: end */

#endif
