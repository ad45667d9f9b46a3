/* heap.c - a heap: one or more jemalloc arenas (shards) over one space, and the calls that allocate from them.
 * Concurrency: allocation and free from any thread at any time; jh_heap_destroy() when no one else uses the heap.   */
#include "jemalloc.h"
#include "../../error.h"
#include "../../fault.h"
#include "../../pagemap.h"

#include <stdlib.h>
#include <string.h>

#define LG_PAGE 12
#define DECAY 10000000000u /* ns: jemalloc's own default is 10 s */

/* Before 5.3 jemalloc merges an ending arena's statistics, and lists its index to be used again, without its control lock: two
 * ends, or an end and an epoch, at once crash, and beside an end two new arenas can get one index, so that one has the other's
 * hooks. Held around jemalloc's calls, never taken in a hook. */
static pthread_mutex_t ends = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void) {
    pthread_mutex_init(&ends, NULL);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

int jh_heap_prepare(jh_space *space) {
    int rc = jh_ctl_load();
    if (rc) return rc;
    if (!space->provider->host_accessible && jh_jemalloc.touches)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, ENOTSUP, "arena '%s': jemalloc's options junk, zero or lg_san_uaf_align write to all "
                       "memory, and the host cannot touch this; remove them from %s", space->rails.name, jh_jemalloc.options);
    if (!space->provider->host_accessible && jh_jemalloc.chunk)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, ENOTSUP, "arena '%s': jemalloc %s keeps records in the memory that it hands out, and the "
                       "host cannot touch this; use jemalloc 5", space->rails.name, jh_jemalloc.version);
    return 0;
}

size_t jh_heap_piece(size_t *alignment) {
    return *alignment = jh_jemalloc.chunk ? jh_jemalloc.chunk : JH_PAGE;
}

/* Destroys the jemalloc arenas. -EBUSY: jemalloc refused the first, and nothing has changed; -EIO: it refused a later one,
 * whose hooks must live on: the heap is then not freed. */
static int end_shards(jh_heap *heap) {
    int rc = 0;
    for (unsigned i = 0; i < heap->shards; i++) {
        if (!jh_shard_end(&heap->shard[i])) continue;
        if (!i) return -EBUSY;
        rc = -EIO;
    }
    if (rc) return rc;
    jh_tcache_leave(heap);
    free(heap);
    return 0;
}

/* mallocx, with forks held off where need be. */
static void *allocate(size_t size, int flags) {
    jh_this_runs = jh_jemalloc.recommits && size <= jh_jemalloc.largest_run && (flags & MALLOCX_LG_ALIGN(63)) <= LG_PAGE;
    jh_growth_enter();
    void *p = je_mallocx(size, flags);
    jh_growth_leave();
    jh_this_runs = false;
    return p;
}

/* The same. A jemalloc without a growth limit of its own is refused extents beyond region_max, which it then asks for
 * exactly; while a block that large is being allocated, an extent for it must pass. */
static void *obtain(jh_heap *heap, size_t size, size_t alignment, int flags) {
    if (jh_jemalloc.bounds_growth || size + alignment <= heap->space->region_max / 2) return allocate(size, flags);
    size_t need = size + size / 4 + alignment + ((size_t)64 << 10); /* size class, alignment and cache-index padding */
    atomic_fetch_add(&heap->large, 1);
    void *p = NULL;
    for (int tries = 0; !p && tries < 3; tries++) { /* another thread, done, may just be lowering the bounds */
        bool raised = false;
        for (unsigned i = 0; i < heap->shards; i++) {
            size_t bound = atomic_load(&heap->shard[i].bound);
            raised |= bound < need;
            while (bound < need && !atomic_compare_exchange_weak(&heap->shard[i].bound, &bound, need)) {}
        }
        if (!tries || raised) p = allocate(size, flags);
    }
    if (atomic_fetch_sub(&heap->large, 1) == 1)
        for (unsigned i = 0; i < heap->shards; i++) atomic_store(&heap->shard[i].bound, heap->space->region_max);
    return p;
}

/* The largest size class up to n, and the one below a class: four in each doubling. */
static size_t class_up_to(size_t n) {
    size_t step = (size_t)1 << (63 - __builtin_clzl(n)) >> 2;
    return n / step * step;
}

static size_t class_below(size_t class) {
    return class_up_to(class - 1);
}

/* Memory of fixed size, which one arena has for itself: jemalloc gets it in the largest pieces there are, before anything else. Else it
 * would come in growing steps, which are never joined again: blocks of 1 MiB could use 83 % of 64 MiB. */
