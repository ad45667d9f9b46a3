/* face.c - arenas that count their users, for the Python package.
 * Concurrency: one atomic word holds the count and whether the arena is closed, so that exactly one user sees both end;
 * no other state is shared. Runs without the GIL, but where it says otherwise.                                                                  */
#include <Python.h>

#include "face.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#define CLOSED ((int64_t)1 << 62)
#define RELEASED ((int64_t)1 << 61) /* Python has let go of the face      */
#define FINISHED ((int64_t)1 << 60) /* its arena is gone                  */
#define COUNT (FINISHED - 1)

struct jh_face {
    jemhooks_arena *arena;
    bool deferred;
    PyObject *owner;       /* of the memory; may be NULL */
    _Atomic int64_t users; /* a count and the three bits */
    jh_face *next;         /* in the queue               */
    atomic_ullong current_bytes, current_count, peak_bytes, peak_count, total_bytes, total_count;
};

static _Atomic(jh_face *) queue; /* taken whole, so that a plain stack will do */

/* One more or one less reference to the owner; from threads that do not hold the GIL. */
static void keep_owner(PyObject *owner, bool keep) {
    if (!owner) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    if (keep) Py_IncRef(owner);
    else Py_DecRef(owner);
    PyGILState_Release(gil);
}

int jh_face_open(jemhooks_config *config, int deferred, uintptr_t owner, jh_face **face) {
    jh_face *f = calloc(1, sizeof *f);
    if (!f) return -ENOMEM;
    f->deferred = deferred;
    f->owner = (PyObject *)owner;
    config->user = f;
    int rc = jemhooks_arena_create(config, &f->arena);
    if (rc) {
        free(f);
        return rc;
    }
    keep_owner(f->owner, true);
    *face = f;
    return 0;
}

int jh_face_close(jh_face *f) {
    int64_t users = atomic_fetch_or(&f->users, CLOSED);
    return !(users & (CLOSED | COUNT));
}

int jh_face_enter(jh_face *f, int hold) {
    int64_t users = atomic_load(&f->users);
    do {
        if (users & CLOSED && (!hold || !(users & COUNT))) return -ESHUTDOWN;
    } while (!atomic_compare_exchange_weak(&f->users, &users, users + 1));
    return 0;
}

static void enqueue(jh_face *first, jh_face *last) {
    last->next = atomic_load(&queue);
    while (!atomic_compare_exchange_weak(&queue, &last->next, first)) {}
}

void jh_face_leave(jh_face *f) {
    int64_t users = atomic_fetch_sub(&f->users, 1);
    if ((users & (CLOSED | COUNT)) != (CLOSED | 1)) return;
    if (f->deferred || jh_face_finish(f) == -EDEADLK) enqueue(f, f); /* the latter: in a finaliser, inside a registrar */
}

int jh_face_finish(jh_face *f) {
    int rc = jemhooks_arena_destroy(f->arena);
    if (!rc) keep_owner(f->owner, false);
    if (rc != -EBUSY && rc != -ECHILD && rc != -EDEADLK && atomic_fetch_or(&f->users, FINISHED) & RELEASED) free(f);
    return rc;
}

void jh_face_defer(jh_face *f) {
    enqueue(f, f);
}

void jh_face_abandon(jh_face *f) {
    /* Counted as a use, it cannot go before it is released. */
    if (!jh_face_enter(f, false)) {
        jh_face_close(f);
        atomic_fetch_or(&f->users, RELEASED);
        jh_face_leave(f);
    } else if (atomic_fetch_or(&f->users, RELEASED) & FINISHED) {
        free(f);
    }
}

jh_face *jh_face_next(void) {
    jh_face *f = atomic_exchange(&queue, NULL);
    if (!f || !f->next) return f;
    jh_face *last = f->next;
    while (last->next) last = last->next;
    enqueue(f->next, last);
    return f;
}

void jh_face_forget(void) {
    atomic_store(&queue, NULL);
}

jemhooks_arena *jh_face_arena(jh_face *f) {
    return f->arena;
}

static void raise_peak(atomic_ullong *peak, unsigned long long now) {
    unsigned long long was = atomic_load_explicit(peak, memory_order_relaxed);
    while (now > was && !atomic_compare_exchange_weak(peak, &was, now)) {}
}

uintptr_t jh_face_alloc(jh_face *f, size_t size, size_t alignment, int zero) {
    if (jh_face_enter(f, false)) return 1;
    void *p = zero ? jemhooks_aligned_calloc(f->arena, alignment, 1, size) : jemhooks_aligned_alloc(f->arena, alignment, size);
    if (!p) {
        int err = errno;
        jh_face_leave(f);
        errno = err;
        return 0;
    }
    size_t bytes = jemhooks_usable_size(p);
    raise_peak(&f->peak_bytes, atomic_fetch_add(&f->current_bytes, bytes) + bytes);
    raise_peak(&f->peak_count, atomic_fetch_add(&f->current_count, 1) + 1);
    atomic_fetch_add(&f->total_bytes, bytes);
    atomic_fetch_add(&f->total_count, 1);
    return (uintptr_t)p;
}

