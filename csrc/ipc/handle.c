/* handle.c - handles: made of a block, and read.
 * Concurrency: `exporting` is held while a region is entered into the ledger, once.                                  */
#include "ipc.h"
#include "../error.h"
#include "../fork.h"
#include "../space.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x3148686au /* "jhH1" */

_Static_assert(sizeof(jh_handle) == sizeof(jemhooks_ipc_handle), "a handle has 64 bytes");

static pthread_mutex_t exporting = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void) {
    pthread_mutex_init(&exporting, NULL);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

static uint64_t hash(const void *bytes, size_t length) {
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a, 64 bits */
    for (size_t i = 0; i < length; i++) h = (h ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return h;
}

/* This boot of this machine; never 0. 0 or -errno, recorded. */
static int this_host(uint32_t *host) {
    static atomic_uint known;
    char id[64] = "";
    if ((*host = atomic_load(&known))) return 0;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!f || !fgets(id, sizeof id, f)) {
        int err = errno;
        if (f) fclose(f);
        return jh_fail(JEMHOOKS_ERROR_PROVIDER, err, "memory in other processes: reading /proc/sys/kernel/random/boot_id: %s%s", strerror(err),
                       err == EMFILE ? "; close some files, or raise the limit (ulimit -n)" : "");
    }
    fclose(f);
    atomic_store(&known, *host = (uint32_t)hash(id, strlen(id)) | 1);
    return 0;
}

/* Which file the region is of, and where in it. 0 or -errno, recorded. */
static int find_file(const jh_region *r, jh_ledger_entry *entry) {
    const jemhooks_provider *p = r->space->provider;
    int rc = -EOPNOTSUPP;
    if (p->ops.share) rc = p->ops.share(p->self, r->space->tenant, &r->registration.pages.mapping, &entry->fd, &entry->offset);
    if (!rc) return 0;
    return jh_fail(JEMHOOKS_ERROR_PROVIDER, -rc, "exporting memory of arena '%s': %s memory cannot be mapped by other processes; make the "
                   "arena over a memfd, file or devdax provider", r->space->rails.name, p->ops.name);
}

/* What importers check the file by. 0 or -errno, recorded. */
static int describe(const jh_region *r, jh_ledger_entry *entry) {
    struct stat st;
    if (fstat(entry->fd, &st))
        return jh_fail(JEMHOOKS_ERROR_PROVIDER, errno, "exporting memory of arena '%s': fstat of its file: %s", r->space->rails.name,
                       strerror(errno));
    int seals = fcntl(entry->fd, F_GET_SEALS);
    entry->device = st.st_dev;
    entry->inode = st.st_ino;
    entry->length = r->registration.pages.mapping.length;
    entry->page = r->space->provider->page;
    entry->sealed = seals >= 0 && seals & F_SEAL_SHRINK;
    return 0;
}

/* The region's slot and serial; the first time it is entered. */
static int enter(jh_region *r, jh_ledger_entry *entry, jh_handle *h) {
    pthread_mutex_lock(&exporting);
    unsigned slot = atomic_load(&r->exported);
    int rc = 0;
    if (slot) h->serial = jh_ledger_serial(slot);
    else if (!(rc = describe(r, entry)) && !(rc = jh_ledger_enter(entry, &slot, &h->serial))) atomic_store(&r->exported, slot);
    h->slot = slot;
    pthread_mutex_unlock(&exporting);
    return rc;
}

int jh_ipc_export(const void *p, size_t length, unsigned flags, jemhooks_ipc_handle *handle, jh_descriptors *fds) {
    static const char call[] = "jemhooks_ipc_export";
    if (!handle || flags & ~JEMHOOKS_IPC_READ_ONLY)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: nowhere to put the handle, or flags 0x%x beyond JEMHOOKS_IPC_READ_ONLY", call, flags);
    jh_region *r = jh_region_at(p);
    if (!r) return jh_fail(JEMHOOKS_ERROR_NOT_OURS, ENOENT, "%s: address %p lies in no region of any arena", call, p);
    if (jh_frozen(r->space->rails.epoch))
        return jh_fail(JEMHOOKS_ERROR_FORK, ECHILD, "%s: arena '%s' was made before the fork and is frozen in this process; export in the "
                       "parent", call, r->space->rails.name);
    if (!length) length = jemhooks_usable_size(p);
    jh_handle h = {MAGIC, 0, 0, (uint32_t)getpid(), 0, 0, flags, 0, (uintptr_t)p - r->registration.hot->base, length, 0};
    if (length > r->registration.hot->length - h.offset)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: %zu bytes at %p reach beyond their region, which ends after %zu; export one "
                       "block at a time", call, length, p, (size_t)(r->registration.hot->length - h.offset));
    jh_ledger_entry entry = {0};
    jh_ledger_owner owner;
    int rc = this_host(&h.host);
    if (!rc) rc = find_file(r, &entry);
    if (!rc) rc = jh_ledger_own(&owner);
    if (!rc) rc = enter(r, &entry, &h);
    if (rc) return rc;
    h.ledger = owner.id;
    h.fd = (uint32_t)owner.fd;
    h.check = hash(&h, offsetof(jh_handle, check));
    memcpy(handle, &h, sizeof h);
    *fds = (jh_descriptors){owner.fd, entry.fd};
    return 0;
}

int jemhooks_ipc_export(const void *p, size_t length, unsigned flags, jemhooks_ipc_handle *handle) {
    jh_descriptors fds;
    return jh_ipc_export(p, length, flags, handle, &fds);
}

int jh_ipc_decode(const jemhooks_ipc_handle *handle, jh_handle *h) {
    memcpy(h, handle, sizeof *h);
    if (h->magic != MAGIC || h->check != hash(h, offsetof(jh_handle, check)) || !h->slot || h->slot >= JH_LEDGER_ENTRIES || !h->serial || !h->length)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "opening memory of another process: these 64 bytes are no handle of this version, or "
                       "were changed on the way; pass on what jemhooks_ipc_export() gave");
    uint32_t host;
    int rc = this_host(&host);
    if (rc || h->host == host) return rc;
    return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "opening memory of another process: the handle was made on another host, or before this "
                   "one was booted; memory can only be mapped where it is");
}
