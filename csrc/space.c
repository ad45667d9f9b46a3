/* space.c - the regions of an arena, and the carving of extents out of them.
 * Concurrency: hooks run this on any thread, several at once, under jemalloc's locks. space.carve is short; its holder may map a
 * region. The list of regions grows at its head only and is read without a lock, until the space is closed. */
#include "space.h"
#include "error.h"
#include "fault.h"
#include "pagemap.h"
#include "pool.h"

#include <string.h>

#define LEAST_SHARED ((size_t)64 << 10) /* bytes of a region that extents share */

/* A new region, or the given one, all of which is one gap that nobody carves from yet. NULL with space.map_error. */
static jh_gap *gap_in_new(jh_space *s, size_t length, size_t alignment, const jemhooks_mapping *given) {
    jh_gap *gap = jh_pool_take_gap();
    jh_region *r = gap ? jh_region_open(s, length, alignment, given) : NULL;
    if (!r) {
        if (gap) jh_pool_return_gap(gap);
        else atomic_store(&s->map_error, ENOMEM);
        return NULL;
    }
    size_t edge = r->outer ? JH_PAGE : 0; /* jemalloc finds the block around it by its first and last page: keep off them */
    *gap = (jh_gap){NULL, r, edge, r->registration.hot->length - edge};
    return gap;
}

/* May be carved from, from now on. The caller holds space.carve, or is alone. */
static bool offer(jh_space *s, jh_gap *gap) {
    if (!gap) return false;
    gap->next = s->gaps;
    s->gaps = gap;
    return true;
}

int jh_space_open(jh_space *s) {
    atomic_init(&s->regions, NULL);
    s->gaps = NULL;
    return -pthread_mutex_init(&s->carve, NULL);
}

int jh_space_map_whole(jh_space *s) {
    size_t n = 0;
    while (n < s->provider->regions && offer(s, gap_in_new(s, 0, JH_PAGE, &s->provider->region[n]))) n++;
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
            jh_region_close(r);
        } else {
            first = first ? first : rc < 0 ? rc : -EIO;
            jh_region_strand(r);
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

jh_region *jh_space_region_at(const jh_space *s, const void *address) {
    jh_region *r = jh_region_at(address);
    while (r && r->space != s) r = r->outer;
    return r;
}

size_t jh_space_committed(const jh_space *s) {
    size_t bytes = 0;
    for (jh_region *r = atomic_load(&s->regions); r; r = r->next) bytes += jh_pages_busy(&r->registration.pages);
    return bytes;
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
    return gap_in_new(s, s->region_max, JH_SLOT, NULL);
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
    size_t step = s->growth, next = step * 2 < s->region_max ? step * 2 : s->region_max;
    bool shares = size < step || (s->in_chunks && size == step);
    if (shares && offer(s, gap_in_new(s, step, alignment, NULL))) {
        s->growth = next;
        return true;
    }
    for (size_t length = s->growth / 2; divided && length > size && length >= LEAST_SHARED; length /= 2) /* what is left */
        if (offer(s, gap_in_new(s, length, length < alignment ? least : alignment, NULL))) return true;
    return offer(s, gap_in_new(s, size, alignment, NULL)) || (divided && offer(s, gap_in_new(s, size, least, NULL)));
}

/* [at, at + size) of r, which was carved, is a gap again, with those before and after it. */
static void uncarve(jh_region *r, size_t at, size_t size) {
    jh_space *s = r->space;
    jh_gap *before = NULL, *g, **after = NULL;
    pthread_mutex_lock(&s->carve);
    for (jh_gap **link = &s->gaps; *link; link = &(*link)->next) {
        if ((*link)->region != r) continue;
        if ((*link)->end == at) before = *link;
        if ((*link)->at == at + size) after = link;
    }
    if (before && after) {
        before->end = (*after)->end;
        g = *after;
        *after = g->next;
        jh_pool_return_gap(g);
    } else if (before) {
        before->end = at + size;
    } else if (after) {
        (*after)->at = at;
    } else if ((g = jh_pool_take_gap())) {
        *g = (jh_gap){NULL, r, at, at + size};
        offer(s, g);
    }
    pthread_mutex_unlock(&s->carve);
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
    if (!*commit || jh_region_commit(r, pages->base + at, size)) return pages->base + at;
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

void jh_space_uncarve(jh_space *s, void *address, size_t size) {
    jh_region *r = jh_space_region_at(s, address);
    if (r) uncarve(r, (uintptr_t)address - r->registration.hot->base, size);
}
