/* growing.c - a file of an arena's own, which grows by a region at a time. Regions end with their arena only, so no offset is used
 * twice: whoever still maps the file sees what was there, and never another arena's bytes.
 * Concurrency: `growing` is held while the file is made longer; all else is system calls.                            */
#include "growing.h"
#include "place.h"
#include "../pagemap.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

struct jh_growing {
    int fd, flags;
    pthread_mutex_t growing; /* guards the next two                                                         */
    uint64_t end;            /* where the next region begins                                                */
    uint64_t length;         /* of the file; more where a mapping failed, and it must not be made shorter   */
};

int jh_growing_open(int fd, int flags, void **tenant) {
    jh_growing *g = calloc(1, sizeof *g);
    if (!g) {
        close(fd);
        return -ENOMEM;
    }
    g->fd = fd;
    g->flags = flags;
    pthread_mutex_init(&g->growing, NULL);
    *tenant = g;
    return 0;
}

void jh_growing_leave(void *self, void *tenant) {
    jh_growing *g = tenant;
    (void)self;
    close(g->fd);
    pthread_mutex_destroy(&g->growing);
    free(g);
}

bool jh_file_allowed(uint64_t length) {
    struct rlimit limit;
    return length <= INT64_MAX && (getrlimit(RLIMIT_FSIZE, &limit) || length <= limit.rlim_cur);
}

int jh_file_resize(int fd, uint64_t length) {
    if (!jh_file_allowed(length)) return -EFBIG;
    return ftruncate(fd, (off_t)length) ? -errno : 0;
}

int jh_growing_map(void *self, void *tenant, size_t alignment, jemhooks_mapping *m) {
    jh_growing *g = tenant;
    void *base = NULL;
    (void)self;
    pthread_mutex_lock(&g->growing);
    uint64_t offset = g->end, end = offset + m->length;
    int err = end > g->length ? -jh_file_resize(g->fd, end) : 0;
    if (!err && end > g->length) g->length = end;
    if (!err && !(base = jh_place(m->length, alignment, g->flags, g->fd, offset))) err = errno;
    if (base) g->end = (end + JH_SLOT - 1) & ~(JH_SLOT - 1); /* so that huge pages of the file are huge pages of the region */
    pthread_mutex_unlock(&g->growing);
    if (!base) return -err;
    *m = (jemhooks_mapping){base, m->length, offset, true};
    return 0;
}

void jh_growing_unmap(void *self, void *tenant, const jemhooks_mapping *m) {
    (void)self, (void)tenant;
    jh_displace(m->base, m->length);
}

int jh_file_punch(int fd, uint64_t offset, size_t length) {
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)length) ? -errno : 0;
}

int jh_file_reserve(int fd, uint64_t offset, size_t length) {
    int rc;
    while ((rc = fallocate(fd, FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)length)) && errno == EINTR) {}
    return rc ? -errno : 0;
}

int jh_growing_give_back(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length) {
    (void)self;
    return jh_file_punch(((jh_growing *)tenant)->fd, m->offset + at, length);
}

int jh_growing_reserve(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length) {
    (void)self;
    return jh_file_reserve(((jh_growing *)tenant)->fd, m->offset + at, length);
}

int jh_growing_share(void *self, void *tenant, const jemhooks_mapping *m, int *fd, uint64_t *offset) {
    (void)self;
    *fd = ((jh_growing *)tenant)->fd;
    *offset = m->offset;
    return 0;
}
