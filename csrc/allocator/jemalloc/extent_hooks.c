/* extent_hooks.c - the extent hooks of jemalloc 5: translate a hook call into the terms of space.c and region.c, nothing else.
 * No hook calls a registrar, a subscriber, Python, malloc or mallctl, and none waits for a lock under which one of those
 * runs. In a forked child the hooks of earlier arenas touch nothing.
 * Concurrency: jemalloc calls hooks under its own locks, on any thread, several at once, its background threads
 * included.                                                                                                          */
#include "jemalloc.h"
#include "../../fault.h"
#include "../../fork.h"
#include "../../pagemap.h"

#include <sys/mman.h>

static jh_shard *shard_of(jh_extent_hooks *hooks) {
    return (jh_shard *)hooks;
}

static bool frozen(jh_extent_hooks *hooks) {
    return jh_frozen(shard_of(hooks)->space->rails.epoch);
}

static jh_region *region_of(jh_extent_hooks *hooks, const void *addr) {
    return jh_space_region_at(shard_of(hooks)->space, addr);
}

/* An arena's own metadata comes by its hooks too. A remote write must not reach it, so it gets pages that no region knows; and
 * they are unmapped with the arena, where jemalloc by itself would keep 2 MiB of address space for each one that ever was. */
static void *metadata(size_t size, size_t alignment) {
    char *room = mmap(NULL, size + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) return NULL;
    char *p = (char *)(((uintptr_t)room + alignment - 1) & ~(alignment - 1));
    if (p > room) munmap(room, (size_t)(p - room));
    munmap(p + size, (size_t)(room + alignment - p));
    return p;
}

static void *grow(jh_shard *shard, void *new_addr, size_t size, size_t alignment, bool *zero, bool *commit) {
    if (!jh_jemalloc.retain && alignment > JH_PAGE && !atomic_load(&shard->aligned)) return NULL; /* see alloc_aligned() */
    if (size > atomic_load_explicit(&shard->bound, memory_order_relaxed)) return NULL;
    return new_addr ? jh_space_carve_at(shard->space, new_addr, size, zero, commit)
                    : jh_space_carve(shard->space, size, alignment, zero, commit);
}

static void *hook_alloc(jh_extent_hooks *hooks, void *new_addr, size_t size, size_t alignment, bool *zero, bool *commit,
                        unsigned arena) {
    (void)arena;
    if (frozen(hooks)) return NULL;
    /* Both set means metadata: before 5.3 heap.c has no extents zeroed, and since then none on 2 MiB, where metadata is. */
    bool apart = *zero && *commit && (!jh_jemalloc.zeroes || alignment >= JH_SLOT);
    if (apart && !jh_jemalloc.metadata_apart && !JH_FAULT(metadata_inside)) return metadata(size, alignment);
    jh_growth_begins();
    void *p = grow(shard_of(hooks), new_addr, size, alignment, zero, commit);
    if (!p) jh_growth_refused();
    return p;
}

/* True: keep it. Accepting would drain jemalloc's list of retained extents, let its growth run away, and from 5.3 on
 * merge extents of different arenas. Regions are unmapped whole, after their arena. */
static bool hook_dalloc(jh_extent_hooks *hooks, void *addr, size_t size, bool committed, unsigned arena) {
    (void)committed, (void)arena;
    if (frozen(hooks)) return true;
    if (jh_jemalloc.metadata_apart || jh_region_at(addr)) return !JH_FAULT(dalloc_accepts);
    munmap(addr, size); /* metadata; if that fails it leaks, since jemalloc would go on to decommit it */
    return false;
}

/* arena.<i>.destroy tells of each extent; the regions themselves go when it has returned. Without this hook jemalloc would
 * unmap. */
static void hook_destroy(jh_extent_hooks *hooks, void *addr, size_t size, bool committed, unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)committed, (void)arena;
}

static bool hook_commit(jh_extent_hooks *hooks, void *addr, size_t size, size_t offset, size_t length, unsigned arena) {
    (void)size, (void)arena;
    if (JH_FAULT(commit_fails)) return true;
    return !frozen(hooks) && !jh_region_commit(region_of(hooks, addr), (char *)addr + offset, length);
}

static bool hook_decommit(jh_extent_hooks *hooks, void *addr, size_t size, size_t offset, size_t length, unsigned arena) {
    (void)size, (void)arena;
    if (frozen(hooks) || JH_FAULT(decommit_refused)) return true;
    jh_region_decommit(region_of(hooks, addr), (char *)addr + offset, length);
    return false;
}

/* Never: a device may have the pages, and jemalloc's account of them would no longer be exact. */
static bool hook_purge(jh_extent_hooks *hooks, void *addr, size_t size, size_t offset, size_t length, unsigned arena) {
    (void)hooks, (void)size, (void)arena;
    if (JH_FAULT(purge_allowed)) return madvise((char *)addr + offset, length, MADV_DONTNEED) != 0;
    return true;
}

static bool hook_split(jh_extent_hooks *hooks, void *addr, size_t size, size_t size_a, size_t size_b, bool committed,
                       unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)size_a, (void)size_b, (void)committed, (void)arena;
    return JH_FAULT(split_refused);
}

/* True: do not, where the extents lie in different regions: an allocation must have one key. */
static bool hook_merge(jh_extent_hooks *hooks, void *addr_a, size_t size_a, void *addr_b, size_t size_b, bool committed,
                       unsigned arena) {
    (void)size_a, (void)size_b, (void)committed, (void)arena;
    if (frozen(hooks)) return true;
    return region_of(hooks, addr_a) != region_of(hooks, addr_b) && !JH_FAULT(merge_across);
}

const jh_extent_hooks jh_extent_hooks_5 = {
    hook_alloc,    hook_dalloc, hook_destroy, hook_commit, hook_decommit,
    hook_purge,    hook_purge,  hook_split,   hook_merge,
};
