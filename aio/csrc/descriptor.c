/* Opening and closing within one call: the caller has the descriptor whenever it is open. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api.h"

int aio_descriptor_open(aio_descriptor *descriptor, int32_t directory, const char *path,
                        int32_t flags, uint32_t mode) {
    const int number = openat(directory < 0 ? AT_FDCWD : directory, path, flags, (mode_t)mode);
    if (number < 0)
        return -errno;
    __atomic_store_n(&descriptor->number, number, __ATOMIC_RELEASE);
    return 0;
}

int aio_temporary_create(aio_temporary *temporary, const char *path, uint32_t mode) {
    char *kept = strdup(path);
    if (!kept)
        return -ENOMEM;
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
    const int error = aio_descriptor_open(&temporary->descriptor, -1, path, flags, mode);
    if (error) {
        free(kept);
        return error;
    }
    temporary->pid = getpid();
    temporary->path = kept;
    return 0;
}

int aio_temporary_drop(aio_temporary *temporary) {
    char *path = __atomic_exchange_n(&temporary->path, NULL, __ATOMIC_ACQ_REL);
    int error = 0;
    if (path && temporary->pid == getpid() && unlink(path) && errno != ENOENT)
        error = -errno;
    free(path);
    aio_descriptor_close(&temporary->descriptor);
    return error;
}

int aio_descriptor_close(aio_descriptor *descriptor) {
    /* Given up first: by the second close the number may be another thread's file. */
    const int number = __atomic_exchange_n(&descriptor->number, -1, __ATOMIC_ACQ_REL);
    return number >= 0 && close(number) ? -errno : 0;
}

int aio_descriptor_punch(const aio_descriptor *descriptor, uint64_t offset, uint64_t nbytes) {
    const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (!nbytes || !fallocate(descriptor->number, mode, (off_t)offset, (off_t)nbytes))
        return 0;
    return errno == ENOSYS ? -EOPNOTSUPP : -errno;
}
