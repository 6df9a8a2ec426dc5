/* Opening and closing within one call: the caller has the descriptor whenever it is open. */
#include <errno.h>
#include <fcntl.h>
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

int aio_descriptor_close(aio_descriptor *descriptor) {
    /* Given up first: by the second close the number may be another thread's file. */
    const int number = __atomic_exchange_n(&descriptor->number, -1, __ATOMIC_ACQ_REL);
    return number >= 0 && close(number) ? -errno : 0;
}
