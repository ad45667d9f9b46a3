/* null.c - the registrar "null": no network, no pinning; keys, limits, failures and a call log for tests and dry runs.
 *
 * Live registrations are kept in an array sorted by address and lkey, so that a double registration or a deregistration
 * of something unknown is noticed at the call.
 * Concurrency: one mutex guards everything. The observer runs before the operation, without the mutex.               */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "jemhooks_null.h"
#include "module.h"

static const jemhooks_host *host;

typedef struct range {
    uintptr_t address;
    size_t length;
    uint64_t lkey;
} range;

typedef struct null_registrar {
    jemhooks_null_config config;
    pthread_mutex_t lock;
    range *live;               /* sorted by address, then lkey          */
    size_t live_room;
    jemhooks_null_stats stats; /* stats.live is the length of `live`    */
    uint64_t last_lkey;
    uint64_t fuse[3];          /* by op: how many calls until one fails; 0: none */
    int fuse_errno[3];
    uint64_t logged;           /* calls ever logged                     */
    jemhooks_null_call log[JEMHOOKS_NULL_LOG];
} null_registrar;

static void observe(null_registrar *n, int op, uintptr_t address, size_t length) {
    if (n->config.observer) n->config.observer(n->config.observer_arg, op, (void *)address, length);
}

/* The first live range at or after (address, lkey). */
static size_t find(const null_registrar *n, uintptr_t address, uint64_t lkey) {
    size_t low = 0, high = n->stats.live;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const range *r = &n->live[middle];
        if (r->address < address || (r->address == address && r->lkey < lkey)) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void log_call(null_registrar *n, int op, uintptr_t address, size_t length, unsigned access, uint64_t lkey,
                     int result) {
    uint64_t sequence = n->logged++;
    n->log[sequence % JEMHOOKS_NULL_LOG] = (jemhooks_null_call){.sequence = sequence + 1, .address = address,
        .length = length, .lkey = lkey, .op = (uint32_t)op, .access = access, .result = result};
}

/* Counts one call of this op: 0, or the failure that it was told to have. */
static int burn_fuse(null_registrar *n, int op, const char *what, size_t length) {
    if (!n->fuse[op] || --n->fuse[op]) return 0;
    host->set_error("null: %s of %zu bytes fails with errno %d because jemhooks_null_fail() or the config asked for it",
                    what, length, n->fuse_errno[op]);
    return -n->fuse_errno[op];
}

static int admit(null_registrar *n, size_t length) {
    if (!length) {
        host->set_error("null: registering 0 bytes is not possible; register at least one page");
        return -EINVAL;
    }
    if (n->config.max_mr_size && length > n->config.max_mr_size) {
        host->set_error("null: registering %zu bytes exceeds max_mr_size %llu; use smaller regions (region_max)",
                        length, (unsigned long long)n->config.max_mr_size);
        return -EINVAL;
    }
    if (n->config.max_mr && n->stats.live >= n->config.max_mr) {
        host->set_error("null: registering %zu bytes exceeds max_mr %llu, all in use; deregister something (trim) or "
                        "use larger regions (region_min)", length, (unsigned long long)n->config.max_mr);
        return -ENOSPC;
    }
    if (n->stats.live < n->live_room) return 0;
    size_t room = n->live_room ? 2 * n->live_room : 64;
    range *live = realloc(n->live, room * sizeof *live);
    if (!live) {
        host->set_error("null: no memory for a table of %zu registrations", room);
        return -ENOMEM;
    }
    n->live = live;
    n->live_room = room;
    return 0;
}

/* lkeys are odd and rkeys even, so that a caller who mixes them up is found out. */
static void insert(null_registrar *n, uintptr_t address, size_t length, jemhooks_mr *mr) {
    mr->lkey = n->last_lkey += 2;
    mr->rkey = mr->lkey + 1;
    if (n->config.remote_offset) mr->remote_base = 0;
    mr->handle = (void *)address;

    jemhooks_null_stats *s = &n->stats;
    size_t at = find(n, address, mr->lkey);
    range *r = &n->live[at];
    if ((at > 0 && r[-1].address + r[-1].length > address) || (at < s->live && r->address < address + length))
        s->errors++;
    memmove(r + 1, r, (s->live - at) * sizeof *r);
    *r = (range){address, length, mr->lkey};
    s->live++;
    s->live_bytes += length;
    if (s->live > s->live_peak) s->live_peak = s->live;
}

static int null_register(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    null_registrar *n = self;
    observe(n, JEMHOOKS_NULL_REGISTER, (uintptr_t)address, length);
    pthread_mutex_lock(&n->lock);
    n->stats.registers++;
    int result = burn_fuse(n, JEMHOOKS_NULL_REGISTER, "registering", length);
    if (!result) result = admit(n, length);
    if (!result) insert(n, (uintptr_t)address, length, mr);
    log_call(n, JEMHOOKS_NULL_REGISTER, (uintptr_t)address, length, access, result ? 0 : mr->lkey, result);
    pthread_mutex_unlock(&n->lock);
    return result;
}

/* The live range of mr, or NULL. */
static range *find_mr(null_registrar *n, const jemhooks_mr *mr) {
    uintptr_t address = (uintptr_t)mr->handle;
    range *r = &n->live[find(n, address, mr->lkey)];
    return r < n->live + n->stats.live && r->address == address && r->lkey == mr->lkey ? r : NULL;
}

static int null_deregister(void *self, jemhooks_mr *mr) {
    null_registrar *n = self;
    pthread_mutex_lock(&n->lock);
    const range *known = find_mr(n, mr);
    size_t length = known ? known->length : 0;
    pthread_mutex_unlock(&n->lock);
    observe(n, JEMHOOKS_NULL_DEREGISTER, (uintptr_t)mr->handle, length);

    pthread_mutex_lock(&n->lock);
    n->stats.deregisters++;
    int result = burn_fuse(n, JEMHOOKS_NULL_DEREGISTER, "deregistering", length);
    range *r = find_mr(n, mr); /* again: the table may have moved meanwhile */
    if (!r) {
        host->set_error("null: deregistering lkey %llu at %p, which is not registered", (unsigned long long)mr->lkey,
                        mr->handle);
        n->stats.errors++;
        result = -EINVAL;
    }
    if (!result) {
        n->stats.live--;
        n->stats.live_bytes -= r->length;
        memmove(r, r + 1, (size_t)(n->live + n->stats.live - r) * sizeof *r);
    }
    log_call(n, JEMHOOKS_NULL_DEREGISTER, (uintptr_t)mr->handle, length, 0, mr->lkey, result);
    pthread_mutex_unlock(&n->lock);
    return result;
}

static void null_limits(void *self, jemhooks_limits *limits) {
    const null_registrar *n = self;
    limits->max_mr_size = n->config.max_mr_size;
    limits->max_mr = n->config.max_mr;
}

static void null_close(void *self) {
    null_registrar *n = self;
    pthread_mutex_destroy(&n->lock);
    free(n->live);
    free(n);
}

static int null_stats(void *self, jemhooks_null_stats *stats) {
    null_registrar *n = self;
    size_t size = stats->size;
    if (size < sizeof(size_t)) {
        host->set_error("jemhooks_null_get_stats: stats->size is %zu; set it to sizeof(jemhooks_null_stats)", size);
        return -EINVAL;
    }
    pthread_mutex_lock(&n->lock);
    memcpy(stats, &n->stats, size < sizeof n->stats ? size : sizeof n->stats);
    pthread_mutex_unlock(&n->lock);
    stats->size = size;
    return 0;
}

static int null_calls(void *self, jemhooks_null_call *calls, size_t *count) {
    null_registrar *n = self;
    pthread_mutex_lock(&n->lock);
    uint64_t held = n->logged < JEMHOOKS_NULL_LOG ? n->logged : JEMHOOKS_NULL_LOG;
    uint64_t copied = *count < held ? *count : held;
    for (uint64_t i = 0; i < copied; i++) calls[i] = n->log[(n->logged - copied + i) % JEMHOOKS_NULL_LOG];
    *count = held;
    pthread_mutex_unlock(&n->lock);
    return 0;
}

static int null_fail(void *self, int op, uint64_t nth, int error) {
    null_registrar *n = self;
    if ((op != JEMHOOKS_NULL_REGISTER && op != JEMHOOKS_NULL_DEREGISTER) || (nth && error <= 0)) {
        host->set_error("jemhooks_null_fail: op %d with errno %d; give one of enum jemhooks_null_op and a positive "
                        "errno", op, error);
        return -EINVAL;
    }
    pthread_mutex_lock(&n->lock);
    n->fuse[op] = nth;
    n->fuse_errno[op] = error;
    pthread_mutex_unlock(&n->lock);
    return 0;
}

static const jemhooks_null_interface interface = {sizeof interface, null_stats, null_calls, null_fail};
static const jemhooks_registrar_ops null_ops = {sizeof null_ops, "null", null_register, null_deregister, null_limits,
                                                null_close, &interface, 0, 0, 0};

MODULE_EXPORT jemhooks_module_open jemhooks_registrar_module;

int jemhooks_registrar_module(const jemhooks_host *h, const void *config, const jemhooks_registrar_ops **ops,
                              void **self) {
    host = h;
    jemhooks_null_config ours = JEMHOOKS_NULL_CONFIG_INIT;
    int result = module_config(host, "null", &ours, sizeof ours, config);
    if (result) return result;
    if (ours.fail_errno <= 0 || ours.fail_deregister_errno <= 0) {
        host->set_error("opening registrar null: fail_errno %d and fail_deregister_errno %d must be positive errnos",
                        ours.fail_errno, ours.fail_deregister_errno);
        return -EINVAL;
    }
    null_registrar *n = calloc(1, sizeof *n);
    if (!n) {
        host->set_error("opening registrar null: no memory for its %zu bytes", sizeof *n);
        return -ENOMEM;
    }
    n->config = ours;
    n->last_lkey = (uint64_t)-1;
    n->fuse[JEMHOOKS_NULL_REGISTER] = ours.fail_at;
    n->fuse[JEMHOOKS_NULL_DEREGISTER] = ours.fail_deregister_at;
    n->fuse_errno[JEMHOOKS_NULL_REGISTER] = ours.fail_errno;
    n->fuse_errno[JEMHOOKS_NULL_DEREGISTER] = ours.fail_deregister_errno;
    pthread_mutex_init(&n->lock, NULL);
    *ops = &null_ops;
    *self = n;
    return 0;
}
