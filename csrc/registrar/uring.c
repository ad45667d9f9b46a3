/* uring.c - the registrar "uring": pins memory as io_uring fixed buffers, one ring with one sparse buffer table.
 *
 * A region takes a run of consecutive slots, 1 GiB each but the last; its key is the first one. Slots are taken
 * next-fit, so that a key is not given out again at once. Older kernels (5.13, for one) unpin up to a second
 * after a deregistration: the slot is empty at once, VmPin and the memlock account follow later.
 * Concurrency: `table` guards the slots and is never held over a system call, which the kernel serializes itself;
 * `transfers` is held over one whole piece of a transfer, for the ring has one completion queue.                     */
#include <liburing.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "jemhooks_uring.h"
#include "memlock.h"
#include "module.h"

static const jemhooks_host *host;

typedef struct uring_registrar {
    struct io_uring ring;
    pid_t owner;               /* the process that opened it: a forked child shares the ring */
    unsigned slots;
    pthread_mutex_t table;
    unsigned char *taken;      /* by slot                              */
    unsigned next;             /* where the search for slots begins    */
    pthread_mutex_t transfers;
    uint64_t last_tag;         /* tells completions apart              */
} uring_registrar;

/* ---- why the kernel refused ------------------------------------------------------------------------------------ */

static void explain_memlock(const char *what, size_t length) {
    char memlock[128];
    host->set_error("uring: %s of %zu bytes: out of memory; %s (the limit counts all io_uring memory of this user, and whole "
                    "huge pages); raise it (ulimit -l), grant CAP_IPC_LOCK, or use a smaller region_max", what, length,
                    memlock_text(memlock, sizeof memlock));
}

static int explain_register(int error, const void *address, size_t length) {
    if (error == -ENOMEM) explain_memlock("pinning", length);
    else if (error == -EFAULT)
        host->set_error("uring: pinning %zu bytes at %p: not all of it is mapped readable and writable, or it is a "
                        "file's memory that the kernel does not pin for long; use anonymous memory or a memfd", length,
                        address);
    else if (error == -EOPNOTSUPP)
        host->set_error("uring: pinning %zu bytes at %p: io_uring does not pin memory of a file; use anonymous memory, "
                        "a memfd or hugetlbfs", length, address);
    else host->set_error("uring: pinning %zu bytes at %p: %s", length, address, strerror(-error));
    return error;
}

static int explain_open(int error, unsigned slots) {
    long long disabled = proc_value("/proc/sys/kernel/io_uring_disabled", "");
    if (error == -ENOSYS)
        host->set_error("opening registrar uring: this kernel has no io_uring; it needs Linux 5.13, built with "
                        "CONFIG_IO_URING");
    else if (error == -EPERM && disabled > 0)
        host->set_error("opening registrar uring: io_uring is switched off here: kernel.io_uring_disabled is %lld (1: "
                        "only for CAP_SYS_ADMIN and kernel.io_uring_group, 2: for all); set it to 0", disabled);
    else if (error == -EPERM)
        host->set_error("opening registrar uring: io_uring is not permitted, by a seccomp filter or a security module; "
                        "allow io_uring_setup, io_uring_register and io_uring_enter in the container's profile");
    else if (error == -EINVAL)
        host->set_error("opening registrar uring: the kernel refused a table of %u buffers; it needs Linux 5.13",
                        slots);
    else if (error == -ENOMEM) explain_memlock("opening a ring", sizeof(struct iovec) * slots);
    else host->set_error("opening registrar uring with %u slots: %s", slots, strerror(-error));
    return error;
}

/* ---- slots ----------------------------------------------------------------------------------------------------- */

static int find_run(const uring_registrar *u, unsigned from, unsigned count) {
    for (unsigned i = from, run = 0; i < u->slots; i++) {
        run = u->taken[i] ? 0 : run + 1;
        if (run == count) return (int)(i - count + 1);
    }
    return -1;
}

/* The first of `count` consecutive slots, now taken, or -1. */
static int take_slots(uring_registrar *u, unsigned count) {
    pthread_mutex_lock(&u->table);
    int at = find_run(u, u->next, count);
    if (at < 0) at = find_run(u, 0, count);
    if (at >= 0) {
        memset(u->taken + at, 1, count);
        u->next = (unsigned)at + count;
    }
    pthread_mutex_unlock(&u->table);
    return at;
}

static void return_slots(uring_registrar *u, unsigned at, unsigned count) {
    pthread_mutex_lock(&u->table);
    memset(u->taken + at, 0, count);
    pthread_mutex_unlock(&u->table);
}

/* Fills `count` slots with the pieces of [base, base + length), or empties them where base is NULL. *done: how many
 * were, which may be some even on failure. The kernel, too, may do a part and say how much: going on where it stopped
 * gets the rest, or the error. */