static void seed(jh_heap *heap) {
    enum { MOST = 64 };
    void *piece[MOST];
    jh_space *space = heap->space;
    int n = 0, flags = MALLOCX_ARENA(heap->shard[0].index) | MALLOCX_TCACHE_NONE;
    atomic_store(&space->seeding, true); /* nobody writes to what is allocated here */
    for (size_t gap; n < MOST && (gap = jh_space_largest_gap(space)) >= JH_SLOT; n++) {
        size_t class = class_up_to(gap); /* jemalloc takes an extent of it for the class below, which it pads by a page */
        piece[n] = obtain(heap, class, 1, flags);
        if (!piece[n]) piece[n] = obtain(heap, class_below(class), 1, flags);
        if (!piece[n]) break;
    }
    while (n) je_dallocx(piece[--n], MALLOCX_TCACHE_NONE);
    for (size_t i = 0; i < space->provider->regions; i++) heap->clears |= !space->provider->region[i].zero;
    jh_heap_purge(heap, false);
    atomic_store(&space->seeding, false);
}

int jh_heap_create(jh_space *space, const jemhooks_config *config, jh_heap **heap) {
    jh_heap *h = calloc(1, sizeof *h + config->shards * sizeof h->shard[0]);
    if (!h) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "arena '%s': no memory for the heap itself", space->rails.name);
    h->space = space;
    h->decay = config->dirty_decay_ms == JEMHOOKS_DECAY_DEFAULT ? DECAY : config->dirty_decay_ms < 0 ? UINT64_MAX
                                                                          : (uint64_t)config->dirty_decay_ms * 1000000;
    atomic_init(&h->aged, jh_now());
    space->in_chunks = jh_jemalloc.chunk;
    int rc = jh_tcache_enter(h);
    if (rc) {
        free(h);
        return jh_fail(JEMHOOKS_ERROR_MEMORY, -rc, "arena '%s': there are 4,095 arenas already; destroy some", space->rails.name);
    }
    pthread_mutex_lock(&ends);
    while (h->shards < config->shards && !(rc = jh_shard_start(&h->shard[h->shards], space, config))) h->shards++;
    if (rc) end_shards(h);
    pthread_mutex_unlock(&ends);
    if (rc) return rc;
    if (space->provider->regions && h->shards == 1 && jh_jemalloc.retain && !jh_jemalloc.chunk && !JH_FAULT(unseeded)) seed(h);
    *heap = h;
    return 0;
}

static size_t sum(jh_heap *heap, enum jh_ctl ctl) {
    size_t n = 0;
    for (unsigned i = 0; i < heap->shards; i++) n += jh_ctl_stat(ctl, heap->shard[i].index);
    return n;
}

static size_t page_size(void) {
    size_t page = 4096, size = sizeof page;
    je_mallctl("arenas.page", &page, &size, NULL, 0);
    return page;
}

/* Bytes of pages in use. An epoch looks at all arenas there are, so it is asked for only if needed. */
static size_t in_use(jh_heap *heap) {
    if (!jh_space_committed(heap->space)) return 0;
    jh_ctl_epoch();
    return sum(heap, JH_CTL_PACTIVE) * page_size();
}

int jh_heap_destroy(jh_heap *heap) {
    const char *name = heap->space->rails.name;
    jh_tcache_end_all(heap);
    pthread_mutex_lock(&ends);
    size_t active = in_use(heap);
    int rc = active ? 0 : end_shards(heap);
    pthread_mutex_unlock(&ends);
    if (active)
        return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "arena '%s': blocks in %zu bytes of pages are still allocated; free them "
                       "before destroying it", name, active);
    if (rc == -EBUSY)
        return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "arena '%s': jemalloc refuses to destroy it, since threads are bound to it by "
                       "thread.arena; bind them to another arena before destroying it", name);
    if (rc)
        return jh_fail(JEMHOOKS_ERROR_BUSY, EIO, "arena '%s': jemalloc refused to destroy some of its shards, since threads are "
                       "bound to them by thread.arena; their memory stays mapped for good", name);
    return 0;
}

/* Without opt.retain jemalloc would ask for each over-aligned extent anew, and use it for anything afterwards: the hook
 * refuses that. Here is room for one, which jemalloc then finds among its own, unless other threads are always quicker. */
static void *alloc_aligned(jh_heap *heap, size_t size, size_t alignment, int flags) {
    jh_shard *shard = &heap->shard[0];
    int plain = MALLOCX_ARENA(shard->index) | MALLOCX_TCACHE_NONE;
    flags = (flags & (MALLOCX_LG_ALIGN(63) | MALLOCX_ZERO)) | plain;
    void *p = NULL;
    for (int tries = 0; !p && tries < 4; tries++) {
        void *room = obtain(heap, size + alignment, 1, plain);
        if (!room) return NULL;
        je_dallocx(room, MALLOCX_TCACHE_NONE);
        p = obtain(heap, size, alignment, flags);
    }
    if (p) return p;
    atomic_fetch_add(&shard->aligned, 1);
    p = obtain(heap, size, alignment, flags);
    atomic_fetch_sub(&shard->aligned, 1);
    return p;
}

