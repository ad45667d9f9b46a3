/* file.c - memory in files: on ordinary file systems, on tmpfs, and (without a page cache between) on persistent memory.
 * A directory gives each arena a file without a name; a named file is mapped once, and arenas divide it. Pages are given back by
 * punching holes, and what is used again is reserved first, so that a full file system refuses an allocation and does not kill.
 * Concurrency: no state but descriptors and one mapping; its functions may run at any time.                          */
#include "growing.h"
#include "place.h"
#include "../error.h"
#include "../pagemap.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

typedef struct {
    int fd;         /* of the file, or of the directory                       */
    int flags;      /* of mmap                                                */
    void *base;     /* of the file; NULL: it is a directory                   */
    size_t length;
    void *tenant;   /* of all arenas in a named file                          */
} file;

static int enter_file(void *self, const char *arena, void **tenant) {
    (void)arena;
    *tenant = ((file *)self)->tenant;
    return 0;
}

static int enter_directory(void *self, const char *arena, void **tenant) {
    const file *f = self;
    int fd = openat(f->fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0) return jh_growing_open(fd, f->flags, tenant);
    int err = errno;
    jemhooks_set_error("no file for arena '%s' in its directory: %s", arena, strerror(err));
    return -err;
}

static void finish(void *self) {
    file *f = self;
    if (f->base) jh_displace(f->base, f->length);
    if (f->fd >= 0) flock(f->fd, LOCK_UN); /* or a forked child would keep it */
    if (f->tenant) jh_growing_leave(f, f->tenant);
    else if (f->fd >= 0) close(f->fd);
    free(f);
}

static int failed(const char *path, const char *what, int err, const char *remedy) {
    return jh_fail(JEMHOOKS_ERROR_PROVIDER, err, "file: %s: %s: %s%s", path, what, strerror(err), remedy);
}

/* What can be done with the first page of a file that is at least so long: can it be mapped as persistent memory, and does a hole
 * read as zero? 0 or an error, recorded. */
static int probe(file *f, int fd, const char *path, bool *punches) {
    char byte = 1;
    void *p = mmap(NULL, JH_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    f->flags = p == MAP_FAILED ? MAP_SHARED : MAP_SHARED_VALIDATE | MAP_SYNC;
    if (p != MAP_FAILED) munmap(p, JH_PAGE);
    int rc = jh_file_allowed(JH_PAGE) ? jh_file_reserve(fd, 0, JH_PAGE) : -EFBIG;
    if (rc == -EOPNOTSUPP)
        return failed(path, "reserving room", -rc, "; this file system cannot, so that touching memory when it is full would end the "
                      "process: use tmpfs, ext4, xfs or btrfs, or a memfd");
    if (rc) return failed(path, "reserving room for a page", -rc, rc == -EFBIG ? "; `ulimit -f` forbids it" : "");
    if (pwrite(fd, &byte, 1, 0) != 1) return failed(path, "writing", errno, "");
    *punches = !jh_file_punch(fd, 0, JH_PAGE) && pread(fd, &byte, 1, 0) == 1 && !byte;
    return 0;
}

static int open_directory(file *f, const jemhooks_file_config *c, bool *punches) {
    if (c->length || c->overwrite)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "file: %s is a directory, whose arenas get files that grow: a length of %zu bytes and "
                       "overwrite are for a file", c->path, c->length);
    int fd = openat(f->fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return failed(c->path, "making a file without a name in this directory", errno, errno == EOPNOTSUPP || errno == EISDIR
                      ? "; its file system cannot (O_TMPFILE): name a file, with a length, or another directory" : "");
    int rc = jh_file_resize(fd, JH_PAGE);
    rc = rc ? failed(c->path, "making a file of 4 KiB", -rc, rc == -EFBIG ? "; `ulimit -f` forbids it" : "") : probe(f, fd, c->path, punches);
    close(fd);
    return rc;
}

/* How long the file is to be. 0 or an error, recorded. */
static int check_length(const file *f, const jemhooks_file_config *c, bool made, size_t *length) {
    struct stat st;
    if (fstat(f->fd, &st)) return failed(c->path, "fstat", errno, "");
    if (!S_ISREG(st.st_mode))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "file: %s is neither a directory nor an ordinary file", c->path);
    if (c->length % JH_PAGE || (made && !c->length))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "file: a length of %zu bytes for %s; a new file has a multiple of 4096", c->length,
                       c->path);
    *length = c->length ? c->length : (size_t)st.st_size & ~(JH_PAGE - 1);
    size_t least = *length ? *length : JH_PAGE;
    if (!made && (size_t)st.st_size < least)
        return jh_fail(JEMHOOKS_ERROR_PROVIDER, ERANGE, "file: %s has only %zu bytes, and %zu are wanted; an existing file is not made "
                       "longer: `truncate -s %zu` does", c->path, (size_t)st.st_size, least, least);
    return 0;
}