static int update_slots(uring_registrar *u, unsigned at, unsigned count, char *base, size_t length, unsigned *done) {
    for (*done = 0; *done < count;) {
        struct iovec pieces[16];
        unsigned n = 0;
        for (; n < 16 && *done + n < count; n++) {
            size_t offset = (size_t)(*done + n) * JEMHOOKS_URING_BUFFER, left = length - offset;
            if (!base) pieces[n] = (struct iovec){NULL, 0};
            else pieces[n] = (struct iovec){base + offset, left < JEMHOOKS_URING_BUFFER ? left : JEMHOOKS_URING_BUFFER};
        }
        int updated = io_uring_register_buffers_update_tag(&u->ring, at + *done, pieces, NULL, n);
        if (updated == -EINTR) continue;
        if (updated <= 0) return updated ? updated : -EIO;
        *done += (unsigned)updated;
    }
    return 0;
}

/* ---- the registrar --------------------------------------------------------------------------------------------- */

static int uring_register(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    uring_registrar *u = self;
    if (!length || length > u->slots * JEMHOOKS_URING_BUFFER) {
        host->set_error("uring: pinning %zu bytes: the table of %u slots holds 1 byte to 1 GiB in each; open the "
                        "registrar with more slots or use a smaller region_max", length, u->slots);
        return -EINVAL;
    }
    if (access & JEMHOOKS_ON_DEMAND) {
        host->set_error("uring: pinning %zu bytes: io_uring always pins; leave JEMHOOKS_ON_DEMAND out", length);
        return -EOPNOTSUPP;
    }
    unsigned count = (unsigned)((length + JEMHOOKS_URING_BUFFER - 1) / JEMHOOKS_URING_BUFFER), done;
    int at = take_slots(u, count);
    if (at < 0) {
        host->set_error("uring: pinning %zu bytes: no %u consecutive slots left of %u; deregister something (trim), "
                        "use larger regions, or open the registrar with more slots (at most %d)", length, count,
                        u->slots, JEMHOOKS_URING_MAX_SLOTS);
        return -ENOSPC;
    }
    int result = update_slots(u, (unsigned)at, count, address, length, &done);
    if (result) {
        unsigned emptied;
        /* Slots that cannot be emptied stay taken: their pages are still within reach. */
        if (!update_slots(u, (unsigned)at, done, NULL, 0, &emptied)) return_slots(u, (unsigned)at, count);
        return explain_register(result, address, length);
    }
    mr->lkey = mr->rkey = (uint64_t)at;
    mr->handle = (void *)(uintptr_t)count;
    return 0;
}

static int uring_deregister(void *self, jemhooks_mr *mr) {
    uring_registrar *u = self;
    unsigned count = (unsigned)(uintptr_t)mr->handle, done;
    if (mr->lkey >= u->slots || count > u->slots - mr->lkey) {
        host->set_error("uring: unpinning slot %llu and %u more: there are %u", (unsigned long long)mr->lkey, count,
                        u->slots);
        return -EINVAL;
    }
    int result = update_slots(u, (unsigned)mr->lkey, count, NULL, 0, &done);
    if (!result) return_slots(u, (unsigned)mr->lkey, count);
    else host->set_error("uring: unpinning slot %llu, %u of %u done: %s", (unsigned long long)mr->lkey, done, count,
                         strerror(-result));
    return result;
}

static void uring_limits(void *self, jemhooks_limits *limits) {
    const uring_registrar *u = self;
    limits->max_mr_size = u->slots * JEMHOOKS_URING_BUFFER;
    limits->max_mr = u->slots;
}

static void uring_close(void *self) {
    uring_registrar *u = self;
    /* In a forked child this would unpin the parent's memory; at home it makes the unpinning immediate. */
    if (getpid() == u->owner) io_uring_unregister_buffers(&u->ring);
    io_uring_queue_exit(&u->ring);
    pthread_mutex_destroy(&u->table);
    pthread_mutex_destroy(&u->transfers);
    free(u->taken);
    free(u);
}

/* ---- transfers ------------------------------------------------------------------------------------------------- */

/* One request, submitted and waited for: its result. */
static int move_piece(uring_registrar *u, int opcode, int fd, unsigned slot, uint64_t address, unsigned length,
                      uint64_t offset) {
    pthread_mutex_lock(&u->transfers);
    uint64_t tag = ++u->last_tag;
    struct io_uring_sqe *request = io_uring_get_sqe(&u->ring); /* one at a time: full only if the kernel takes none */
    if (!request) {
        pthread_mutex_unlock(&u->transfers);
        return -EBUSY;
    }
    io_uring_prep_rw(opcode, request, fd, (void *)(uintptr_t)address, length, offset);
    request->buf_index = (uint16_t)slot;
    request->user_data = tag;
    int result;
    do result = io_uring_submit_and_wait(&u->ring, 1);
    while (result == -EINTR || result == -EAGAIN);
    if (result < 0) { /* not taken by the kernel, but next time it would be: make it harmless */
        io_uring_prep_nop(request);
        request->user_data = 0;
    }
    for (bool mine = result < 0; !mine;) {
        struct io_uring_cqe *completion;
        result = io_uring_wait_cqe(&u->ring, &completion);
        if (result == -EINTR) continue;
        if (result) break;
        result = completion->res;
        mine = completion->user_data == tag;
        io_uring_cqe_seen(&u->ring, completion);
    }
    pthread_mutex_unlock(&u->transfers);
    return result;
}