/* The size to ask for. jemalloc 4 leaves pages around an aligned block in a chunk committed for good, which then is never
 * empty again: such a block gets chunks of its own. */
static size_t apart(size_t size, size_t alignment) {
    return alignment > JH_PAGE && size <= jh_jemalloc.largest_run ? jh_jemalloc.largest_run + 1 : size;
}

void *jh_heap_alloc(jh_heap *heap, size_t size, size_t alignment, bool zero, jemhooks_region **region) {
    int flags = jh_tcache_flags(heap) | MALLOCX_LG_ALIGN(__builtin_ctzl(alignment));
    /* Before 5.3 jemalloc clears by MADV_DONTNEED, past every hook; what it was seeded with it takes for zero; and where it asks for
     * zeroes on 2 MiB, that is metadata. */
    bool clears = zero && (!jh_jemalloc.zeroes || heap->clears || alignment >= JH_SLOT);
    if (zero && !clears) flags |= MALLOCX_ZERO;
    void *p = obtain(heap, apart(size, alignment), alignment, flags);
    if (!p && alignment > JH_PAGE && !jh_jemalloc.retain) p = alloc_aligned(heap, size, alignment, flags);
    if (!p) return NULL;
    *region = jemhooks_region_of(p);
    if (!*region || (*region)->arena != heap->space->arena) { /* late in a thread's exit jemalloc answers from arena 0 */
        je_dallocx(p, MALLOCX_TCACHE_NONE);
        return NULL;
    }
    if (clears) memset(p, 0, size);
    return p;
}

const char *jh_heap_refusal(void) {
    return NULL;
}

/* Would a block of jemalloc 4 that has chunks of its own take more of them, beyond its region's end? The refusal to merge these would
 * come too late: jemalloc has counted their pages as in use by then, and does not take that back. */
static bool outgrows(const jh_heap *heap, const void *p, size_t now, size_t want) {
    if (!jh_jemalloc.chunk || now <= jh_jemalloc.largest_run || want <= now) return false;
    const jemhooks_region *r = jh_space_region_at(heap->space, p)->registration.hot;
    size_t chunks = (want + jh_jemalloc.chunk - 1) / jh_jemalloc.chunk * jh_jemalloc.chunk;
    return (uintptr_t)p + chunks > r->base + r->length;
}

bool jh_heap_resize(jh_heap *heap, void *p, size_t size) {
    size_t now = je_sallocx(p, 0), want = je_nallocx(size, 0);
    if (want == now) return true;
    if (outgrows(heap, p, now, want)) return false;
    jh_growth_enter();
    size_t got = je_xallocx(p, size, 0, jh_tcache_flags(heap));
    jh_growth_leave();
    return got >= size && got <= want;
}

void jh_heap_free(jh_heap *heap, void *p) {
    jh_this_runs = true;
    je_dallocx(p, jh_tcache_flags(heap));
    jh_this_runs = false;
}

size_t jh_heap_usable(const void *p) {
    return je_sallocx(p, 0);
}

void jh_heap_purge(jh_heap *heap, bool flush) {
    if (flush) jh_tcache_flush(heap);
    for (unsigned i = 0; i < heap->shards; i++) jh_shard_purge(&heap->shard[i]);
}

void jh_heap_age(jh_heap *heap) {
    if (!jh_jemalloc.decays) {
        unsigned long long now = jh_now(), aged = atomic_load(&heap->aged);
        if (now - aged >= heap->decay && atomic_compare_exchange_strong(&heap->aged, &aged, now)) jh_heap_purge(heap, false);
        return;
    }
    jh_this_runs = true;
    for (unsigned i = 0; i < heap->shards; i++) jh_ctl_arena(JH_CTL_DECAY, heap->shard[i].index, NULL, NULL, NULL, 0);
    jh_this_runs = false;
}

void jh_heap_stats(jh_heap *heap, jemhooks_stats *stats) {
    size_t page = page_size();
    pthread_mutex_lock(&ends);
    jh_ctl_epoch();
    pthread_mutex_unlock(&ends);
    stats->active = sum(heap, JH_CTL_PACTIVE) * page;
    stats->dirty = sum(heap, JH_CTL_PDIRTY) * page;
    stats->muzzy = sum(heap, JH_CTL_PMUZZY) * page;
    stats->abandoned = sum(heap, JH_CTL_ABANDONED);
    stats->allocated = sum(heap, JH_CTL_SMALL_ALLOCATED) + sum(heap, JH_CTL_LARGE_ALLOCATED) + sum(heap, JH_CTL_HUGE_ALLOCATED);
}