static int open_file(file *f, const jemhooks_file_config *c, bool *punches) {
    bool made = f->fd < 0;
    if (made && c->overwrite)
        return failed(c->path, "opening it to overwrite it", ENOENT, "; leave overwrite out to make a new one");
    if (made) f->fd = open(c->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (f->fd < 0) return failed(c->path, "making this file", errno, "");
    int rc = check_length(f, c, made, &f->length);
    if (!rc && flock(f->fd, LOCK_EX | LOCK_NB))
        rc = jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "file: %s is locked: another provider, here or in another process, has it (flock: %s)",
                     c->path, strerror(errno));
    if (!rc && made && (rc = jh_file_resize(f->fd, f->length)))
        rc = failed(c->path, "making it as long as asked", -rc, "; `ulimit -f` may limit it");
    if (!rc) rc = probe(f, f->fd, c->path, punches);
    if (!rc && !(f->base = jh_place(f->length, JH_SLOT, f->flags, f->fd, 0))) rc = failed(c->path, "mapping it", errno, "");
    if (!rc && jh_growing_open(f->fd, f->flags, &f->tenant)) {
        f->fd = -1;
        rc = jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "file: no memory for the provider itself");
    }
    if (rc && made) unlink(c->path);
    return rc;
}

static bool pinnable(int fd) {
    struct statfs fs;
    return !fstatfs(fd, &fs) && fs.f_type == TMPFS_MAGIC;
}

/* Opens what there is: f->fd is -1 where there is nothing. */
static int find(file *f, const jemhooks_file_config *c, bool *directory) {
    f->fd = open(c->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    *directory = f->fd >= 0;
    if (*directory) return 0;
    if (errno == ENOENT) return 0;
    if (errno != ENOTDIR) return failed(c->path, "opening it", errno, "");
    if (!c->overwrite)
        return jh_fail(JEMHOOKS_ERROR_PROVIDER, EEXIST, "file: %s is there already, and is left alone; overwrite it (its contents are then "
                       "lost), remove it, or name another", c->path);
    f->fd = open(c->path, O_RDWR | O_CLOEXEC);
    return f->fd < 0 ? failed(c->path, "opening it for writing", errno, "") : 0;
}

int jemhooks_provider_file(const jemhooks_file_config *config, jemhooks_provider **provider) {
    jemhooks_file_config c = JEMHOOKS_FILE_CONFIG_INIT;
    int rc = jh_config_read(&c, sizeof c, config, "file");
    if (rc) return rc;
    if (!provider || !c.path || !*c.path)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "file: a path and somewhere to put the provider are needed");
    file *f = calloc(1, sizeof *f);
    if (!f) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "file: no memory for the provider itself");
    bool directory, punches = false;
    f->fd = -1;
    if (!(rc = find(f, &c, &directory))) rc = directory ? open_directory(f, &c, &punches) : open_file(f, &c, &punches);
    if (rc) {
        finish(f);
        return rc;
    }
    const jemhooks_provider_ops ops = {
        .size = sizeof ops,
        .name = "file",
        .flags = pinnable(f->fd) ? 0 : JEMHOOKS_NOT_PINNABLE,
        .enter = directory ? enter_directory : enter_file,
        .leave = directory ? jh_growing_leave : NULL,
        .map = directory ? jh_growing_map : NULL,
        .unmap = directory ? jh_growing_unmap : NULL,
        .give_back = punches ? jh_growing_give_back : NULL,
        .reserve = jh_growing_reserve,
        .share = jh_growing_share,
        .close = finish,
    };
    jemhooks_provider *p;
    if ((rc = jh_provider_new(&ops, f, &p))) {
        finish(f);
        return rc;
    }
    const jemhooks_mapping whole = {f->base, f->length, 0, !c.overwrite};
    if (!directory && (rc = jh_provider_add(p, &whole, 1, true))) jemhooks_provider_close(p);
    else *provider = p;
    return rc;
}
