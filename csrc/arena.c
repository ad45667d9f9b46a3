/* arena.c - the public face: arenas and the blocks in them, over whichever allocator was configured.
 * Everything that may not happen inside a hook happens here, before or after the call into the allocator: registration,
 * purging for one retry, error texts.
 * Concurrency: any thread, any time; jemhooks_arena_destroy() when no one else uses the arena.                      */
#include "allocator/allocator.h"
#include "config_check.h"
#include "error.h"
#include "events.h"
#include "fork.h"
#include "pagemap.h"
#include "prepare.h"
#include "registrar/registrar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ALIGNMENT ((size_t)1 << 30)

struct jemhooks_arena {
    jh_space space;
    jh_heap *heap;
    void *user;        /* the caller's */
    bool zero_on_free;
    char name[64];
};

/* ---- create and destroy ---------------------------------------------------------------------------------------- */

/* For budgets: gives all free pages up. */
static void reclaim(jh_account *account) {
    jemhooks_arena *a = (jemhooks_arena *)((char *)account - offsetof(jemhooks_arena, space.rails.account));
    jh_heap_purge(a->heap, true);
}

/* For the thread that prepares regions. */
static void age(jh_space *space) {
    jemhooks_arena *a = (jemhooks_arena *)((char *)space - offsetof(jemhooks_arena, space));
    jh_heap_age(a->heap);
}

static void arena_free(jemhooks_arena *a) {
    jh_events_forget(a);
    for (unsigned i = 0; i < a->space.rails.count; i++) jemhooks_registrar_close(a->space.rails.registrar[i]);
    jemhooks_provider_close(a->space.provider);
    for (unsigned i = 0; i < a->space.rails.account.budgets; i++) jemhooks_budget_close(a->space.rails.account.budget[i]);
    free(a);
}

static int arena_open(jemhooks_arena *a, jemhooks_config *c) {
    jh_space *s = &a->space;
    int rc = jh_check_own(s);
    if (rc || (rc = jh_heap_prepare(s)) || (rc = jh_space_fit(s))) return rc;
    if ((rc = jh_pagemap_reserve()))
        return jh_fail(JEMHOOKS_ERROR_MEMORY, -rc, "arena '%s': cannot reserve 1 GiB of address space for the page map: %s; raise "
                       "the limit on %s", a->name, strerror(-rc), rc == -EAGAIN ? "locked memory (ulimit -l), or use mlockall() "
                       "with MCL_ONFAULT" : "address space (ulimit -v)");
    if ((rc = jh_provider_enter(s->provider, a->name, &s->tenant))) return rc;
    if (!(rc = jh_space_open(s))) {
        c->region_max = s->region_max;
        if (!(rc = jh_space_map_whole(s)) && !(rc = jh_check_pieces(s)) && !(rc = jh_heap_create(s, c, &a->heap))) {
            jh_account_enter(&s->rails.account);
            if (!c->prepare || !(rc = jh_prepare_start(s, age))) return 0;
            jh_account_leave(&s->rails.account);
            jh_heap_destroy(a->heap);
        }
        jh_space_close(s);
    }
    jh_provider_leave(s->provider, s->tenant);
    return rc;
}

