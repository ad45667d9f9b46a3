/* direct.c - an allocator without classes or caches: every block is whole pages of its own, carved from a region or from what an
 * earlier block left, and given back when it is freed. Slow and wasteful for small blocks; it shows at once what a larger
 * allocator would hide, and is what the others are measured against.
 * Concurrency: one short lock for each heap; its holder may map and clear memory.                                    */
#include "allocator.h"
#include "../error.h"
#include "../pagemap.h"
#include "../provider/ranges.h"

#include <stdlib.h>
#include <string.h>

struct jh_heap {
    jh_space *space;
    pthread_mutex_t lock; /* guards the next two            */
    jh_ranges free;       /* pages that blocks have left    */
    jh_ranges live;       /* the blocks; neither joined nor split */
};

int jh_heap_prepare(jh_space *space) {
    (void)space;
    return 0;
}

size_t jh_heap_piece(size_t *alignment) {
    return *alignment = JH_PAGE;
}

int jh_heap_create(jh_space *space, const jemhooks_config *config, jh_heap **heap) {
    jh_heap *h = calloc(1, sizeof *h);
    (void)config;
    if (!h) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "arena '%s': no memory for the heap itself", space->rails.name);
    h->space = space;
    h->live.solid = true;
    pthread_mutex_init(&h->lock, NULL);
    *heap = space->heap = h;
    return 0;
}

int jh_heap_destroy(jh_heap *heap) {
    if (heap->live.bytes)
        return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "arena '%s': blocks in %zu bytes of pages are still allocated; free them before "
                       "destroying it", heap->space->rails.name, heap->live.bytes);
    jh_ranges_fini(&heap->free);
    jh_ranges_fini(&heap->live);
    pthread_mutex_destroy(&heap->lock);
    free(heap);
    return 0;
}

/* Where a piece of a region lies, so that pieces of different regions never adjoin: no region is as long as 2^41 bytes. */
static jemhooks_mapping piece(const jh_region *r, void *base, size_t length) {
    uint64_t at = (uint64_t)((uintptr_t)base - r->registration.hot->base);
    return (jemhooks_mapping){base, length, ((uint64_t)(uintptr_t)r << 41) + at, 0};
}

static jh_region *region_of(const jh_heap *heap, const void *p) {
    return jh_space_region_at(heap->space, p);
}

/* Pages that are not committed; carved where no freed ones will do. lock held. */
static bool find_pages(jh_heap *heap, size_t length, size_t alignment, bool zero, jemhooks_mapping *m) {
    bool commit = false;
    if (!jh_ranges_take(&heap->free, length, alignment, m)) return true;
    void *p = jh_space_carve(heap->space, length, alignment, &zero, &commit);
    if (p) *m = piece(region_of(heap, p), p, length);
    return p;
}

static void *allocate(jh_heap *heap, size_t length, size_t alignment, bool zero) {
    jemhooks_mapping m;
    if (!find_pages(heap, length, alignment, zero, &m)) return NULL;
    if (!jh_region_commit(region_of(heap, m.base), m.base, length)) {
        jh_ranges_put(&heap->free, &m);
        return NULL;
    }
    if (!jh_ranges_put(&heap->live, &m)) return m.base;
    jh_region_decommit(region_of(heap, m.base), m.base, length);
    jh_ranges_put(&heap->free, &m);
    return NULL;
}

void *jh_heap_alloc(jh_heap *heap, size_t size, size_t alignment, bool zero, jemhooks_region **region) {
    size_t length = (size + JH_PAGE - 1) & ~(JH_PAGE - 1);
    if (length < size) return NULL;
    pthread_mutex_lock(&heap->lock);
    void *p = allocate(heap, length, alignment < JH_PAGE ? JH_PAGE : alignment, zero);
    pthread_mutex_unlock(&heap->lock);
    if (p) *region = region_of(heap, p)->registration.hot;
    return p;
}

static size_t length_of(jh_heap *heap, const void *p) {
    pthread_mutex_lock(&heap->lock);
    size_t length = jh_ranges_length(&heap->live, p);
    pthread_mutex_unlock(&heap->lock);
    return length;
}

/* The pages of [at, end) of a block that has been taken out of `live` are free. lock held. */
static void leave(jh_heap *heap, const jemhooks_mapping *m, size_t at) {
    jh_region *r = region_of(heap, m->base);
    jemhooks_mapping rest = piece(r, (char *)m->base + at, m->length - at);
    jh_region_decommit(r, rest.base, rest.length);
    jh_ranges_put(&heap->free, &rest);
}

void jh_heap_free(jh_heap *heap, void *p) {
    jemhooks_mapping m;
    pthread_mutex_lock(&heap->lock);
    if (!jh_ranges_take_at(&heap->live, p, &m)) leave(heap, &m, 0);
    pthread_mutex_unlock(&heap->lock);
}

/* Can the block take the first `more` bytes of the free pages behind it? Then it has. lock held. */
static bool extend(jh_heap *heap, jemhooks_mapping *m, size_t more) {
    jemhooks_mapping next;
    char *end = (char *)m->base + m->length;
    if (jh_ranges_take_at(&heap->free, end, &next)) return false;
    bool can = next.length >= more && next.offset == m->offset + m->length && jh_region_commit(region_of(heap, end), end, more);
    if (!can) more = 0;
    m->length += more;
    next = (jemhooks_mapping){end + more, next.length - more, next.offset + more, 0};
    if (next.length) jh_ranges_put(&heap->free, &next);
    return can;
}

const char *jh_heap_refusal(void) {
    return NULL;
}

bool jh_heap_resize(jh_heap *heap, void *p, size_t size) {
    size_t length = (size + JH_PAGE - 1) & ~(JH_PAGE - 1);
    jemhooks_mapping m = {0};
    if (length < size) return false;
    pthread_mutex_lock(&heap->lock);
    bool done = !jh_ranges_take_at(&heap->live, p, &m);
    if (done && length > m.length) done = extend(heap, &m, length - m.length);
    else if (done && length < m.length) leave(heap, &m, length), m.length = length;
    if (m.length) jh_ranges_put(&heap->live, &m);
    pthread_mutex_unlock(&heap->lock);
    return done;
}

size_t jh_heap_usable(const void *p) {
    const jh_region *r = jh_region_at(p);
    return r ? length_of(r->space->heap, p) : 0;
}

void jh_heap_purge(jh_heap *heap, bool flush) {
    (void)heap, (void)flush; /* nothing is kept */
}

void jh_heap_age(jh_heap *heap) {
    (void)heap;
}

void jh_heap_stats(jh_heap *heap, jemhooks_stats *stats) {
    pthread_mutex_lock(&heap->lock);
    stats->active = stats->allocated = heap->live.bytes;
    pthread_mutex_unlock(&heap->lock);
}

const char *jemhooks_allocator_version(void) {
    return "direct";
}

const char *jemhooks_allocator_file(void) {
    return "";
}

const char *jemhooks_allocator_options(void) {
    return "";
}
