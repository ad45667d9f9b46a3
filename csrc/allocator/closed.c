/* closed.c - memory and blocks of allocators that keep to themselves what they do with it: see closed.h.
 * Concurrency: any thread, any time, also under the allocator's own locks; takes space.carve and pages.lock.           */
#include "closed.h"
#include "../error.h"
#include "../pagemap.h"

jh_region *jh_closed_region(const jh_closed *closed, const void *block) {
    return jh_space_region_at(closed->space, block);
}

int jh_closed_check(const jh_space *space, const char *allocator) {
    if (space->provider->host_accessible) return 0;
    return jh_fail(JEMHOOKS_ERROR_CONFIG, ENOTSUP, "arena '%s': %s keeps records in the memory that it hands out, and the host cannot "
                   "touch this; configure jemhooks with -DJEMHOOKS_ALLOCATOR=jemalloc (5) or direct", space->rails.name, allocator);
}

void *jh_closed_take(jh_closed *closed, size_t length, size_t alignment) {
    bool zero = false, commit = false;
    void *p = jh_space_carve(closed->space, length, alignment, &zero, &commit);
    if (!p || jh_region_commit_own(jh_closed_region(closed, p), p, length)) return p;
    jh_space_uncarve(closed->space, p, length);
    return NULL;
}

void jh_closed_give_back(jh_closed *closed, void *memory, size_t length) {
    jh_region_decommit(jh_closed_region(closed, memory), memory, length);
    jh_space_uncarve(closed->space, memory, length);
}

jemhooks_region *jh_closed_enter(jh_closed *closed, void *block, size_t bytes) {
    jh_region *r = jh_closed_region(closed, block);
    jh_region_enter(r, bytes);
    atomic_fetch_add(&closed->live, bytes);
    return r->registration.hot;
}

void jh_closed_leave(jh_closed *closed, jh_region *region, size_t bytes) {
    atomic_fetch_sub(&closed->live, bytes);
    jh_region_leave(region, bytes);
}

int jh_closed_idle(const jh_closed *closed) {
    size_t live = atomic_load(&closed->live);
    if (!live) return 0;
    return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "arena '%s': blocks in %zu bytes of pages are still allocated; free them before "
                   "destroying it", closed->space->rails.name, live);
}

bool jh_closed_fits(size_t usable, size_t size) {
    return size <= usable && size > usable / 2;
}

void jh_closed_stats(jh_closed *closed, jemhooks_stats *stats) {
    stats->active = stats->allocated = atomic_load(&closed->live);
}