int jemhooks_arena_create(const jemhooks_config *config, jemhooks_arena **arena) {
    jemhooks_config c = JEMHOOKS_CONFIG_INIT;
    if (!arena) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena: nowhere to put the arena (NULL)");
    int rc = jh_config_read(&c, sizeof c, config, "arena");
    if (rc) return rc;
    const char *name = c.name ? c.name : "arena";
    if ((rc = jh_config_check(name, &c))) return rc;
    jemhooks_arena *a = calloc(1, sizeof *a);
    if (!a) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "arena '%s': no memory for the arena itself", name);
    snprintf(a->name, sizeof a->name, "%s", name);
    jh_space *s = &a->space;
    s->arena = a;
    a->user = c.user;
    a->zero_on_free = c.zero_on_free;
    s->uncached = c.rotate_keys;
    if (c.rotate_keys) {
        c.idle_ttl_ms = 0;
        if (c.dirty_decay_ms == JEMHOOKS_DECAY_DEFAULT) c.dirty_decay_ms = 0;
        if (c.muzzy_decay_ms == JEMHOOKS_DECAY_DEFAULT) c.muzzy_decay_ms = 0;
    }
    s->growth = c.region_min;
    s->region_max = c.region_max;
    s->rails.name = a->name;
    s->rails.epoch = atomic_load(&jh_fork_epoch);
    s->rails.policy = c.policy;
    s->rails.access = c.access;
    if (c.access & (JEMHOOKS_REMOTE_WRITE | JEMHOOKS_REMOTE_ATOMIC)) s->rails.access |= JEMHOOKS_LOCAL_WRITE;
    s->rails.evict = c.evict;
    s->rails.idle_ttl = c.idle_ttl_ms < 0 ? UINT64_MAX : (uint64_t)c.idle_ttl_ms * 1000000;
    s->rails.in_free = true;
    jh_account *account = &s->rails.account;
    account->name = a->name;
    account->reclaim = reclaim;
    if ((rc = jemhooks_budget_create(c.pin_limit, c.max_regions, &account->budget[0]))) goto fail;
    account->budgets = 1;
    if (c.provider)
        jh_provider_keep(s->provider = c.provider);
    else if ((rc = jemhooks_provider_anonymous(NULL, &s->provider)))
        goto fail;
    for (; s->rails.count < c.registrar_count; s->rails.count++) {
        jh_registrar_keep(s->rails.registrar[s->rails.count] = c.registrars[s->rails.count]);
        account->budget[account->budgets++] = jh_registrar_budget(c.registrars[s->rails.count]);
        if (c.registrars[s->rails.count]->ops.not_in_free) s->rails.in_free = false;
    }
    s->rails.prompt = s->rails.in_free && !s->rails.idle_ttl;
    atomic_init(&s->rails.look, s->rails.prompt ? UINT64_MAX : 1);
    if ((rc = arena_open(a, &c))) goto fail;
    *arena = a;
    return 0;
fail:
    arena_free(a);
    return rc;
}

static int null_arena(const char *call) {
    return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: the arena is NULL", call);
}

static int frozen(const char *call, const jemhooks_arena *a) {
    return jh_fail(JEMHOOKS_ERROR_FORK, ECHILD, "%s: arena '%s' was made before the fork and is frozen in this process; make an "
                   "arena here", call, a->name);
}

/* 0 if the arena can be used here. */
static int usable(const char *call, const jemhooks_arena *a) {
    if (!a) return null_arena(call);
    return jh_frozen(a->space.rails.epoch) ? frozen(call, a) : 0;
}

int jemhooks_arena_destroy(jemhooks_arena *a) {
    int rc;
    if (!a) return 0;
    if ((rc = usable("jemhooks_arena_destroy", a))) return rc;
    if (jh_inside_registrar())
        return jh_fail(JEMHOOKS_ERROR_BUSY, EDEADLK, "arena '%s': destroyed from inside a registrar, which may be at work on one "
                       "of its regions; destroy it when the registrar's function has returned", a->name);
    size_t leases = jh_space_leases(&a->space);
    if (leases)
        return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "arena '%s': %zu leases are held; release them before destroying it", a->name,
                       leases);
    jh_prepare_pause(&a->space);
    jh_account_leave(&a->space.rails.account);
    if ((rc = jh_heap_destroy(a->heap))) {
        jh_account_enter(&a->space.rails.account);
        if (rc == -EIO) jh_prepare_end(&a->space); /* some of the heap is gone */
        else jh_prepare_resume(&a->space);
        return rc;
    }
    jh_prepare_end(&a->space);
    rc = jh_space_close(&a->space);
    jh_provider_leave(a->space.provider, a->space.tenant);
    arena_free(a);
    return rc == -EBUSY || rc == -ECHILD || rc == -EDEADLK ? -EIO : rc; /* those mean that the arena is still there */
}

void *jemhooks_arena_user(const jemhooks_arena *a) {
    return a ? a->user : NULL;
}

const char *jemhooks_arena_name(const jemhooks_arena *a) {
    return a ? a->name : "";
}

