/* devdax.c - a dax device: persistent or special memory that the kernel lets a process map as it is, in large pages only. It keeps
 * what was written to it, and has no pages to give back.
 * No state but the mapping; its functions may run at any time.                                                       */
#include "place.h"
#include "provider.h"
#include "../error.h"
#include "../pagemap.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

typedef struct {
    int fd;
    void *base;
    size_t length;
} devdax;

static int share(void *self, void *tenant, const jemhooks_mapping *m, int *fd, uint64_t *offset) {
    (void)tenant;
    *fd = ((devdax *)self)->fd;
    *offset = m->offset;
    return 0;
}

static void finish(void *self) {
    devdax *d = self;
    if (d->base) jh_displace(d->base, d->length);
    flock(d->fd, LOCK_UN); /* or a forked child would keep it */
    close(d->fd);
    free(d);
}

/* A number that sysfs tells about the device; 0: it does not. */
static size_t attribute(const struct stat *st, const char *name) {
    char path[128];
    unsigned long long value = 0;
    snprintf(path, sizeof path, "/sys/dev/char/%u:%u/%s", major(st->st_rdev), minor(st->st_rdev), name);
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    if (fscanf(f, "%llu", &value) != 1) value = 0;
    fclose(f);
    return (size_t)value;
}

static bool is_dax(const struct stat *st) {
    char path[128], target[PATH_MAX];
    if (!S_ISCHR(st->st_mode)) return false;
    snprintf(path, sizeof path, "/sys/dev/char/%u:%u/subsystem", major(st->st_rdev), minor(st->st_rdev));
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n < 0) return false;
    target[n] = 0;
    return !strcmp(strrchr(target, '/') ? strrchr(target, '/') : target, "/dax");
}

static int map_device(devdax *d, const char *path) {
    struct stat st;
    if (fstat(d->fd, &st) || !is_dax(&st))
        return jh_fail(JEMHOOKS_ERROR_PROVIDER, ENOTTY, "devdax: %s is not a dax device; `ndctl create-namespace --mode=devdax` makes "
                       "one, of persistent memory, and `ls /dev/dax*` lists them", path);
    if (flock(d->fd, LOCK_EX | LOCK_NB))
        return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "devdax: %s is locked: another provider, here or in another process, has it (flock: "
                       "%s)", path, strerror(errno));
    size_t page = attribute(&st, "align");
    if (!page) page = JH_SLOT;
    d->length = attribute(&st, "size") & ~(page - 1);
    if (d->length) d->base = jh_place(d->length, page, MAP_SHARED, d->fd, 0);
    if (d->base) return 0;
    return jh_fail(JEMHOOKS_ERROR_PROVIDER, d->length ? errno : ENXIO, "devdax: mapping %zu bytes of %s, in pages of %zu: %s; `daxctl list` "
                   "tells its size and alignment", d->length, path, page, d->length ? strerror(errno) : "it has none");
}

int jemhooks_provider_devdax(const jemhooks_devdax_config *config, jemhooks_provider **provider) {
    jemhooks_devdax_config c = JEMHOOKS_DEVDAX_CONFIG_INIT;
    int rc = jh_config_read(&c, sizeof c, config, "devdax");
    if (rc) return rc;
    if (!provider || !c.path) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "devdax: a path and somewhere to put the provider are needed");
    devdax *d = calloc(1, sizeof *d);
    if (!d) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "devdax: no memory for the provider itself");
    d->fd = open(c.path, O_RDWR | O_CLOEXEC);
    if (d->fd < 0) {
        rc = jh_fail(JEMHOOKS_ERROR_PROVIDER, errno, "devdax: opening %s: %s; `ls -l /dev/dax*` tells which devices there are, and whose",
                     c.path, strerror(errno));
        free(d);
        return rc;
    }
    const jemhooks_provider_ops ops = {.size = sizeof ops, .name = "devdax", .share = share, .close = finish};
    jemhooks_provider *p;
    if ((rc = map_device(d, c.path)) || (rc = jh_provider_new(&ops, d, &p))) {
        finish(d);
        return rc;
    }
    if ((rc = jh_provider_add(p, &(jemhooks_mapping){d->base, d->length, 0, false}, 1, c.shared))) jemhooks_provider_close(p);
    else *provider = p;
    return rc;
}
