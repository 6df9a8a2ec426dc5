/* What is known of the length of a file, shared by all that this process has open on it. */
#ifndef AIO_INODE_H
#define AIO_INODE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct inode {
    pthread_mutex_t lock; /* guards the two below, and is held while the length changes */
    uint64_t size;        /* the file is known to reach at least this far */
    bool cannot_allocate;
    dev_t device;
    ino_t number;
    pid_t pid; /* a forked child has its own: the lock may be one of its parent's threads' */
    uint64_t num_users; /* guarded by the table's lock, as `next` is */
    struct inode *next;
};

/* The inode of a descriptor, which reaches to `size` at least; to be left once. 0 or -errno. */
int inode_find(int fd, uint64_t size, struct inode **inode);
void inode_leave(struct inode *inode);

#endif
