/* heap.c - a heap: one or more jemalloc arenas (shards) over one space, and the calls that allocate from them.
 * Concurrency: allocation and free from any thread at any time; jh_heap_destroy() when no one else uses the heap.   */
#include "jemalloc.h"
#include "../../error.h"
#include "../../fault.h"

#include <stdlib.h>
#include <string.h>

#define NEVER ((size_t)1 << 40) /* an oversize threshold that no allocation reaches; 0 would not switch it off */

int jh_heap_prepare(jh_space *space) {
    int rc = jh_ctl_load();
    if (rc) return rc;
    if (!space->provider->host_accessible && jh_jemalloc.touches)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, ENOTSUP, "arena '%s': jemalloc's options junk or zero write to all memory, and the "
                       "host cannot touch this; remove them from MALLOC_CONF", space->rails.name);
    space->shared = !jh_jemalloc.retain;
    return 0;
}

static int create_arena(jh_shard *shard) {
    struct { /* arena_config_t of 5.3 */
        jh_extent_hooks *hooks;
        bool metadata_use_hooks;
    } ext = {&shard->hooks, JH_FAULT(metadata_inside)};
    size_t size = sizeof shard->index;
    if (jh_jemalloc.metadata_outside)
        return je_mallctl("experimental.arenas_create_ext", &shard->index, &size, &ext, sizeof ext);
    return je_mallctl("arenas.create", &shard->index, &size, &ext.hooks, sizeof ext.hooks);
}

static int start_shard(jh_shard *shard, jh_space *space, const jemhooks_config *config) {
    shard->hooks = jh_extent_hooks_5;
    shard->space = space;
    atomic_init(&shard->bound, jh_jemalloc.bounds_growth ? 0 : config->region_max);
    int rc = create_arena(shard);
    if (rc)
        return jh_fail(JEMHOOKS_ERROR_MEMORY, rc, "arena '%s': jemalloc cannot make another arena: %s; it has at most 4,095",
                       space->rails.name, strerror(rc));
    size_t never = NEVER, limit = config->region_max;
    ssize_t dirty = config->dirty_decay_ms, muzzy = config->muzzy_decay_ms;
    if (!JH_FAULT(oversize_default)) jh_ctl_arena(JH_CTL_OVERSIZE, shard->index, NULL, NULL, &never, sizeof never);
    if (!JH_FAULT(growth_unlimited)) jh_ctl_arena(JH_CTL_GROW_LIMIT, shard->index, NULL, NULL, &limit, sizeof limit);
    if (dirty != JEMHOOKS_DECAY_DEFAULT) jh_ctl_arena(JH_CTL_DIRTY_DECAY, shard->index, NULL, NULL, &dirty, sizeof dirty);
    if (muzzy != JEMHOOKS_DECAY_DEFAULT) jh_ctl_arena(JH_CTL_MUZZY_DECAY, shard->index, NULL, NULL, &muzzy, sizeof muzzy);
    return 0;
}

static void end_shards(jh_heap *heap) {
    for (unsigned i = 0; i < heap->shards; i++) jh_ctl_arena(JH_CTL_DESTROY, heap->shard[i].index, NULL, NULL, NULL, 0);
    jh_tcache_leave(heap);
    free(heap);
}

int jh_heap_create(jh_space *space, const jemhooks_config *config, jh_heap **heap) {
    jh_heap *h = calloc(1, sizeof *h + config->shards * sizeof h->shard[0]);
    if (!h) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "arena '%s': no memory for the heap itself", space->rails.name);
    h->space = space;
    int rc = jh_tcache_enter(h);
    if (rc) {
        free(h);
        return jh_fail(JEMHOOKS_ERROR_MEMORY, -rc, "arena '%s': there are 4,095 arenas already; destroy some", space->rails.name);
    }
    for (; h->shards < config->shards; h->shards++)
        if ((rc = start_shard(&h->shard[h->shards], space, config))) {
            end_shards(h);
            return rc;
        }
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

int jh_heap_destroy(jh_heap *heap, uint64_t *active) {
    jh_tcache_end_all(heap);
    jh_ctl_epoch();
    *active = sum(heap, JH_CTL_PACTIVE) * page_size();
    if (*active) return -EBUSY;
    end_shards(heap);
    return 0;
}

/* jemalloc without a growth limit of its own must still get extents for blocks larger than region_max. */
static void raise_bound(jh_heap *heap, size_t size, size_t alignment) {
    size_t need = size + alignment + ((size_t)64 << 10); /* room for size-class rounding and cache-index padding */
    need += size / 4;
    for (unsigned i = 0; i < heap->shards; i++) {
        size_t bound = atomic_load(&heap->shard[i].bound);
        while (bound && bound < need && !atomic_compare_exchange_weak(&heap->shard[i].bound, &bound, need)) {}
    }
}

void *jh_heap_alloc(jh_heap *heap, size_t size, size_t alignment, bool zero, jemhooks_region **region) {
    int flags = jh_tcache_flags(heap) | MALLOCX_LG_ALIGN(__builtin_ctzl(alignment));
    /* Before 5.3 jemalloc clears by MADV_DONTNEED, past every hook. */
    if (zero && jh_jemalloc.metadata_outside) flags |= MALLOCX_ZERO;
    if (!jh_jemalloc.bounds_growth && size > (size_t)1 << 20) raise_bound(heap, size, alignment);
    void *p = je_mallocx(size, flags);
    if (!p) return NULL;
    *region = jemhooks_region_of(p);
    if (!*region || (*region)->arena != heap->space->arena) { /* late in a thread's exit jemalloc answers from arena 0 */
        je_dallocx(p, MALLOCX_TCACHE_NONE);
        return NULL;
    }
    if (zero && !jh_jemalloc.metadata_outside) memset(p, 0, size);
    return p;
}

bool jh_heap_resize(jh_heap *heap, void *p, size_t size) {
    size_t now = je_sallocx(p, 0), want = je_nallocx(size, 0);
    if (want == now) return true;
    size_t got = je_xallocx(p, size, 0, jh_tcache_flags(heap));
    return got >= size && got <= want;
}

void jh_heap_free(jh_heap *heap, void *p) {
    je_dallocx(p, jh_tcache_flags(heap));
}

size_t jh_heap_usable(const void *p) {
    return je_sallocx(p, 0);
}

void jh_heap_purge(jh_heap *heap, bool flush) {
    if (flush) jh_tcache_flush(heap);
    for (unsigned i = 0; i < heap->shards; i++) jh_ctl_arena(JH_CTL_PURGE, heap->shard[i].index, NULL, NULL, NULL, 0);
}

void jh_heap_stats(jh_heap *heap, jemhooks_stats *stats) {
    size_t page = page_size();
    jh_ctl_epoch();
    stats->active = sum(heap, JH_CTL_PACTIVE) * page;
    stats->dirty = sum(heap, JH_CTL_PDIRTY) * page;
    stats->muzzy = sum(heap, JH_CTL_PMUZZY) * page;
    stats->abandoned = sum(heap, JH_CTL_ABANDONED);
    stats->allocated = sum(heap, JH_CTL_SMALL_ALLOCATED) + sum(heap, JH_CTL_LARGE_ALLOCATED);
}
