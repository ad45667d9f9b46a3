/* opened.c - the regions of other processes that are mapped here, and those that are kept for the next open.
 * A region is mapped once for all its blocks, found again by exporter, slot and serial. What nobody has open any more is kept,
 * the last few of it; what is gone in its exporter is dropped at the next open or close.
 * Concurrency: `lock` guards everything, held while descriptors are fetched and memory is mapped. Never taken in hooks.  */
#include "ipc.h"
#include "../error.h"
#include "../fork.h"
#include "../provider/place.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct exporter {
    struct exporter *next;
    uint64_t id;
    const jh_ledger *ledger;
    int fd;                         /* of the ledger                            */
    ino_t inode;                    /* the ledger's                             */
    size_t mappings;
} exporter;

typedef struct mapping {
    struct mapping *next;           /* of all                                   */
    struct mapping *newer, *older;  /* of those that are kept                   */
    exporter *from;
    uint32_t slot;
    uint64_t serial;
    bool writable;
    void *base;
    size_t length, open;            /* how many blocks of it are open           */
    unsigned epoch;                 /* jh_fork_epoch when it was made           */
} mapping;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static exporter *exporters;
static mapping *mappings[1024];     /* by serial and exporter                   */
static mapping *newest, *oldest;    /* without open blocks                      */
static size_t opened, kept, limit = 64;
static uint64_t hits, misses;

/* The parent's stay mapped, and unknown. */
static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    for (const exporter *e = exporters; e; e = e->next) close(e->fd);
    exporters = NULL;
    memset(mappings, 0, sizeof mappings);
    newest = oldest = NULL;
    opened = kept = 0;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

/* ---- exporters -------------------------------------------------------------------------------------------------- */

static void forget(exporter *e) {
    exporter **link = &exporters;
    while (*link != e) link = &(*link)->next;
    *link = e->next;
    jh_ledger_unmap(e->ledger);
    close(e->fd);
    free(e);
}

static int gone(const jh_handle *h, int err, const char *why) {
    return jh_fail(JEMHOOKS_ERROR_CLOSED, err, "opening %zu bytes of process %u: %s; ask for a new handle", (size_t)h->length, h->pid, why);
}

static ino_t inode_of(int fd) {
    struct stat st;
    return fstat(fd, &st) ? 0 : st.st_ino;
}

/* The exporter of the handle, which lives. NULL: recorded. */
static exporter *find_exporter(const jh_handle *h, int given) {
    exporter *e = exporters;
    while (e && e->id != h->ledger) e = e->next;
    if (!e) {
        int fd = given < 0 ? jh_ipc_fetch(h->pid, (int)h->fd) : fcntl(given, F_DUPFD_CLOEXEC, 0);
        if (fd < 0 && given >= 0)
            jh_fail(JEMHOOKS_ERROR_PROVIDER, errno, "opening memory of process %u: %s; raise the limit (ulimit -n)", h->pid, strerror(errno));
        if (fd < 0) return NULL;
        const jh_ledger *ledger = jh_ledger_map(fd, h->ledger);
        if (!ledger && errno == ESTALE) gone(h, ESTALE, "that process is not the one that made the handle, which has ended");
        else if (!ledger)
            jh_fail(JEMHOOKS_ERROR_PROVIDER, errno, "opening memory of process %u: mapping its table of 4 MiB: %s; the limits on address space "
                    "and mappings are ulimit -v and vm.max_map_count", h->pid, strerror(errno));
        e = ledger ? calloc(1, sizeof *e) : NULL;
        if (!e) {
            if (ledger) jh_ledger_unmap(ledger);
            if (ledger) jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "opening memory of process %u: no memory", h->pid);
            close(fd);
            return NULL;
        }
        *e = (exporter){exporters, h->ledger, ledger, fd, inode_of(fd), 0};
        exporters = e;
    }
    if (given >= 0 && inode_of(given) != e->inode) {
        gone(h, ESTALE, "the table that came along is another process's");
        return NULL;
    }
    if (jh_ledger_alive(e->fd)) return e;
    if (!e->mappings) forget(e);
    gone(h, ESRCH, "it has ended");
    return NULL;
}

static uint64_t serial_now(const exporter *e, uint32_t slot) {
    return atomic_load(&e->ledger->entry[slot - 1].serial);
}