jemhooks_budget *jemhooks_arena_budget(jemhooks_arena *a) {
    return a ? a->space.rails.account.budget[0] : NULL;
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

static void *refused(const char *call, jemhooks_arena *a, size_t size) {
    jh_space *s = &a->space;
    char by_pieces[80] = "";
    size_t alignment, piece = jh_heap_piece(&alignment);
    if (piece > JH_PAGE)
        snprintf(by_pieces, sizeof by_pieces, "; its allocator takes %zu bytes at a time", piece);
    int err = atomic_load(&s->map_error);
    if (jh_heap_refusal())
        jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "%s: %zu bytes from arena '%s': %s", call, size, a->name, jh_heap_refusal());
    else if (err == E2BIG)
        jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "%s: %zu bytes from arena '%s' cannot lie in one registration: its registrars take "
                "at most %zu bytes, the allocator's rounding included", call, size, a->name, s->region_limit);
    else if (s->provider->regions)
        jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "%s: no room for %zu bytes in arena '%s': its %s memory has %zu bytes in regions of at most "
                "%zu, of which %zu are in use; free blocks or give it more%s", call, size, a->name, s->provider->ops.name,
                s->provider->whole, s->provider->largest, jh_space_committed(s), by_pieces);
    else if (s->provider->whole && err == ENOMEM)
        jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "%s: no room for %zu bytes in arena '%s': the %zu bytes of its %s memory are shared, and no "
                "free range is long enough; free blocks, destroy another arena, or give it more%s", call, size, a->name,
                s->provider->whole, s->provider->ops.name, by_pieces);
    else if (err == ENOSPC)
        jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "%s: no memory for %zu bytes in arena '%s' (%zu bytes mapped): the %s provider has no "
                "space left; %s, and this arena goes on", call, size, a->name, (size_t)atomic_load(&s->mapped), s->provider->ops.name,
                s->provider->page > JH_PAGE ? "reserve huge pages (vm.nr_hugepages)" : "make room in its file system");
    else
        jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "%s: no memory for %zu bytes in arena '%s' (%zu bytes mapped): the %s provider "
                "%s%s%s", call, size, a->name, (size_t)atomic_load(&s->mapped), s->provider->ops.name,
                err ? "failed with " : "was not asked (the thread may be exiting)", err ? strerror(err) : "",
                s->provider->page > JH_PAGE ? "; reserve huge pages (vm.nr_hugepages) or use ordinary ones"
                                            : "; free memory, or raise the limits (ulimit -v, vm.max_map_count)");
    return NULL;
}

static int bad_size(const char *call, const jemhooks_arena *a, size_t size) {
    return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: %zu bytes from arena '%s'; a size is 1 to %zu", call, size, a->name,
                   (size_t)PTRDIFF_MAX);
}

/* What is wrong with the arguments of an allocation: 0, or an error, recorded. */
static int check_request(const char *call, const jemhooks_arena *a, size_t size, size_t alignment, bool zero) {
    int rc = usable(call, a);
    if (rc) return rc;
    if (size - 1 >= PTRDIFF_MAX) return bad_size(call, a, size);
    if (!alignment || alignment & (alignment - 1) || alignment > MAX_ALIGNMENT)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: alignment %zu is not a power of two of at most 1 GiB", call, alignment);
    if (zero && !a->space.provider->host_accessible)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EOPNOTSUPP, "%s: arena '%s' is over memory that the host cannot touch, so it cannot "
                       "be cleared; allocate without zeroing", call, a->name);
    return 0;
}

/* An allocation that does not go through at the first try, or whose region is not registered yet: p may be NULL. */
static __attribute__((noinline)) void *insist(const char *call, jemhooks_arena *a, size_t size, size_t alignment, bool zero,
                                              void *p) {
    jemhooks_region *r;
    if (!p && check_request(call, a, size, alignment, zero)) return NULL;
    if (!p) { /* dirty pages may be in the way */
        atomic_store(&a->space.map_error, 0);
        jh_heap_purge(a->heap, true);
        p = jh_heap_alloc(a->heap, size, alignment, zero, &r);
    }
    if (!p) return refused(call, a, size);
    if (a->space.rails.policy == JEMHOOKS_EAGER && jh_register(&jh_region_at(p)->registration)) {
        int err = errno;
        jh_heap_free(a->heap, p);
        errno = err;
        return NULL;
    }
    return p;
}

/* An allocation with everything around it; inline, so that what a caller's constants decide costs nothing. */
static inline __attribute__((always_inline)) void *allocate(const char *call, jemhooks_arena *a, size_t size, size_t alignment,
                                                            bool zero) {
    void *p = NULL;
    jemhooks_region *r;
    bool usual = a && !jh_frozen(a->space.rails.epoch) && size - 1 < PTRDIFF_MAX &&
                 (alignment == 1 || (alignment - 1 < MAX_ALIGNMENT && !(alignment & (alignment - 1)))) &&
                 (!zero || a->space.provider->host_accessible);
    if (usual) p = jh_heap_alloc(a->heap, size, alignment, zero, &r);
    if (p && (a->space.rails.policy != JEMHOOKS_EAGER || jh_state(r) == JEMHOOKS_REGISTERED)) return p;
    return insist(call, a, size, alignment, zero, p);
}

