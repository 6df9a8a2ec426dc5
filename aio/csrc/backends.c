/* The ways of doing I/O that there are. A new one is a file with its `backend_ops`, and its
 * name in this list. */
#include <stddef.h>

#include "backend.h"

/* Best first. Those after posix, which always works, are taken by name only. */
#define EACH_BACKEND(of)                                                                           \
    of(aio_uring_backend) of(aio_libaio_backend) of(aio_posix_backend) of(aio_memory_backend)

#define DECLARE(ops) extern const struct backend_ops ops;
EACH_BACKEND(DECLARE)

#define ADDRESS(ops) &ops,
static const struct backend_ops *const backends[] = {EACH_BACKEND(ADDRESS)};

static const struct backend_ops *backend_at(int32_t backend) {
    const size_t count = sizeof backends / sizeof *backends;
    return backend >= 0 && (size_t)backend < count ? backends[backend] : NULL;
}

const struct backend_ops *aio_backend_find(int32_t backend) {
    const struct backend_ops *found = backend_at(backend);
    return found && found->setup ? found : NULL;
}

const char *aio_backend_name(int32_t backend) {
    const struct backend_ops *found = backend_at(backend);
    return found ? found->name : NULL;
}

const char *aio_backend_detail(int32_t backend) {
    const struct backend_ops *found = backend_at(backend);
    return found && found->detail ? found->detail() : "";
}