static int64_t move(void *self, int opcode, const char *what, const jemhooks_uring_transfer *t) {
    uring_registrar *u = self;
    uint64_t first = t->address - t->base;
    if (t->address < t->base || t->length > INT64_MAX || t->address + t->length < t->address ||
        t->slot + (first + t->length) / JEMHOOKS_URING_BUFFER > u->slots) {
        host->set_error("uring: %s of %llu bytes at %#llx in slot %u, region at %#llx: outside the table of %u slots; "
                        "pass the region's lkey and base", what, (unsigned long long)t->length,
                        (unsigned long long)t->address, t->slot, (unsigned long long)t->base, u->slots);
        return -EINVAL;
    }
    uint64_t moved = 0;
    while (moved < t->length) {
        uint64_t at = first + moved, piece = JEMHOOKS_URING_BUFFER - at % JEMHOOKS_URING_BUFFER;
        if (piece > t->length - moved) piece = t->length - moved;
        uint64_t offset = t->file_offset == UINT64_MAX ? UINT64_MAX : t->file_offset + moved;
        int result = move_piece(u, opcode, t->fd, t->slot + (unsigned)(at / JEMHOOKS_URING_BUFFER), t->base + at,
                                (unsigned)piece, offset);
        if (result == -EINTR) continue;
        if (result > 0) moved += (unsigned)result;
        else if (!result || moved) break;
        else {
            host->set_error("uring: %s of %llu bytes at %#llx in slot %u, fd %d: %s%s", what, (unsigned long long)piece,
                            (unsigned long long)(t->base + at), t->slot, t->fd, strerror(-result),
                            result == -EFAULT ? "; the range is not within the memory registered in that slot" : "");
            return result;
        }
    }
    return (int64_t)moved;
}

static int64_t uring_read(void *self, const jemhooks_uring_transfer *transfer) {
    return move(self, IORING_OP_READ_FIXED, "read", transfer);
}

static int64_t uring_write(void *self, const jemhooks_uring_transfer *transfer) {
    return move(self, IORING_OP_WRITE_FIXED, "write", transfer);
}

/* ---- opening --------------------------------------------------------------------------------------------------- */

/* An empty table: sparse since Linux 5.19, before that filled with empty buffers. */
static int create_table(uring_registrar *u) {
    int result = io_uring_register_buffers_sparse(&u->ring, u->slots);
    if (result != -EINVAL) return result;
    struct iovec *empty = calloc(u->slots, sizeof *empty);
    if (!empty) return -ENOMEM;
    result = io_uring_register_buffers_tags(&u->ring, empty, NULL, u->slots);
    free(empty);
    return result;
}

static const jemhooks_uring_interface interface = {sizeof interface, uring_read, uring_write};
static const jemhooks_registrar_ops uring_ops = {sizeof uring_ops, "uring", uring_register, uring_deregister,
                                                 uring_limits, uring_close, &interface, 0, 1, 1};

MODULE_EXPORT jemhooks_module_open jemhooks_registrar_module;

int jemhooks_registrar_module(const jemhooks_host *h, const void *config, const jemhooks_registrar_ops **ops,
                              void **self) {
    host = h;
    jemhooks_uring_config ours = JEMHOOKS_URING_CONFIG_INIT;
    int result = module_config(host, "uring", &ours, sizeof ours, config);
    if (result) return result;
    if (!ours.slots || ours.slots > JEMHOOKS_URING_MAX_SLOTS) {
        host->set_error("opening registrar uring: %u slots; the kernel allows 1 to %d", ours.slots,
                        JEMHOOKS_URING_MAX_SLOTS);
        return -EINVAL;
    }
    uring_registrar *u = calloc(1, sizeof *u);
    unsigned char *taken = calloc(ours.slots, 1);
    if (!u || !taken) {
        result = -ENOMEM;
        goto failed;
    }
    u->slots = ours.slots;
    u->taken = taken;
    u->owner = getpid();
    result = io_uring_queue_init(4, &u->ring, 0);
    if (result) goto failed;
    result = create_table(u);
    if (result) {
        io_uring_queue_exit(&u->ring);
        goto failed;
    }
    pthread_mutex_init(&u->table, NULL);
    pthread_mutex_init(&u->transfers, NULL);
    *ops = &uring_ops;
    *self = u;
    return 0;
failed:
    free(taken);
    free(u);
    return explain_open(result, ours.slots);
}
