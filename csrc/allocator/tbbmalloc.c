/* tbbmalloc.c - a heap is a memory pool of oneTBB's scalable allocator, whose raw memory is carved from the space.
 * - The pool keeps its records, and the links of its free blocks, in that memory, so all of it is committed as the allocator's own:
 *   only the blocks that live in a region keep it busy. The host must be able to touch it, and a peer that writes outside of the
 *   blocks it was given breaks the heap.
 * - The pool gives raw memory back when it is short of it. To purge, it is asked for more than there is and refused.
 * - Its functions are C++; they are called by the names they have in the library, so that no C++ compiler is needed.
 * Concurrency: any thread, any time; a raw_ function runs under locks of the pool, and takes space.carve and pages.lock.      */
#include "closed.h"
#include "../error.h"
#include "../module_file.h"
#include "../policy.h"

#include <stdlib.h>
#include <string.h>

/* As in <oneapi/tbb/scalable_allocator.h>, namespace rml: MemPoolPolicy, and what it is version 1 of. */
typedef struct policy {
    void *(*alloc)(intptr_t pool_id, size_t *bytes);
    int (*free)(intptr_t pool_id, void *p, size_t bytes);
    size_t granularity;
    int version;
    unsigned fixed : 1, keeps_all : 1, reserved : 30;
} policy;

#define RML(name) __asm__("_ZN3rml" name)
int pool_create(intptr_t pool_id, const policy *policy, void **pool) RML("14pool_create_v1ElPKNS_13MemPoolPolicyEPPNS_10MemoryPoolE");
bool pool_destroy(void *pool) RML("12pool_destroyEPNS_10MemoryPoolE");
void *pool_malloc(void *pool, size_t size) RML("11pool_mallocEPNS_10MemoryPoolEm");
void *pool_aligned_malloc(void *pool, size_t size, size_t alignment) RML("19pool_aligned_mallocEPNS_10MemoryPoolEmm");
bool pool_free(void *pool, void *p) RML("9pool_freeEPNS_10MemoryPoolEPv");
size_t pool_msize(void *pool, void *p) RML("10pool_msizeEPNS_10MemoryPoolEPv");

enum { POOL_VERSION = 1, NATURAL = 8 }; /* blocks are aligned so if nothing is said */
#define PIECE (((size_t)1 << 20) + JH_PAGE) /* bytes; its raw memory comes in multiples of 1 MiB, some with a header more */
#define TOO_MUCH ((size_t)1 << 46)      /* bytes; more than its caches of large blocks would ever keep */

struct jh_heap {
    jh_closed closed;
    void *pool;
    uint64_t decay; /* ns; UINT64_MAX: never */
    _Atomic uint64_t aged;
};

static _Thread_local bool refuses; /* raw memory, while this thread purges */

static void *raw_alloc(intptr_t pool_id, size_t *bytes) {
    jh_heap *heap = (jh_heap *)pool_id;
    return refuses ? NULL : jh_closed_take(&heap->closed, *bytes, JH_PAGE);
}

static int raw_free(intptr_t pool_id, void *p, size_t bytes) {
    jh_heap *heap = (jh_heap *)pool_id;
    jh_closed_give_back(&heap->closed, p, bytes);
    return 0;
}

int jh_heap_prepare(jh_space *space) {
    return jh_closed_check(space, "tbbmalloc");
}

size_t jh_heap_piece(size_t *alignment) {
    *alignment = JH_PAGE;
    return PIECE;
}

int jh_heap_create(jh_space *space, const jemhooks_config *config, jh_heap **heap) {
    static const policy raw = {raw_alloc, raw_free, JH_PAGE, POOL_VERSION, 0, 0, 0};
    jh_heap *h = calloc(1, sizeof *h);
    if (!h) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "arena '%s': no memory for the heap itself", space->rails.name);
    h->closed.space = space;
    h->decay = config->dirty_decay_ms < 0 ? UINT64_MAX : (uint64_t)config->dirty_decay_ms * 1000000;
    h->aged = jh_now();
    int rc = pool_create((intptr_t)h, &raw, &h->pool);
    if (rc) {
        free(h);
        return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "arena '%s': tbbmalloc made no pool (its error %d); each takes one of the process's "
                       "1,024 keys of thread-specific data: destroy some arenas", space->rails.name, rc);
    }
    *heap = space->heap = h;
    return 0;
}

int jh_heap_destroy(jh_heap *heap) {
    int rc = jh_closed_idle(&heap->closed);
    if (rc) return rc;
    pool_destroy(heap->pool);
    free(heap);
    return 0;
}

void *jh_heap_alloc(jh_heap *heap, size_t size, size_t alignment, bool zero, jemhooks_region **region) {
    void *p = alignment > NATURAL ? pool_aligned_malloc(heap->pool, size, alignment) : pool_malloc(heap->pool, size);
    if (!p) return NULL;
    *region = jh_closed_enter(&heap->closed, p, pool_msize(heap->pool, p));
    return zero ? memset(p, 0, size) : p;
}

const char *jh_heap_refusal(void) {
    return NULL;
}

bool jh_heap_resize(jh_heap *heap, void *p, size_t size) {
    return jh_closed_fits(pool_msize(heap->pool, p), size);
}

void jh_heap_free(jh_heap *heap, void *p) {
    jh_region *r = jh_closed_region(&heap->closed, p);
    size_t bytes = pool_msize(heap->pool, p);
    pool_free(heap->pool, p);
    jh_closed_leave(&heap->closed, r, bytes);
}

size_t jh_heap_usable(const void *p) {
    const jh_region *r = jh_region_at(p);
    return r ? pool_msize(r->space->heap->pool, (void *)(uintptr_t)p) : 0;
}

void jh_heap_purge(jh_heap *heap, bool flush) {
    (void)flush; /* the calling thread's cache is emptied in any case */
    refuses = true;
    void *p = pool_malloc(heap->pool, TOO_MUCH);
    refuses = false;
    if (p) pool_free(heap->pool, p);
}

void jh_heap_age(jh_heap *heap) {
    uint64_t now = jh_now(), aged = atomic_load(&heap->aged);
    if (now - aged >= heap->decay && atomic_compare_exchange_strong(&heap->aged, &aged, now)) jh_heap_purge(heap, false);
}

void jh_heap_stats(jh_heap *heap, jemhooks_stats *stats) {
    jh_closed_stats(&heap->closed, stats);
}

const char *jemhooks_allocator_version(void) {
    return "tbbmalloc";
}

const char *jemhooks_allocator_file(void) {
    const char *file = jh_file_of((const void *)pool_create);
    return file ? file : "";
}

const char *jemhooks_allocator_options(void) {
    return "";
}
