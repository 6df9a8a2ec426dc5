/* Stands between a program and the C library (LD_PRELOAD), and makes one call fail that is about
 * files below a directory: the n-th from when it was armed, whoever makes it. What the call would
 * have done is not done, or half of it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

/* Which calls count; as in `failures.interposed`. */
enum {
    OPEN = 1,
    READ = 2,
    WRITE = 4,
    SYNC = 8,
    SPACE = 16,
    NAME = 32,
    LOCK = 64,
    MEMORY = 128,
    LIST = 256
};
/* How a call fails: with an error and nothing done; for transfers with half of it done, with
 * nothing done and no error, or with half of it done and an error; or the program is killed. */
enum { REFUSED, SHORT, ZERO, TORN, KILLED };
enum { PATH_BYTES = 4096, WHAT_BYTES = 512 };

static char root[PATH_BYTES];
static size_t root_bytes;
static atomic_long calls, target;
static atomic_int armed;
static int how, error_number, counted;
static bool lasting;
static char what[WHAT_BYTES];

void interpose_root(const char *path) {
    root_bytes = strlen(path);
    memcpy(root, path, root_bytes + 1);
}

void interpose_arm(int way, int error, int classes, long number, int is_lasting) {
    how = way;
    error_number = error;
    counted = classes;
    lasting = is_lasting;
    what[0] = 0;
    atomic_store(&calls, 0);
    atomic_store(&target, number);
    atomic_store(&armed, 1);
}

/* Gives how many calls there were; `hit` is the one that failed, empty if none did. */
long interpose_disarm(char *hit) {
    atomic_store(&armed, 0);
    memcpy(hit, what, sizeof what);
    return atomic_load(&calls);
}

static bool is_below(const char *path) { return root_bytes && !strncmp(path, root, root_bytes); }

static bool path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t nbytes = syscall(SYS_readlink, link, path, PATH_BYTES - 1);
    path[nbytes < 0 ? 0 : nbytes] = 0;
    return nbytes >= 0;
}

static bool fails(const char *name, const char *path) {
    const long number = atomic_fetch_add(&calls, 1), wanted = atomic_load(&target);
    if (number != wanted && !(lasting && number > wanted && wanted >= 0))
        return false;
    if (how == KILLED)
        kill(getpid(), SIGKILL);
    if (number == wanted)
        snprintf(what, sizeof what, "%s %s", name, path);
    return true;
}

static bool fails_at_path(int class, const char *name, int directory, const char *given) {
    char path[PATH_BYTES], folder[PATH_BYTES];
    int fd;
    if (!atomic_load(&armed) || !(counted & class) || !given)
        return false;
    if (sscanf(given, "/proc/self/fd/%d", &fd) == 1)
        path_of(fd, path);
    else if (given[0] != '/' && directory >= 0 && path_of(directory, folder))
        snprintf(path, sizeof path, "%.2000s/%.2000s", folder, given);
    else
        snprintf(path, sizeof path, "%s", given);
    return is_below(path) && fails(name, path);
}

static bool fails_at_fd(int class, const char *name, int fd) {
    char path[PATH_BYTES];
    return atomic_load(&armed) && (counted & class) && path_of(fd, path) && is_below(path) &&
           fails(name, path);
}

