#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "util.h"

/* struct statx by its kernel offsets, so that headers older than 6.1 build the same module. */
#define STATX_BYTES 256
#define STATX_DIOALIGN_BIT 0x2000u
#define STATX_MASK_AT 0
#define STATX_DIO_MEMORY_AT 152
#define STATX_DIO_OFFSET_AT 156
#define MAX_INTERRUPTIONS 1000u

int aio_file_new(aio_file **result, int32_t direct_fd, int32_t buffered_fd,
                 uint32_t memory_alignment, uint32_t offset_alignment, uint64_t size) {
    aio_file *file = calloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    const int error = inode_find(buffered_fd, size, &file->inode);
    if (error) {
        free(file);
        return error;
    }
    file->direct_fd = direct_fd;
    file->buffered_fd = buffered_fd;
    file->memory_alignment = memory_alignment;
    file->unit = (uint32_t)aio_max(offset_alignment, aio_page_bytes());
    atomic_init(&file->direct_refused, false);
    *result = file;
    return 0;
}

void aio_file_drop(aio_file **file) {
    if (!*file)
        return;
    inode_leave((*file)->inode);
    free(*file);
    *file = NULL;
}

/* Since 6.6 tmpfs takes O_DIRECT and copies all the same; it reports no alignment. */
static bool lives_in_memory(int fd) {
    struct statfs status;
    return !fstatfs(fd, &status) && (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC);
}

int aio_file_alignment(int32_t fd, aio_alignment *alignment) {
    uint8_t fields[STATX_BYTES] = {0};
    uint32_t mask;
    memset(alignment, 0, sizeof *alignment);
    if (lives_in_memory(fd)) {
        alignment->known = 1;
        return 0;
    }
    /* Containers that are older than the call say EPERM for ENOSYS. */
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN_BIT, fields))
        return errno == ENOSYS || errno == EPERM ? 0 : -errno;
    memcpy(&mask, fields + STATX_MASK_AT, sizeof mask);
    if (mask & STATX_DIOALIGN_BIT) {
        alignment->known = 1;
        memcpy(&alignment->memory, fields + STATX_DIO_MEMORY_AT, sizeof alignment->memory);
        memcpy(&alignment->offset, fields + STATX_DIO_OFFSET_AT, sizeof alignment->offset);
    }
    return 0;
}

static int allocate(const aio_file *file, uint64_t offset, uint64_t end) {
    if (!fallocate(file->buffered_fd, 0, (off_t)offset, (off_t)(end - offset)))
        return 0;
    return errno == ENOSYS ? -EOPNOTSUPP : -errno;
}

static int allocate_without_signals(const aio_file *file, uint64_t offset, uint64_t end) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = allocate(file, offset, end);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* In bytes, or -errno. */
static int64_t length_of(const aio_file *file) {
    struct stat status;
    if (fstat(file->buffered_fd, &status))
        return -errno;
    return S_ISBLK(status.st_mode) ? lseek(file->buffered_fd, 0, SEEK_END) : status.st_size;
}

static int set_length(const aio_file *file, uint64_t size) {
    return ftruncate(file->buffered_fd, (off_t)size) ? -errno : 0;
}

int aio_file_allocate(aio_file *file, uint64_t offset, uint64_t nbytes, int32_t unhindered) {
    struct inode *inode = file->inode;
    int error;
    if (!nbytes)
        return 0;
    pthread_mutex_lock(&inode->lock);
    const int64_t before = length_of(file);
    if (before < 0)
        error = (int)before;
    else if (unhindered)
        error = allocate_without_signals(file, offset, offset + nbytes);
    else
        error = allocate(file, offset, offset + nbytes);
    if (!error)
        inode->size = aio_max(inode->size, offset + nbytes);
    else if (before >= 0 && error != -EOPNOTSUPP) {
        /* An allocation that ends half way has made the file longer. What writes in flight have
         * been promised stays: those of this process make the file longer under this lock only. */
        const uint64_t kept = aio_max((uint64_t)before, inode->size);
        const int64_t now = length_of(file);
        for (uint32_t i = 0; now > 0 && (uint64_t)now > kept && i < MAX_INTERRUPTIONS; i++)
            if (set_length(file, kept) != -EINTR)
                break;
    }
    pthread_mutex_unlock(&inode->lock);
    return error;
}

int aio_file_zero(const aio_file *file, uint64_t offset, uint64_t nbytes) {
    const int mode = FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE;
    if (!nbytes || !fallocate(file->buffered_fd, mode, (off_t)offset, (off_t)nbytes))
        return 0;
    return errno == ENOSYS ? -EOPNOTSUPP : -errno;
}

int aio_file_extend(aio_file *file, uint64_t end) {
    struct inode *inode = file->inode;
    int error = 0;
    pthread_mutex_lock(&inode->lock);
    const int64_t now = length_of(file);
    if (now < 0) {
        error = (int)now;
    } else if ((uint64_t)now < end) {
        /* Never below what writes in flight may have reached by now. */
        const uint64_t size = aio_max(end, inode->size);
        error = set_length(file, size);
        if (!error)
            inode->size = size;
    }
    pthread_mutex_unlock(&inode->lock);
    return error;
}

int aio_file_truncate(aio_file *file, uint64_t size) {
    struct inode *inode = file->inode;
    pthread_mutex_lock(&inode->lock);
    const int error = set_length(file, size);
    if (!error)
        inode->size = size;
    pthread_mutex_unlock(&inode->lock);
    return error;
}

int aio_file_direct_refused(const aio_file *file) { return atomic_load(&file->direct_refused); }

void aio_file_refuse_direct(aio_file *file) {
    if (!atomic_exchange(&file->direct_refused, true))
        posix_fadvise(file->buffered_fd, 0, 0, POSIX_FADV_NORMAL);
}

int aio_file_grow(aio_file *file, uint64_t offset, uint64_t end) {
    struct inode *inode = file->inode;
    int error = 0;
    pthread_mutex_lock(&inode->lock);
    if (end > inode->size) {
        /* The lock is held over the call, so that two lanes do not reserve the same range. A hole
         * that lies below `offset` stays a hole. */
        for (uint32_t i = 0; !inode->cannot_allocate && i < MAX_INTERRUPTIONS; i++) {
            error = allocate(file, aio_max(offset, inode->size), end);
            if (error != -EINTR)
                break;
            aio_pause(); /* a lane takes no signals: it is the file system that says so */
        }
        if (error == -EOPNOTSUPP) {
            inode->cannot_allocate =
                true; /* the writes grow the file, and meet ENOSPC themselves */
            error = 0;
        }
        if (!error)
            inode->size = end;
    }
    pthread_mutex_unlock(&inode->lock);
    return error;
}
