#include "inode.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util.h"

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static struct inode *table;

static void lock_table(void) { pthread_mutex_lock(&table_lock); }
static void unlock_table(void) { pthread_mutex_unlock(&table_lock); }

/* No child is forked while another thread has the table locked. */
static void prepare_for_forks(void) { pthread_atfork(lock_table, unlock_table, unlock_table); }

static struct inode *known(const struct stat *status) {
    struct inode *inode = table;
    while (inode && (inode->device != status->st_dev || inode->number != status->st_ino ||
                     inode->pid != getpid()))
        inode = inode->next;
    return inode;
}

static struct inode *add(const struct stat *status) {
    struct inode *inode = calloc(1, sizeof *inode);
    if (inode) {
        pthread_mutex_init(&inode->lock, NULL);
        inode->device = status->st_dev;
        inode->number = status->st_ino;
        inode->pid = getpid();
        inode->next = table;
        table = inode;
    }
    return inode;
}

int inode_find(int fd, uint64_t size, struct inode **result) {
    struct stat status;
    if (fstat(fd, &status))
        return -errno;
    pthread_once(&prepared, prepare_for_forks);
    lock_table();
    struct inode *inode = known(&status);
    if (!inode)
        inode = add(&status);
    if (inode)
        inode->num_users++;
    unlock_table();
    if (!inode)
        return -ENOMEM;
    pthread_mutex_lock(&inode->lock);
    inode->size = aio_max(inode->size, size);
    pthread_mutex_unlock(&inode->lock);
    *result = inode;
    return 0;
}

void inode_leave(struct inode *inode) {
    lock_table();
    if (!--inode->num_users) {
        struct inode **place = &table;
        while (*place != inode)
            place = &(*place)->next;
        *place = inode->next;
        pthread_mutex_destroy(&inode->lock);
        free(inode);
    }
    unlock_table();
}