/* ---- mappings --------------------------------------------------------------------------------------------------- */

static mapping **bucket(const exporter *e, uint64_t serial) {
    return &mappings[(e->id ^ serial * 0x9e3779b97f4a7c15u >> 20) % (sizeof mappings / sizeof *mappings)];
}

static void keep(mapping *m) {
    m->older = newest;
    m->newer = NULL;
    if (newest) newest->newer = m;
    else oldest = m;
    newest = m;
    kept++;
}

static void unkeep(mapping *m) {
    if (m->newer) m->newer->older = m->older;
    else newest = m->older;
    if (m->older) m->older->newer = m->newer;
    else oldest = m->newer;
    kept--;
}

static void drop(mapping *m) {
    mapping **link = bucket(m->from, m->serial);
    while (*link != m) link = &(*link)->next;
    *link = m->next;
    jh_displace(m->base, m->length);
    if (!--m->from->mappings) forget(m->from);
    free(m);
}

/* Drops what is kept in vain, or beyond the limit. */
static void sweep(void) {
    const exporter *asked = NULL;
    bool alive = false;
    for (mapping *m = oldest, *next; m; m = next) {
        next = m->newer;
        if (m->from != asked) alive = jh_ledger_alive((asked = m->from)->fd);
        if (kept <= limit && serial_now(m->from, m->slot) == m->serial && alive) continue;
        asked = NULL; /* it may go with its last mapping, and another one come into its place */
        unkeep(m);
        drop(m);
    }
}

/* Is this the file of the entry, and does it reach as far? */
static bool is_file_of(int fd, const jh_ledger_entry *entry) {
    struct stat st;
    if (fstat(fd, &st) || st.st_dev != entry->device || st.st_ino != entry->inode) return false;
    int seals = entry->sealed ? fcntl(fd, F_GET_SEALS) : F_SEAL_SHRINK;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || entry->offset + entry->length < entry->offset) return false;
    if (!entry->page || entry->page & (entry->page - 1) || entry->page > (uint64_t)1 << 30) return false;
    return !S_ISREG(st.st_mode) || (uint64_t)st.st_size >= entry->offset + entry->length;
}

/* Maps the region of the handle. 0 or -errno, recorded. */
static int map_region(const jh_handle *h, const jh_ledger_entry *entry, int given, bool writable, mapping *m) {
    int fd = given < 0 ? jh_ipc_fetch(h->pid, entry->fd) : given, rc = 0;
    if (fd < 0) return -errno;
    if (!is_file_of(fd, entry)) rc = gone(h, ESTALE, "the memory it is of is gone");
    if (!rc && !(m->base = jh_place(entry->length, entry->page, MAP_SHARED, fd, entry->offset)))
        rc = jh_fail(JEMHOOKS_ERROR_PROVIDER, errno, "opening memory of process %u: mapping %zu bytes: %s; the limits on address space and "
                     "mappings are ulimit -v and vm.max_map_count", h->pid, (size_t)entry->length, strerror(errno));
    if (!rc && !writable && mprotect(m->base, entry->length, PROT_READ))
        rc = jh_fail(JEMHOOKS_ERROR_PROVIDER, errno, "opening memory of process %u: mprotect: %s", h->pid, strerror(errno));
    if (given < 0) close(fd);
    m->length = entry->length;
    return rc;
}

/* What the ledger says of the handle's region; not of another one that came into its slot meanwhile. 0 or -errno, recorded. */
static int read_entry(const exporter *e, const jh_handle *h, jh_ledger_entry *entry) {
    const jh_ledger_entry *shared = &e->ledger->entry[h->slot - 1];
    jh_ledger_copy(entry, shared);
    atomic_thread_fence(memory_order_acquire);
    return serial_now(e, h->slot) == h->serial ? 0 : gone(h, ESTALE, "its arena has ended");
}

/* A new mapping of the region of the handle. NULL: recorded. */
static mapping *make(const jh_handle *h, exporter *e, int given, bool writable) {
    jh_ledger_entry entry;
    mapping *m = calloc(1, sizeof *m);
    if (!m) {
        jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "opening memory of process %u: no memory", h->pid);
        return NULL;
    }
    int rc = read_entry(e, h, &entry);
    if (!rc) rc = map_region(h, &entry, given, writable, m);
    if (rc) {
        if (m->base) jh_displace(m->base, m->length);
        free(m);
        return NULL;
    }
    m->from = e;
    m->slot = h->slot;
    m->serial = h->serial;
    m->writable = writable;
    m->epoch = atomic_load(&jh_fork_epoch);
    mapping **link = bucket(e, h->serial);
    m->next = *link;
    *link = m;
    e->mappings++;
    return m;
}

