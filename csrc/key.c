/* key.c - what users ask of a pointer: its key, its region, a lease on it.
 * Concurrency: a registered region is read without a lock; anything else goes through registration.c. */
#include "error.h"
#include "fork.h"
#include "region.h"

#include <string.h>

static int not_ours(const char *call, const void *p) {
    return jh_fail(JEMHOOKS_ERROR_NOT_OURS, ENOENT, "%s: address %p lies in no region of any arena; allocate it from an arena "
                   "or make its range one with a fixed provider", call, p);
}

static jh_registration *registration_at(const void *p) {
    jh_region *r = jh_region_at(p);
    return r ? &r->registration : NULL;
}

/* The registration of live address p, that may be registered. NULL with *rc, recorded. */
static jh_registration *find(const char *call, const void *p, int *rc) {
    jh_registration *r = registration_at(p);
    if (!r)
        *rc = not_ours(call, p);
    else if (jh_frozen(r->rails->epoch))
        *rc = jh_fail(JEMHOOKS_ERROR_FORK, ECHILD, "%s: %p belongs to arena '%s' of the parent process, frozen in this one "
                      "since the fork; make an arena here", call, p, r->rails->name);
    else if (r->rails->policy == JEMHOOKS_NONE)
        *rc = jh_fail(JEMHOOKS_ERROR_REGISTRATION, EOPNOTSUPP, "%s: %p belongs to arena '%s', whose policy is none: it is "
                      "never registered; make the arena with policy lazy or eager", call, p, r->rails->name);
    else
        return r;
    return NULL;
}

jemhooks_region *jemhooks_find_region(const void *p) {
    return jemhooks_region_of(p);
}

/* Until a process is forked there are no frozen arenas, so the plain look-up is enough. */
static int slow_key(const char *call, const void *p, jemhooks_key *key) {
    for (;;) {
        int rc;
        jh_registration *r = find(call, p, &rc);
        if (!r || (rc = jh_register(r))) return rc;
        if (!jemhooks_lookup(p, key)) return 0; /* else deregistered again: its block was freed meanwhile */
    }
}

int jemhooks_get_key(const void *p, jemhooks_key *key) {
    if (!key) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_get_key: nowhere to put the key (NULL)");
    if (atomic_load_explicit(&jh_fork_epoch, memory_order_relaxed) || jemhooks_lookup(p, key))
        return slow_key("jemhooks_get_key", p, key);
    return 0;
}

int jemhooks_get_keys(size_t n, const uint64_t *addresses, jemhooks_key *keys, size_t *done) {
    int rc = n && (!addresses || !keys) ? jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_get_keys: NULL array of %zu "
                                                  "elements", n) : 0;
    size_t i = 0;
    while (!rc && i < n && !(rc = jemhooks_get_key((const void *)(uintptr_t)addresses[i], &keys[i]))) i++;
    if (done) *done = i;
    return rc;
}

/* The registration of rail `number` at p, with the key of the first rail and the region's first byte; and its packed key, as far
 * as there is room for all of it. */
static int rail(const char *call, const void *p, unsigned number, jemhooks_mr *mr, jemhooks_key *key, uint64_t *base,
                void *packed, size_t room) {
    for (;;) {
        int rc = slow_key(call, p, key);
        if (rc) return rc;
        jh_registration *r = registration_at(p);
        if (!r) return not_ours(call, p);
        if (number >= r->rails->count)
            return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: arena '%s' has %u registrars; %u is not one of 0 to %u", call,
                           r->rails->name, r->rails->count, number, r->rails->count - 1);
        if ((rc = jh_register(r))) return rc; /* an earlier failure may have left this rail out */
        pthread_mutex_lock(&r->pages.lock);
        bool same = r->hot->generation == key->generation && number < r->live;
        *mr = r->mr[number];
        *base = r->hot->base;
        if (same && mr->packed && mr->packed_length <= room) memcpy(packed, mr->packed, mr->packed_length);
        pthread_mutex_unlock(&r->pages.lock);
        if (same) return 0;
    }
}

int jemhooks_get_rail_key(const void *p, unsigned number, jemhooks_key *key) {
    jemhooks_mr mr;
    jemhooks_key k;
    if (!key) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_get_rail_key: nowhere to put the key (NULL)");
    uint64_t base;
    int rc = rail("jemhooks_get_rail_key", p, number, &mr, &k, &base, NULL, 0);
    if (rc) return rc;
    k.addr = mr.remote_base + ((uintptr_t)p - base);
    k.lkey = mr.lkey;
    k.rkey = mr.rkey;
    *key = k;
    return 0;
}

int jemhooks_packed_key(const void *p, unsigned number, const void **bytes, size_t *length) {
    jemhooks_mr mr;
    jemhooks_key k;
    if (!bytes || !length)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_packed_key: nowhere to put the bytes or their length (NULL)");
    uint64_t base;
    int rc = rail("jemhooks_packed_key", p, number, &mr, &k, &base, NULL, 0);
    if (rc) return rc;
    *bytes = mr.packed;
    *length = mr.packed ? mr.packed_length : 0;
    return 0;
}

int jemhooks_copy_packed_key(const void *p, unsigned number, void *buffer, size_t *length) {
    static const char call[] = "jemhooks_copy_packed_key";
    jemhooks_mr mr;
    jemhooks_key k;
    uint64_t base;
    if (!length || (*length && !buffer)) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: no buffer or length (NULL)", call);
    size_t room = *length;
    int rc = rail(call, p, number, &mr, &k, &base, buffer, room);
    if (rc) return rc;
    *length = mr.packed ? mr.packed_length : 0;
    if (*length <= room) return 0;
    return jh_fail(JEMHOOKS_ERROR_CONFIG, ENOSPC, "%s: the key has %zu bytes, the buffer %zu", call, *length, room);
}

int jemhooks_lease(const void *p, jemhooks_key *key) {
    int rc;
    jh_registration *r = find("jemhooks_lease", p, &rc);
    if (!r) return rc;
    for (;;) {
        uint64_t word = __atomic_load_n(&r->hot->word, __ATOMIC_ACQUIRE);
        if ((word & 255) != JEMHOOKS_REGISTERED) {
            if ((rc = jh_register(r))) return rc;
        } else if (__atomic_compare_exchange_n(&r->hot->word, &word, word + 256, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            break;
        }
    }
    while (key && jemhooks_lookup(p, key) == -EAGAIN) /* the keys are just being published, or were taken despite the lease */
        if ((rc = jh_register(r))) {
            __atomic_fetch_sub(&r->hot->word, 256, __ATOMIC_ACQ_REL);
            return rc;
        }
    return 0;
}

int jemhooks_release(const void *p) {
    int rc;
    jh_registration *r = find("jemhooks_release", p, &rc);
    if (!r) return rc;
    uint64_t word = __atomic_load_n(&r->hot->word, __ATOMIC_RELAXED);
    while (word >> 8)
        if (__atomic_compare_exchange_n(&r->hot->word, &word, word - 256, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            if (word >> 8 == 1) jh_unused(r);
            if (jh_due(r->rails)) jh_expire(r->rails);
            return 0;
        }
    return jh_fail(JEMHOOKS_ERROR_CONFIG, EALREADY, "jemhooks_release: the region of %p holds no lease; release once for each "
                   "jemhooks_lease()", p);
}