void jh_face_free(void *block) {
    jh_face *f = jemhooks_arena_user(jemhooks_region_of(block)->arena);
    atomic_fetch_sub(&f->current_bytes, jemhooks_usable_size(block));
    atomic_fetch_sub(&f->current_count, 1);
    jemhooks_free(block);
    jh_face_leave(f);
}

void jh_face_leave_region(void *user) {
    const jemhooks_region *r = (const jemhooks_region *)((char *)user - offsetof(jemhooks_region, user));
    jh_face_leave(jemhooks_arena_user(r->arena));
}

void jh_face_get_stats(const jh_face *f, jh_face_stats *s) {
    *s = (jh_face_stats){f->current_bytes, f->current_count, f->peak_bytes, f->peak_count, f->total_bytes, f->total_count};
}

int jh_face_key(uintptr_t address, jemhooks_key *key) {
    return jemhooks_get_key((const void *)address, key);
}

int jh_face_rail_key(uintptr_t address, unsigned rail, jemhooks_key *key) {
    return jemhooks_get_rail_key((const void *)address, rail, key);
}

uint64_t jh_face_packed_keys(uintptr_t address) {
    jemhooks_key k;
    if (jemhooks_get_key((const void *)address, &k)) return UINT64_MAX;
    if ((k.lkey | k.rkey) >> 32 || k.rkey == UINT32_MAX) return UINT64_MAX - 1;
    return k.rkey << 32 | k.lkey;
}

int jh_face_packed_key(uintptr_t address, unsigned rail, void *buffer, size_t *length) {
    return jemhooks_copy_packed_key((const void *)address, rail, buffer, length);
}

int jh_face_lease(uintptr_t address, jemhooks_key *key) {
    return jemhooks_lease((const void *)address, key);
}

int jh_face_unlease(uintptr_t address) {
    return jemhooks_release((const void *)address);
}

int jh_face_region(uintptr_t address, jemhooks_region_info *info, uintptr_t *user, uintptr_t *arena) {
    jemhooks_region *r = jemhooks_region_of((const void *)address);
    if (!r) return -ENOENT;
    uint64_t g = __atomic_load_n(&r->generation, __ATOMIC_ACQUIRE), word = __atomic_load_n(&r->word, __ATOMIC_ACQUIRE);
    *info = (jemhooks_region_info){
        .base = __atomic_load_n(&r->base, __ATOMIC_ACQUIRE),
        .length = __atomic_load_n(&r->length, __ATOMIC_ACQUIRE),
        .lkey = __atomic_load_n(&r->lkey, __ATOMIC_ACQUIRE),
        .rkey = __atomic_load_n(&r->rkey, __ATOMIC_ACQUIRE),
        .remote_base = __atomic_load_n(&r->remote_base, __ATOMIC_ACQUIRE),
        .generation = g,
        .state = (uint32_t)(word & 255),
        .leases = (uint32_t)(word >> 8),
    };
    *arena = (uintptr_t)__atomic_load_n(&r->arena, __ATOMIC_ACQUIRE);
    if (g & 1 || __atomic_load_n(&r->generation, __ATOMIC_RELAXED) != g) return -EAGAIN;
    *user = (uintptr_t)r->user;
    return info->length ? 0 : -ENOENT;
}

static int sge(const jh_face *f, unsigned rail, uint64_t address, uint64_t length, jh_face_sge *out) {
    const void *p = (const void *)(uintptr_t)address;
    const jemhooks_region *r = jemhooks_region_of(p);
    jemhooks_key key;
    if (!r || __atomic_load_n(&r->arena, __ATOMIC_ACQUIRE) != f->arena) return EXDEV;
    int rc = rail ? jemhooks_get_rail_key(p, rail, &key) : jemhooks_get_key(p, &key);
    if (rc) return rc;
    if (!length || length > UINT32_MAX || length > key.length) return EMSGSIZE;
    if (key.lkey > UINT32_MAX) return EOVERFLOW;
    *out = (jh_face_sge){address, (uint32_t)length, (uint32_t)key.lkey};
    return 0;
}

int jh_face_sges(jh_face *f, unsigned rail, size_t n, const uint64_t *addresses, const uint64_t *lengths, jh_face_sge *sges,
                 size_t *done) {
    int rc = 0;
    for (*done = 0; *done < n && !(rc = sge(f, rail, addresses[*done], lengths[*done], &sges[*done]));) ++*done;
    return rc;
}