/* The mapping of the handle's region, found or made, with one block more open. lock held. */
static mapping *obtain(const jh_handle *h, jh_descriptors fds, bool writable) {
    sweep();
    exporter *e = find_exporter(h, fds.ledger);
    if (!e) return NULL;
    mapping *m = serial_now(e, h->slot) == h->serial ? *bucket(e, h->serial) : NULL;
    while (m && (m->from != e || m->serial != h->serial || m->writable != writable)) m = m->next;
    if (m && !m->open) unkeep(m);
    *(m ? &hits : &misses) += 1;
    if (!m && !(m = make(h, e, fds.memory, writable))) {
        int err = errno;
        if (!e->mappings) forget(e);
        errno = err;
        return NULL;
    }
    if (!m->open++) opened++;
    return m;
}

static void release(mapping *m) {
    if (--m->open) return;
    opened--;
    keep(m);
    sweep();
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

int jh_ipc_open(const jemhooks_ipc_handle *handle, unsigned flags, jh_descriptors fds, jemhooks_ipc_block *block) {
    static const char call[] = "jemhooks_ipc_open";
    jh_handle h;
    if (!handle || !block || flags & ~JEMHOOKS_IPC_READ_ONLY)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: no handle or no block (NULL), or flags 0x%x beyond JEMHOOKS_IPC_READ_ONLY", call, flags);
    int rc = jh_ipc_decode(handle, &h);
    if (rc) return rc;
    bool writable = !((flags | h.flags) & JEMHOOKS_IPC_READ_ONLY);
    pthread_mutex_lock(&lock);
    mapping *m = obtain(&h, fds, writable);
    rc = m ? 0 : -errno;
    size_t reach = m ? m->length : 0;
    if (m && (h.offset > reach || h.length > reach - h.offset)) {
        release(m);
        rc = jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: the handle names %zu bytes at %zu of a region of %zu: it was forged", call,
                     (size_t)h.length, (size_t)h.offset, reach);
    }
    if (!rc) *block = (jemhooks_ipc_block){(char *)m->base + h.offset, h.length, writable, m->base, m->length, m};
    pthread_mutex_unlock(&lock);
    return rc;
}

int jemhooks_ipc_open(const jemhooks_ipc_handle *handle, unsigned flags, jemhooks_ipc_block *block) {
    return jh_ipc_open(handle, flags, (jh_descriptors){-1, -1}, block);
}

void jemhooks_ipc_close(jemhooks_ipc_block *block) {
    if (!block || !block->base) return;
    mapping *m = block->mapping;
    *block = (jemhooks_ipc_block){0};
    if (jh_frozen(m->epoch)) return;
    pthread_mutex_lock(&lock);
    release(m);
    pthread_mutex_unlock(&lock);
}

int jemhooks_ipc_alive(const jemhooks_ipc_block *block) {
    if (!block || !block->base) return 0;
    const mapping *m = block->mapping;
    if (jh_frozen(m->epoch)) return 0;
    return serial_now(m->from, m->slot) == m->serial && jh_ledger_alive(m->from->fd);
}

int jemhooks_ipc_get_stats(jemhooks_ipc_stats *stats) {
    if (!stats || stats->size < sizeof stats->size)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_ipc_get_stats: set the size field of the struct to its sizeof");
    pthread_mutex_lock(&lock);
    jemhooks_ipc_stats now = {stats->size, jh_ledger_count(), 0, opened, kept, hits, misses, limit};
    for (const exporter *e = exporters; e; e = e->next) now.exporters++;
    pthread_mutex_unlock(&lock);
    if (stats->size > sizeof now) memset((char *)stats + sizeof now, 0, stats->size - sizeof now);
    memcpy(stats, &now, stats->size < sizeof now ? stats->size : sizeof now);
    return 0;
}

void jemhooks_ipc_set_cache(size_t n) {
    pthread_mutex_lock(&lock);
    limit = n;
    sweep();
    pthread_mutex_unlock(&lock);
}
