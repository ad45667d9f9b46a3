/* region.c - the life of a region: mapped from a provider, committed and decommitted page by page, unmapped whole when its arena
 * ends and never before.
 * Concurrency: hooks run this on any thread, several at once, under jemalloc's locks. Two short locks, neither held while the
 * other is waited for: pages.lock of one region, `strands`. The list of a space grows at its head only and is read without a
 * lock. */
#include "space.h"
#include "error.h"
#include "events.h"
#include "fault.h"
#include "ledger.h"
#include "pagemap.h"
#include "pool.h"
#include "registrar/registrar.h"

#include <string.h>
#include <sys/mman.h>

static pthread_mutex_t strands = PTHREAD_MUTEX_INITIALIZER;
static jh_region *stranded; /* ranges that are registered for good, with no arena any more; guarded by `strands` */

static void in_child(void) {
    pthread_mutex_init(&strands, NULL);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

jh_region *jh_region_at(const void *address) {
    jemhooks_region *hot = jemhooks_region_of(address);
    return hot ? jh_pool_region_of(hot) : NULL;
}

/* Shows the region to the world, or (length 0) takes it away. */
static void publish(jh_region *r, unsigned state, void *base, size_t length) {
    jemhooks_region *hot = r->registration.hot;
    jh_hot_begin(hot);
    jh_hot_set(&hot->base, (uintptr_t)base);
    jh_hot_set(&hot->length, length);
    jh_hot_set(&hot->word, state);
    jh_hot_set(&hot->lkey, 0);
    jh_hot_set(&hot->rkey, 0);
    jh_hot_set(&hot->remote_base, (uintptr_t)base);
    __atomic_store_n(&hot->arena, length ? r->space->arena : NULL, __ATOMIC_RELEASE);
    jh_hot_end(hot);
}

/* Does a stranded registration reach into [base, base + length)? */
static bool is_stranded(const void *base, size_t length) {
    pthread_mutex_lock(&strands);
    const jh_region *r = stranded;
    while (r && (r->registration.hot->base >= (uintptr_t)base + length ||
                 r->registration.hot->base + r->registration.hot->length <= (uintptr_t)base))
        r = r->next;
    pthread_mutex_unlock(&strands);
    return r;
}

bool jh_region_is_committed(jh_region *r, const void *address, size_t length) {
    jh_pages *p = &r->registration.pages;
    pthread_mutex_lock(&p->lock);
    bool committed = jh_pages_all_committed(p, (size_t)((const char *)address - p->base) / JH_PAGE, length / JH_PAGE);
    pthread_mutex_unlock(&p->lock);
    return committed;
}

/* Enters the region into the page map. 0 or -errno. */
static int enter(jh_region *r, void *base, size_t length) {
    jemhooks_region *outer = NULL;
    if (is_stranded(base, length)) return -EADDRINUSE;
    int rc = jh_pagemap_insert(r->registration.hot, &outer);
    if (rc) return rc;
    r->outer = outer ? jh_pool_region_of(outer) : NULL;
    if (!outer) return 0;
    /* In the midst of another region only in a live block of that arena. */
    if (!jh_region_is_committed(r->outer, base, length) || length <= 2 * JH_PAGE) {
        jh_pagemap_remove(r->registration.hot, outer);
        return -EEXIST;
    }
    atomic_fetch_add(&r->outer->inner, 1);
    return 0;
}

/* Once pages could not be had, a region is taken only with all of its pages: else the allocator would ask for one after the other. */
static int reserve_new(jh_space *s, jh_pages *p) {
    if (!atomic_load(&s->starved)) return 0;
    int rc = jh_pages_reserve(p, 0, p->count);
    if (rc) jh_pages_unreserve(p, 0, p->count);
    else atomic_store(&s->starved, false);
    return rc;
}

jh_region *jh_region_open(jh_space *s, size_t length, size_t alignment, const jemhooks_mapping *given) {
    jemhooks_mapping m = {.length = length};
    int err = ENOMEM;
    jh_region *r = jh_pool_take_region();
    if (!r) goto no_struct;
    if (given) m = *given;
    else if ((err = -jh_provider_map(s->provider, s->tenant, alignment, &m))) goto not_mapped;
    void *base = m.base;
    length = m.length;
    if ((err = -jh_pages_init(&r->registration.pages, s->provider, s->tenant, &m))) goto no_pages;
    if ((err = -reserve_new(s, &r->registration.pages))) goto not_reserved;
    r->space = s;
    atomic_store(&r->inner, 0);
    atomic_store(&r->exported, 0);
    r->registration.rails = &s->rails;
    r->registration.live = 0;
    memset(r->registration.hot->user, 0, sizeof r->registration.hot->user);
    publish(r, JEMHOOKS_MAPPED, base, length);
    if ((err = -enter(r, base, length))) goto not_entered;
    r->next = atomic_load(&s->regions);
    while (!atomic_compare_exchange_weak(&s->regions, &r->next, r)) {}
    atomic_fetch_add(&s->region_count, 1);
    atomic_fetch_add(&s->mapped, length);
    jh_event(s->arena, JEMHOOKS_ON_MAP, (uintptr_t)base, length);
    return r;

not_entered:
    publish(r, JEMHOOKS_UNMAPPED, NULL, 0);
not_reserved:
    jh_pages_fini(&r->registration.pages);
no_pages:
    if (!given) jh_provider_unmap(s->provider, s->tenant, &m);
not_mapped:
    jh_pool_return_region(r);
no_struct:
    atomic_store(&s->map_error, err);
    return NULL;
}

/* What other processes have of it is no longer vouched for. */
static void unexport(jh_region *r) {
    unsigned slot = atomic_exchange(&r->exported, 0);
    if (slot) jh_ledger_leave(slot);
}

/* Takes the region out of the page map; the regions in its midst, if there still are any, now lie in its outer one. */
static void hide(jh_region *r) {
    jh_pagemap_remove(r->registration.hot, r->outer ? r->outer->registration.hot : NULL);
    if (r->outer) atomic_fetch_sub(&r->outer->inner, 1);
    if (!atomic_load(&r->inner)) return;
    uintptr_t end = r->registration.hot->base + r->registration.hot->length;
    for (uintptr_t a = r->registration.hot->base; a < end; a += JH_PAGE) {
        jh_region *in = jh_region_at((void *)a);
        if (!in || in->outer != r) continue;
        in->outer = r->outer;
        if (r->outer) atomic_fetch_add(&r->outer->inner, 1);
    }
}

void jh_region_close(jh_region *r) {
    void *base = (void *)r->registration.hot->base;
    size_t length = r->registration.hot->length;
    jh_seal(&r->registration); /* so that no subscriber registers it; whoever ended its registration may still hold its lock */
    jh_event(r->space->arena, JEMHOOKS_ON_UNMAP, (uintptr_t)base, length);
    unexport(r);
    hide(r);
    publish(r, JEMHOOKS_UNMAPPED, NULL, 0);
    jh_claim_over();
    jh_pages_fini(&r->registration.pages);
    jh_provider_unmap(r->space->provider, r->space->tenant, &r->registration.pages.mapping);
    jh_pool_return_region(r);
}

/* A device may still write to it, so its registrars and its provider stay open, and no other region may lie there. */
void jh_region_strand(jh_region *r) {
    jh_space *s = r->space;
    unexport(r);
    hide(r);
    jh_budget_strand(&r->registration.pin);
    __atomic_store_n(&r->registration.hot->arena, NULL, __ATOMIC_RELEASE);
    jh_provider_keep(s->provider);
    for (unsigned i = 0; i < s->rails.count; i++) jh_registrar_keep(s->rails.registrar[i]);
    r->registration.rails = NULL;
    r->space = NULL;
    pthread_mutex_lock(&strands);
    r->next = stranded;
    stranded = r;
    pthread_mutex_unlock(&strands);
}

size_t jh_stranded_bytes(void) {
    size_t n = 0;
    pthread_mutex_lock(&strands);
    for (const jh_region *r = stranded; r; r = r->next) n += r->registration.hot->length;
    pthread_mutex_unlock(&strands);
    return n;
}

/* ---- for hooks ------------------------------------------------------------------------------------------------- */

/* An idle region is to be busy. pages.lock held. */
static void taken_up(jh_registration *g) {
    if (jh_pages_busy(&g->pages) || jh_state(g->hot) != JEMHOOKS_REGISTERED) return;
    bool prepared = atomic_fetch_and(&g->pin.unused_since, ~JH_UNUSED_YET) & JH_UNUSED_YET;
    if (!prepared) atomic_fetch_add(&g->rails->hits, 1);
}

static bool commit(jh_region *r, void *address, size_t length, bool own) {
    jh_registration *g = &r->registration;
    size_t first = (size_t)((char *)address - g->pages.base) / JH_PAGE, n = length / JH_PAGE;
    pthread_mutex_lock(&g->pages.lock);
    int err = -jh_pages_reserve(&g->pages, first, n);
    if (err) {
        if (jh_state(g->hot) == JEMHOOKS_MAPPED || JH_FAULT(unreserve_registered)) jh_pages_unreserve(&g->pages, first, n);
        pthread_mutex_unlock(&g->pages.lock);
        atomic_store(&r->space->map_error, err);
        atomic_store(&r->space->starved, true);
        return false;
    }
    if (!own) taken_up(g);
    if (atomic_load(&r->space->seeding)) jh_pages_hold(&g->pages, first, n, true);
    else jh_pages_commit(&g->pages, first, n);
    if (own) jh_pages_own(&g->pages, first, n);
    pthread_mutex_unlock(&g->pages.lock);
    return true;
}

bool jh_region_commit(jh_region *r, void *address, size_t length) {
    return commit(r, address, length, false);
}

bool jh_region_commit_own(jh_region *r, void *address, size_t length) {
    return commit(r, address, length, true);
}

void jh_region_own(jh_region *r, void *address, size_t length) {
    jh_pages *p = &r->registration.pages;
    pthread_mutex_lock(&p->lock);
    jh_pages_own(p, (size_t)((char *)address - p->base) / JH_PAGE, length / JH_PAGE);
    pthread_mutex_unlock(&p->lock);
}

void jh_region_decommit(jh_region *r, void *address, size_t length) {
    jh_pages *p = &r->registration.pages;
    size_t first = (size_t)((char *)address - p->base) / JH_PAGE, n = length / JH_PAGE;
    if (!JH_FAULT(decommit_untold)) jh_event(r->space->arena, JEMHOOKS_ON_DECOMMIT, (uintptr_t)address, length);
    pthread_mutex_lock(&p->lock);
    if (atomic_load(&r->space->seeding)) jh_pages_hold(p, first, n, false);
    else jh_pages_decommit(p, first, n);
    unsigned state = jh_state(r->registration.hot);
    if (state == JEMHOOKS_MAPPED || JH_FAULT(decommit_drops) ||
        (state == JEMHOOKS_REGISTERING && JH_FAULT(decommit_drops_registering)))
        jh_pages_give_back(p, first, n);
    else if (!jh_pages_busy(p))
        jh_unused(&r->registration);
    pthread_mutex_unlock(&p->lock);
}

void jh_region_enter(jh_region *r, size_t bytes) {
    jh_pages *p = &r->registration.pages;
    pthread_mutex_lock(&p->lock);
    taken_up(&r->registration);
    __atomic_store_n(&p->blocks, p->blocks + bytes, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&p->lock);
}

void jh_region_leave(jh_region *r, size_t bytes) {
    jh_pages *p = &r->registration.pages;
    pthread_mutex_lock(&p->lock);
    __atomic_store_n(&p->blocks, p->blocks - bytes, __ATOMIC_RELAXED);
    if (!jh_pages_busy(p) && jh_state(r->registration.hot) != JEMHOOKS_MAPPED) jh_unused(&r->registration);
    pthread_mutex_unlock(&p->lock);
}