static int refused(void) {
    errno = error_number;
    return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENING(name)                                                                              \
    int name(const char *path, int flags, ...) {                                                   \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;              \
        va_end(rest);                                                                              \
        return fails_at_path(OPEN, #name, -1, path) ? refused() : REAL(name)(path, flags, mode);   \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name)                                                                           \
    int name(int directory, const char *path, int flags, ...) {                                    \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;              \
        va_end(rest);                                                                              \
        if (fails_at_path(OPEN, #name, directory, path))                                           \
            return refused();                                                                      \
        return REAL(name)(directory, path, flags, mode);                                           \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

/* How many bytes of a transfer that fails are done all the same: whole sectors where there are. */
static size_t half_of(size_t nbytes) {
    const size_t half = nbytes / 2;
    return half >= 512 ? half - half % 512 : half;
}

#define TRANSFER_AT(name, class, buffer)                                                           \
    ssize_t name(int fd, buffer data, size_t nbytes, off_t offset) {                               \
        if (!fails_at_fd(class, #name, fd))                                                        \
            return REAL(name)(fd, data, nbytes, offset);                                           \
        const size_t done = how == SHORT || how == TORN ? half_of(nbytes) : 0;                     \
        const ssize_t moved = done ? REAL(name)(fd, data, done, offset) : 0;                       \
        return how == SHORT || how == ZERO ? moved : refused();                                    \
    }
TRANSFER_AT(pread, READ, void *)
TRANSFER_AT(pread64, READ, void *)
TRANSFER_AT(pwrite, WRITE, const void *)
TRANSFER_AT(pwrite64, WRITE, const void *)

#define TRANSFER(name, class, buffer)                                                              \
    ssize_t name(int fd, buffer data, size_t nbytes) {                                             \
        if (!fails_at_fd(class, #name, fd))                                                        \
            return REAL(name)(fd, data, nbytes);                                                   \
        const size_t done = how == SHORT || how == TORN ? half_of(nbytes) : 0;                     \
        const ssize_t moved = done ? REAL(name)(fd, data, done) : 0;                               \
        return how == SHORT || how == ZERO ? moved : refused();                                    \
    }
TRANSFER(read, READ, void *)
TRANSFER(write, WRITE, const void *)

#define AT_FD(name, class, parameters, arguments)                                                  \
    int name parameters { return fails_at_fd(class, #name, fd) ? refused() : REAL(name) arguments; }
AT_FD(fsync, SYNC, (int fd), (fd))
AT_FD(fdatasync, SYNC, (int fd), (fd))
AT_FD(fallocate, SPACE, (int fd, int mode, off_t at, off_t nbytes), (fd, mode, at, nbytes))
AT_FD(fallocate64, SPACE, (int fd, int mode, off_t at, off_t nbytes), (fd, mode, at, nbytes))
AT_FD(ftruncate, SPACE, (int fd, off_t nbytes), (fd, nbytes))
AT_FD(ftruncate64, SPACE, (int fd, off_t nbytes), (fd, nbytes))
AT_FD(flock, LOCK, (int fd, int operation), (fd, operation))

#define AT_PATH(name, class, directory, path, parameters, arguments)                               \
    int name parameters {                                                                          \
        return fails_at_path(class, #name, directory, path) ? refused() : REAL(name) arguments;    \
    }
AT_PATH(rename, NAME, -1, to, (const char *from, const char *to), (from, to))
AT_PATH(renameat, NAME, there, to, (int here, const char *from, int there, const char *to),
        (here, from, there, to))
AT_PATH(unlink, NAME, -1, path, (const char *path), (path))
AT_PATH(unlinkat, NAME, at, path, (int at, const char *path, int flags), (at, path, flags))
AT_PATH(rmdir, NAME, -1, path, (const char *path), (path))
AT_PATH(mkdir, NAME, -1, path, (const char *path, mode_t mode), (path, mode))
AT_PATH(mkdirat, NAME, at, path, (int at, const char *path, mode_t mode), (at, path, mode))
AT_PATH(link, NAME, -1, to, (const char *from, const char *to), (from, to))
AT_PATH(linkat, NAME, there, to, (int here, const char *from, int there, const char *to, int flags),
        (here, from, there, to, flags))

DIR *opendir(const char *path) {
    if (!fails_at_path(LIST, "opendir", -1, path))
        return REAL(opendir)(path);
    errno = error_number;
    return NULL;
}

/* Memory is nobody's file: all of it counts. */
void *mmap(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    if (fd < 0 && atomic_load(&armed) && (counted & MEMORY) && fails("mmap", "")) {
        errno = error_number;
        return MAP_FAILED;
    }
    return REAL(mmap)(at, nbytes, protection, flags, fd, offset);
}

/* Queues of the kernel take requests past the calls above: where calls are to fail they are not to
 * be had. Where the program is to be killed, what goes into them counts. */
long syscall(long number, ...) {
    long given[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        given[i] = va_arg(rest, long);
    va_end(rest);
    if (atomic_load(&armed) && how == KILLED) {
        if (number == SYS_io_submit || number == SYS_io_uring_enter)
            fails("submit", "");
    } else if (root_bytes && (number == SYS_io_setup || number == SYS_io_uring_setup)) {
        errno = ENOSYS;
        return -1;
    }
    return REAL(syscall)(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