void *jemhooks_alloc(jemhooks_arena *arena, size_t size) {
    return allocate("jemhooks_alloc", arena, size, 1, false);
}

static void *allocate_zeroed(const char *call, jemhooks_arena *a, size_t alignment, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EOVERFLOW, "%s: %zu times %zu bytes overflow", call, count, size), NULL;
    return allocate(call, a, bytes, alignment, true);
}

void *jemhooks_calloc(jemhooks_arena *arena, size_t count, size_t size) {
    return allocate_zeroed("jemhooks_calloc", arena, 1, count, size);
}

void *jemhooks_aligned_alloc(jemhooks_arena *arena, size_t alignment, size_t size) {
    return allocate("jemhooks_aligned_alloc", arena, size, alignment, false);
}

void *jemhooks_aligned_calloc(jemhooks_arena *arena, size_t alignment, size_t count, size_t size) {
    return allocate_zeroed("jemhooks_aligned_calloc", arena, alignment, count, size);
}

/* The arena of a pointer that a caller gave us. */
static jemhooks_arena *owner(const char *call, const void *p) {
    const jemhooks_region *r = jemhooks_region_of(p);
    if (r) return r->arena;
    jh_fail(JEMHOOKS_ERROR_NOT_OURS, ENOENT, "%s: address %p lies in no region of any arena; nothing was done", call, p);
    return NULL;
}

static void give(jemhooks_arena *a, void *p) {
    if (a->zero_on_free) memset(p, 0, jh_heap_usable(p));
    jh_heap_free(a->heap, p);
    if (jh_due(&a->space.rails)) jh_expire(&a->space.rails);
}

int jemhooks_free(void *p) {
    if (!p) return 0;
    jemhooks_arena *a = owner("jemhooks_free", p);
    if (!a) return -ENOENT;
    int err = errno; /* free() keeps it, and this is its like */
    if (!jh_frozen(a->space.rails.epoch)) give(a, p);
    errno = err;
    return 0;
}

int jemhooks_free_sized(void *p, size_t size) {
    if (!p) return 0;
    jemhooks_arena *a = owner("jemhooks_free_sized", p);
    if (!a) return -ENOENT;
    if (jh_frozen(a->space.rails.epoch)) return 0;
    size_t have = jh_heap_usable(p);
    if (!size || size > have)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_free_sized: the block at %p has %zu bytes, not %zu; it was not "
                       "freed", p, have, size);
    give(a, p);
    return 0;
}

size_t jemhooks_usable_size(const void *p) {
    jemhooks_arena *a = p ? owner("jemhooks_usable_size", p) : NULL;
    if (!a || usable("jemhooks_usable_size", a)) return 0;
    return jh_heap_usable(p);
}

/* Not rallocx: it has given the old block up when the new one turns out not to be registrable. */
void *jemhooks_realloc(jemhooks_arena *arena, void *p, size_t size) {
    static const char call[] = "jemhooks_realloc";
    if (!p) return allocate(call, arena, size, 1, false);
    if (usable(call, arena)) return NULL;
    jemhooks_arena *a = owner(call, p);
    if (!a) return NULL;
    if (a != arena)
        return jh_fail(JEMHOOKS_ERROR_NOT_OURS, ENOENT, "%s: the block at %p is of arena '%s', not of '%s'", call, p, a->name,
                       arena->name), NULL;
    if (size - 1 >= PTRDIFF_MAX) return bad_size(call, a, size), NULL;
    size_t have = jh_heap_usable(p);
    if (a->zero_on_free && size < have) memset((char *)p + size, 0, have - size);
    if (jh_heap_resize(a->heap, p, size)) return p;
    if (!a->space.provider->host_accessible && size <= have) return p;
    if (!a->space.provider->host_accessible)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EOPNOTSUPP, "%s: the block at %p cannot grow to %zu bytes in place, and the host "
                       "cannot copy memory of arena '%s'; allocate a new block and copy by device", call, p, size, a->name), NULL;
    void *q = allocate(call, a, size, 1, false);
    if (!q) return size <= have ? p : NULL;
    memcpy(q, p, have < size ? have : size);
    give(a, p);
    return q;
}

