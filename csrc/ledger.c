/* ledger.c - the table of regions that other processes may map, in a memfd of its own. They read there whether a handle is still
 * good, with one load, and see by a lock on it whether this process lives: the kernel lets the lock go however the process ends.
 * The lock belongs to an open file description that nobody else gets; what is passed on is another one of the same file.
 * Concurrency: `lock` guards the table's writer; readers, in other processes, take none.                             */
#include "ledger.h"
#include "error.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(sizeof(jh_ledger_entry) == 64 && sizeof(jh_ledger) == JH_LEDGER_ENTRIES * 64, "others read this layout");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static jh_ledger *mine;
static int shared_fd = -1, locked_fd = -1;
static uint64_t last_serial;
static unsigned top, unused_slots; /* slots ever used; the first of those that are free again, linked by `unused` */
static size_t count;

/* The parent's is the parent's: its lock must not outlive it here. */
static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    if (mine) munmap(mine, sizeof *mine);
    if (shared_fd >= 0) close(shared_fd);
    if (locked_fd >= 0) close(locked_fd);
    mine = NULL;
    shared_fd = locked_fd = -1;
    top = unused_slots = 0;
    count = 0;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

static struct flock whole(short type) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET};
}

static int create(void) {
    char path[32];
    struct flock locked = whole(F_WRLCK);
    uint64_t id;
    shared_fd = memfd_create("jemhooks:ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (shared_fd < 0) return -errno;
    snprintf(path, sizeof path, "/proc/self/fd/%d", shared_fd);
    locked_fd = open(path, O_RDWR | O_CLOEXEC);
    if (locked_fd < 0 || fcntl(locked_fd, F_OFD_SETLK, &locked) || ftruncate(shared_fd, sizeof *mine) ||
        fcntl(shared_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) || getrandom(&id, sizeof id, 0) != sizeof id)
        return -errno;
    void *p = mmap(NULL, sizeof *mine, PROT_READ | PROT_WRITE, MAP_SHARED, shared_fd, 0);
    if (p == MAP_FAILED) return -errno;
    mine = p;
    mine->head.id = id;
    mine->head.version = 1;
    mine->head.magic = JH_LEDGER_MAGIC;
    return 0;
}

/* lock held */
static int own(void) {
    if (mine) return 0;
    int rc = create();
    if (!rc) return 0;
    if (shared_fd >= 0) close(shared_fd);
    if (locked_fd >= 0) close(locked_fd);
    shared_fd = locked_fd = -1;
    return jh_fail(JEMHOOKS_ERROR_PROVIDER, -rc, "making the table of exported regions (a memfd of 4 MiB): %s%s", strerror(-rc),
                   rc == -EMFILE ? "; raise the limit on open files (ulimit -n)" : "");
}

int jh_ledger_own(jh_ledger_owner *owner) {
    pthread_mutex_lock(&lock);
    int rc = own();
    if (!rc) *owner = (jh_ledger_owner){shared_fd, mine->head.id};
    pthread_mutex_unlock(&lock);
    return rc;
}

static jh_ledger_entry *at(unsigned slot) {
    return &mine->entry[slot - 1];
}

int jh_ledger_enter(const jh_ledger_entry *entry, unsigned *slot, uint64_t *serial) {
    pthread_mutex_lock(&lock);
    int rc = own();
    if (!rc && !unused_slots && top == JH_LEDGER_ENTRIES - 1)
        rc = jh_fail(JEMHOOKS_ERROR_PROVIDER, ENOSPC, "exporting a region: %u regions are exported already, which is all there may be; "
                     "use larger regions (region_max)", top);
    if (!rc) {
        *slot = unused_slots ? unused_slots : ++top;
        jh_ledger_entry *e = at(*slot);
        unused_slots = unused_slots ? (unsigned)e->unused : 0;
        atomic_thread_fence(memory_order_release); /* who reads what follows reads that the last serial is gone */
        jh_ledger_copy(e, entry);
        e->unused = 0;
        *serial = ++last_serial;
        atomic_store(&e->serial, *serial);
        count++;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

uint64_t jh_ledger_serial(unsigned slot) {
    return atomic_load(&at(slot)->serial);
}

void jh_ledger_leave(unsigned slot) {
    pthread_mutex_lock(&lock);
    jh_ledger_entry *e = at(slot);
    atomic_store(&e->serial, 0);
    e->unused = unused_slots;
    unused_slots = slot;
    count--;
    pthread_mutex_unlock(&lock);
}

size_t jh_ledger_count(void) {
    pthread_mutex_lock(&lock);
    size_t n = count;
    pthread_mutex_unlock(&lock);
    return n;
}

const jh_ledger *jh_ledger_map(int fd, uint64_t id) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    errno = ESTALE;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) || st.st_size != sizeof(jh_ledger)) return NULL;
    void *p = mmap(NULL, sizeof(jh_ledger), PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return NULL;
    const jh_ledger *ledger = p;
    if (ledger->head.magic == JH_LEDGER_MAGIC && ledger->head.version == 1 && ledger->head.id == id) return ledger;
    jh_ledger_unmap(ledger);
    errno = ESTALE;
    return NULL;
}

void jh_ledger_unmap(const jh_ledger *ledger) {
    munmap((void *)(uintptr_t)ledger, sizeof *ledger);
}

bool jh_ledger_alive(int fd) {
    struct flock held = whole(F_WRLCK);
    return !fcntl(fd, F_OFD_GETLK, &held) && held.l_type != F_UNLCK;
}
