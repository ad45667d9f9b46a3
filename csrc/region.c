/* region.c - the life of regions: mapped from a provider, carved into extents, committed and decommitted page by page,
 * unmapped whole when their arena ends and never before.
 * Concurrency: hooks run this on any thread, several at once, under jemalloc's locks. Three short locks, none held while
 * another is waited for but space.carve, whose holder may map a region: space.carve, pages.lock of one region, `strands`.
 * The list of a space grows at its head only and is read without a lock. */
#include "region.h"
#include "error.h"
#include "events.h"
#include "fault.h"
#include "ledger.h"
#include "pagemap.h"
#include "pool.h"
#include "registrar/registrar.h"

#include <string.h>
#include <sys/mman.h>

#define LEAST_SHARED ((size_t)64 << 10) /* bytes of a region that extents share */

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

/* May a region lie at [base, base + length), in the midst of `outer`? Only in a live block of that arena. */
static bool may_lie_in(jh_region *outer, const char *base, size_t length) {
    jh_pages *p = &outer->registration.pages;
    pthread_mutex_lock(&p->lock);
    bool may = jh_pages_all_committed(p, (size_t)(base - p->base) / JH_PAGE, length / JH_PAGE);
    pthread_mutex_unlock(&p->lock);
    return may;
}

/* Enters the region into the page map. 0 or -errno. */
static int enter(jh_region *r, void *base, size_t length) {
    jemhooks_region *outer = NULL;
    if (is_stranded(base, length)) return -EADDRINUSE;
    int rc = jh_pagemap_insert(r->registration.hot, &outer);
    if (rc) return rc;
    r->outer = outer ? jh_pool_region_of(outer) : NULL;
    if (!outer) return 0;
    if (!may_lie_in(r->outer, base, length) || length <= 2 * JH_PAGE) {
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
    if (!rc) atomic_store(&s->starved, false);
    return rc;
}

/* A region of at least `length` bytes, or the given one; all of it is one gap, which nobody carves from yet. NULL with
 * space.map_error. */
static jh_gap *region_open(jh_space *s, size_t length, size_t alignment, const jemhooks_mapping *given) {
    jemhooks_mapping m = {.length = length};
    int err = ENOMEM;
    jh_gap *gap = jh_pool_take_gap();
    if (!gap) goto no_gap;
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
    size_t edge = r->outer ? JH_PAGE : 0; /* jemalloc finds the block around it by its first and last page: keep off them */
    *gap = (jh_gap){NULL, r, edge, length - edge};
    r->next = atomic_load(&s->regions);
    while (!atomic_compare_exchange_weak(&s->regions, &r->next, r)) {}
    atomic_fetch_add(&s->region_count, 1);
    atomic_fetch_add(&s->mapped, length);
    jh_event(s->arena, JEMHOOKS_ON_MAP, (uintptr_t)base, length);
    return gap;

not_entered:
    publish(r, JEMHOOKS_UNMAPPED, NULL, 0);
not_reserved:
    jh_pages_fini(&r->registration.pages);
no_pages:
    if (!given) jh_provider_unmap(s->provider, s->tenant, &m);
not_mapped:
    jh_pool_return_region(r);
no_struct:
    jh_pool_return_gap(gap);
no_gap:
    atomic_store(&s->map_error, err);
    return NULL;
}

/* May be carved from, from now on. The caller holds space.carve, or is alone. */
static bool offer(jh_space *s, jh_gap *gap) {
    if (!gap) return false;
    gap->next = s->gaps;
    s->gaps = gap;
    return true;
}

/* What other processes have of it is no longer vouched for. */
static void unexport(jh_region *r) {
    unsigned slot = atomic_exchange(&r->exported, 0);
    if (slot) jh_ledger_leave(slot);
}

/* Takes the region out of the page map; the regions in its midst, if there still are any, now lie in its outer one. */
static void region_hide(jh_region *r) {
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

static void region_close(jh_region *r) {
    void *base = (void *)r->registration.hot->base;
    size_t length = r->registration.hot->length;
    jh_seal(&r->registration); /* so that no subscriber registers it; whoever ended its registration may still hold its lock */
    jh_event(r->space->arena, JEMHOOKS_ON_UNMAP, (uintptr_t)base, length);
    unexport(r);
    region_hide(r);
    publish(r, JEMHOOKS_UNMAPPED, NULL, 0);
    jh_claim_over();
    jh_pages_fini(&r->registration.pages);
    jh_provider_unmap(r->space->provider, r->space->tenant, &r->registration.pages.mapping);
    jh_pool_return_region(r);
}

/* A region whose registration cannot be ended: a device may still write to it, so it stays mapped, with its registrars
 * and its provider open, but no look-up finds it, and no other region may lie there. */
static void strand(jh_region *r) {
    jh_space *s = r->space;
    unexport(r);
    region_hide(r);
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

int jh_space_open(jh_space *s) {
    atomic_init(&s->regions, NULL);
    s->gaps = NULL;
    return -pthread_mutex_init(&s->carve, NULL);
}

int jh_space_map_whole(jh_space *s) {
    size_t n = 0;
    while (n < s->provider->regions && offer(s, region_open(s, 0, JH_PAGE, &s->provider->region[n]))) n++;
    if (n == s->provider->regions) return 0;
    int err = atomic_load(&s->map_error);
    const char *why = err == EEXIST ? "it overlaps another region; it must lie outside of it, or in one live block of it and have "
                                      "12 KiB at least"
                      : err == EADDRINUSE ? "its registrar failed to deregister it earlier, so a device may still reach it"
                                          : strerror(err);
    return jh_fail(JEMHOOKS_ERROR_PROVIDER, err, "arena '%s': %s range %zu of %zu (%zu bytes in all) cannot be a region: %s",
                   s->rails.name, s->provider->ops.name, n + 1, s->provider->regions, s->provider->whole, why);
}

int jh_space_close(jh_space *s) {
    int first = 0;
    jh_region *r = atomic_exchange(&s->regions, NULL);
    while (r) {
        jh_region *next = r->next;
        int rc = jh_deregister(&r->registration, JH_DESPITE_BLOCKS);
        if (jh_state(r->registration.hot) == JEMHOOKS_MAPPED) {
            region_close(r);
        } else {
            first = first ? first : rc < 0 ? rc : -EIO;
            strand(r);
        }
        r = next;
    }
    while (s->gaps) {
        jh_gap *gap = s->gaps;
        s->gaps = gap->next;
        jh_pool_return_gap(gap);
    }
    pthread_mutex_destroy(&s->carve);
    return first;
}

int jh_space_trim(jh_space *s, size_t *released) {
    int first = 0;
    for (jh_region *r = atomic_load(&s->regions); r; r = r->next) {
        size_t length = r->registration.hot->length;
        int rc = jh_deregister(&r->registration, JH_IF_IDLE);
        if (!rc) *released += length;
        else if (rc < 0 && !first) first = rc;
    }
    return first;
}

int jh_space_revoke(jh_space *s) {
    int first = 0;
    for (jh_region *r = atomic_load(&s->regions); r; r = r->next) {
        int rc = jh_deregister(&r->registration, JH_DESPITE_LEASES);
        if (rc < 0 && !first) first = rc;
    }
    return first;
}

size_t jh_space_leases(const jh_space *s) {
    size_t n = 0;
    for (jh_region *r = atomic_load(&s->regions); r; r = r->next)
        n += __atomic_load_n(&r->registration.hot->word, __ATOMIC_RELAXED) >> 8;
    return n;
}

size_t jh_space_committed(const jh_space *s) {
    size_t pages = 0;
    for (jh_region *r = atomic_load(&s->regions); r; r = r->next) pages += jh_pages_committed(&r->registration.pages);
    return pages * JH_PAGE;
}

size_t jh_space_largest_gap(jh_space *s) {
    size_t largest = 0;
    pthread_mutex_lock(&s->carve);
    for (const jh_gap *g = s->gaps; g; g = g->next)
        if (g->end - g->at > largest) largest = g->end - g->at;
    pthread_mutex_unlock(&s->carve);
    return largest;
}

/* ---- for the thread that prepares regions ------------------------------------------------------------------------ */

/* What the next extent may take: jemalloc's steps grow by a quarter at most. space.carve held. */
static size_t next_extent(const jh_space *s) {
    size_t next = (s->last + s->last / 4 + JH_SLOT) / JH_SLOT * JH_SLOT;
    return next < s->region_max ? next : s->region_max;
}

/* Where a gap is linked that the next extent fits in, in a region that is registered, if it is to be; or (untouched) one that a
 * whole region is, and that is not. */
static jh_gap **find_gap(jh_space *s, bool untouched) {
    size_t next = next_extent(s);
    for (jh_gap **link = &s->gaps; *link; link = &(*link)->next) {
        const jh_gap *g = *link;
        const jemhooks_region *hot = g->region->registration.hot;
        bool registered = s->rails.policy == JEMHOOKS_NONE || jh_state(hot) != JEMHOOKS_MAPPED;
        if (g->end - g->at >= next && registered != untouched && (!untouched || (!g->at && g->end == hot->length))) return link;
    }
    return NULL;
}

static bool ready_gap(jh_space *s) {
    return s->provider->regions || find_gap(s, false);
}

bool jh_space_wants(jh_space *s, jh_gap **unready) {
    *unready = NULL;
    if (atomic_load(&s->rails.quiet)) return false;
    pthread_mutex_lock(&s->carve);
    bool wanted = !ready_gap(s);
    jh_gap **link = wanted ? find_gap(s, true) : NULL;
    if (link) {
        *unready = *link;
        *link = (*link)->next;
    }
    pthread_mutex_unlock(&s->carve);
    return wanted;
}

jh_gap *jh_space_map(jh_space *s) {
    return region_open(s, s->region_max, JH_SLOT, NULL);
}

void jh_space_offer(jh_space *s, jh_gap *whole) {
    pthread_mutex_lock(&s->carve);
    offer(s, whole);
    pthread_mutex_unlock(&s->carve);
}

/* ---- for hooks ------------------------------------------------------------------------------------------------- */

/* A new region for an extent of `size` bytes. jemalloc's own growing steps are regions as they are. Smaller exact extents
 * come with opt.retain off, and on any jemalloc once a step was refused: they share regions, unless memory is short. */
static bool grow(jh_space *s, size_t size, size_t alignment) {
    size_t least = alignment;
    bool divided = s->provider->whole && !s->provider->regions;
    if (alignment < JH_SLOT) alignment = JH_SLOT;
    if (size < s->growth && offer(s, region_open(s, s->growth, alignment, NULL))) {
        s->growth = s->growth * 2 < s->region_max ? s->growth * 2 : s->region_max;
        return true;
    }
    for (size_t length = s->growth / 2; divided && length > size && length >= LEAST_SHARED; length /= 2) /* what is left */
        if (offer(s, region_open(s, length, length < alignment ? least : alignment, NULL))) return true;
    return offer(s, region_open(s, size, alignment, NULL)) || (divided && offer(s, region_open(s, size, least, NULL)));
}

/* Takes pages into use; pages.lock is taken here. False: there are none. */
static bool commit_pages(jh_region *r, size_t first, size_t n) {
    jh_registration *g = &r->registration;
    pthread_mutex_lock(&g->pages.lock);
    int err = -jh_pages_reserve(&g->pages, first, n);
    if (err) {
        pthread_mutex_unlock(&g->pages.lock);
        atomic_store(&r->space->map_error, err);
        atomic_store(&r->space->starved, true);
        return false;
    }
    if (!g->pages.committed && jh_state(g->hot) == JEMHOOKS_REGISTERED) {
        bool prepared = atomic_fetch_and(&g->pin.unused_since, ~JH_UNUSED_YET) & JH_UNUSED_YET;
        if (!prepared) atomic_fetch_add(&g->rails->hits, 1);
    }
    if (r->space->seeding) jh_pages_hold(&g->pages, first, n, true);
    else jh_pages_commit(&g->pages, first, n);
    pthread_mutex_unlock(&g->pages.lock);
    return true;
}

/* [at, at + size) of r is a gap again. */
static void uncarve(jh_region *r, size_t at, size_t size) {
    jh_gap *gap = jh_pool_take_gap();
    if (!gap) return; /* then it is lost to this arena, as long as it lives */
    *gap = (jh_gap){NULL, r, at, at + size};
    jh_space_offer(r->space, gap);
}

/* Hands out [at, at + size) of r, which the caller has just carved. */
static void *extent(jh_region *r, size_t at, size_t size, bool *zero, bool *commit) {
    jh_pages *pages = &r->registration.pages;
    size_t first = at / JH_PAGE, n = size / JH_PAGE;
    if (JH_FAULT(commit_answered)) *commit = true;
    /* Not promised where peers may soon write, or have written: then it need not be kept, but where zeroes are asked for. */
    bool may = pages->provider->host_accessible && r->registration.rails->policy != JEMHOOKS_EAGER;
    pthread_mutex_lock(&pages->lock);
    *zero = *zero || (may && !jh_pages_any_stale(pages, first, n));
    jh_pages_promise(pages, first, n, *zero);
    pthread_mutex_unlock(&pages->lock);
    if (!*commit || commit_pages(r, first, n)) return pages->base + at;
    uncarve(r, at, size);
    return NULL;
}

/* Can [*at, *at + size) be carved from the gap? */
static bool fits(const jh_gap *g, size_t size, size_t alignment, size_t *at) {
    uintptr_t base = g->region->registration.hot->base;
    *at = ((base + g->at + alignment - 1) & ~(alignment - 1)) - base;
    return *at <= g->end && size <= g->end - *at;
}

/* Where the smallest gap is linked that it can be carved from; NULL: there is none. */
static jh_gap **best_gap(jh_space *s, size_t size, size_t alignment) {
    jh_gap **best = NULL;
    size_t at;
    for (jh_gap **link = &s->gaps; *link; link = &(*link)->next)
        if (fits(*link, size, alignment, &at) && (!best || (*link)->end - (*link)->at < (*best)->end - (*best)->at)) best = link;
    return best;
}

/* Takes [at, at + size) out of the gap linked there; what is before and after it stays. */
static void take_from_gap(jh_gap **link, size_t at, size_t size) {
    jh_gap *g = *link, *before = at > g->at ? jh_pool_take_gap() : NULL;
    if (before) {
        *before = (jh_gap){g->next, g->region, g->at, at};
        g->next = before;
    }
    g->at = at + size;
    if (g->at < g->end) return;
    *link = g->next;
    jh_pool_return_gap(g);
}

/* An extent of so many bytes was: the next one may be larger. space.carve held. */
static void carved(jh_space *s, size_t size) {
    s->last = size < s->region_max ? size : s->region_max;
    if (!s->ahead) return;
    atomic_store(&s->rails.quiet, false);
    if (!ready_gap(s)) jh_prepare_wake(s->ahead);
}

void *jh_space_carve(jh_space *s, size_t size, size_t alignment, bool *zero, bool *commit) {
    if ((size > s->region_limit && !JH_FAULT(growth_unlimited)) || (*zero && !s->provider->host_accessible)) {
        atomic_store(&s->map_error, size > s->region_limit ? E2BIG : EOPNOTSUPP);
        return NULL;
    }
    jh_region *r = NULL;
    size_t at = 0;
    pthread_mutex_lock(&s->carve);
    jh_gap **link = best_gap(s, size, alignment);
    if (!link && grow(s, size, alignment)) link = best_gap(s, size, alignment);
    if (link && fits(*link, size, alignment, &at)) {
        r = (*link)->region;
        take_from_gap(link, at, size);
        carved(s, size);
    }
    pthread_mutex_unlock(&s->carve);
    return r ? extent(r, at, size, zero, commit) : NULL;
}

void *jh_space_carve_at(jh_space *s, void *address, size_t size, bool *zero, bool *commit) {
    jh_region *r = jh_region_at(address);
    if (!r || r->space != s) return NULL;
    size_t at = (uintptr_t)address - r->registration.hot->base;
    pthread_mutex_lock(&s->carve);
    jh_gap **link = &s->gaps;
    while (*link && ((*link)->region != r || (*link)->at != at || size > (*link)->end - at)) link = &(*link)->next;
    bool found = *link;
    if (found) {
        take_from_gap(link, at, size);
        carved(s, size);
    }
    pthread_mutex_unlock(&s->carve);
    return found ? extent(r, at, size, zero, commit) : NULL;
}

bool jh_region_commit(jh_region *r, void *address, size_t length) {
    return commit_pages(r, (size_t)((char *)address - r->registration.pages.base) / JH_PAGE, length / JH_PAGE);
}

void jh_region_decommit(jh_region *r, void *address, size_t length) {
    jh_pages *p = &r->registration.pages;
    size_t first = (size_t)((char *)address - p->base) / JH_PAGE, n = length / JH_PAGE;
    if (!JH_FAULT(decommit_untold)) jh_event(r->space->arena, JEMHOOKS_ON_DECOMMIT, (uintptr_t)address, length);
    pthread_mutex_lock(&p->lock);
    if (r->space->seeding) jh_pages_hold(p, first, n, false);
    else jh_pages_decommit(p, first, n);
    unsigned state = jh_state(r->registration.hot);
    if (state == JEMHOOKS_MAPPED || JH_FAULT(decommit_drops) ||
        (state == JEMHOOKS_REGISTERING && JH_FAULT(decommit_drops_registering)))
        jh_pages_give_back(p, first, n);
    else if (!p->committed)
        jh_unused(&r->registration);
    pthread_mutex_unlock(&p->lock);
}