/* ---- the arena as a whole ---------------------------------------------------------------------------------------- */

int jemhooks_trim(jemhooks_arena *arena, size_t *released) {
    size_t bytes = 0;
    int rc = usable("jemhooks_trim", arena);
    if (rc) return rc;
    jh_heap_purge(arena->heap, true);
    atomic_store(&arena->space.rails.quiet, true);
    rc = jh_space_trim(&arena->space, &bytes);
    if (released) *released = bytes;
    return rc;
}

int jemhooks_wait_ready(jemhooks_arena *arena) {
    int rc = usable("jemhooks_wait_ready", arena);
    if (rc) return rc;
    if (jh_inside_registrar())
        return jh_fail(JEMHOOKS_ERROR_BUSY, EDEADLK, "jemhooks_wait_ready: called from inside a registrar or subscriber, which arena "
                       "'%s' may be waiting for", arena->name);
    jh_prepare_wait(&arena->space);
    return 0;
}

int jemhooks_revoke(jemhooks_arena *arena) {
    int rc = usable("jemhooks_revoke", arena);
    if (rc) return rc;
    if (jh_inside_registrar())
        return jh_fail(JEMHOOKS_ERROR_BUSY, EDEADLK, "jemhooks_revoke: called from inside a registrar or subscriber, which may be at work "
                       "on a region of arena '%s'; call it when that has returned", arena->name);
    jh_prepare_pause(&arena->space);
    atomic_store(&arena->space.rails.quiet, true);
    rc = jh_space_revoke(&arena->space);
    jh_prepare_resume(&arena->space);
    return rc;
}

int jemhooks_regions(jemhooks_arena *arena, jemhooks_region_info *info, size_t *count) {
    int rc = usable("jemhooks_regions", arena);
    if (rc) return rc;
    if (!count || (*count && !info))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_regions: NULL array or count");
    size_t n = 0;
    for (jh_region *r = atomic_load(&arena->space.regions); r; r = r->next, n++) {
        if (n >= *count) continue;
        const jemhooks_region *hot = r->registration.hot;
        pthread_mutex_lock(&r->registration.pages.lock);
        uint64_t word = __atomic_load_n(&hot->word, __ATOMIC_RELAXED);
        info[n] = (jemhooks_region_info){hot->base, hot->length, jh_pages_busy(&r->registration.pages), hot->lkey, hot->rkey,
                                         hot->remote_base, hot->generation, (uint32_t)(word & 255), (uint32_t)(word >> 8)};
        pthread_mutex_unlock(&r->registration.pages.lock);
    }
    *count = n;
    return 0;
}

int jemhooks_get_stats(jemhooks_arena *arena, jemhooks_stats *stats) {
    int rc = usable("jemhooks_get_stats", arena);
    if (rc) return rc;
    if (!stats || stats->size < sizeof stats->size)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_get_stats: set the size field of the struct to its sizeof");
    jh_space *s = &arena->space;
    jemhooks_stats now = {
        .size = stats->size,
        .regions = atomic_load(&s->region_count),
        .mapped = atomic_load(&s->mapped),
        .committed = jh_space_committed(s),
        .registered = atomic_load(&s->rails.account.bytes),
        .registered_peak = atomic_load(&s->rails.account.peak),
        .registrations = atomic_load(&s->rails.registrations),
        .deregistrations = atomic_load(&s->rails.deregistrations),
        .registration_failures = atomic_load(&s->rails.failures),
        .hits = atomic_load(&s->rails.hits),
        .evictions = atomic_load(&s->rails.evictions),
        .retries = atomic_load(&s->rails.retries),
        .registering_ns = atomic_load(&s->rails.time_registering),
    };
    for (int i = 0; i < JEMHOOKS_DURATIONS; i++) now.durations[i] = atomic_load(&s->rails.durations[i]);
    jh_heap_stats(arena->heap, &now);
    if (stats->size > sizeof now) memset((char *)stats + sizeof now, 0, stats->size - sizeof now);
    memcpy(stats, &now, stats->size < sizeof now ? stats->size : sizeof now);
    return 0;
}

size_t jemhooks_stranded_bytes(void) {
    return jh_stranded_bytes();
}
