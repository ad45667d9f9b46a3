/* chunk_hooks.c - the chunk hooks of jemalloc 4.1 to 4.5: translate a hook call into the terms of space.c and region.c, and nothing
 * else. What is not as in extent_hooks.c:
 * - Memory comes in chunks, of 2 MiB mostly. A hook is told its arena's index alone. The size that purge is told may reach
 *   beyond it.
 * - A chunk of runs, which smaller blocks lie in, begins with jemalloc's records of them, 52 KiB. They are committed apart, from the
 *   chunk's first byte on, unless the chunk was that of a large block and still is committed. They do not make a region busy. (If it then
 *   is a large block's again, these pages still count as records; the rest of the block keeps the region busy.)
 * - A run joins a free neighbour only if both are committed or neither is, and only a chunk that is one free run again is given up. So the
 *   free runs of a chunk are decommitted only if there are no committed ones that nobody would ever decommit.
 * - An unused chunk that is taken up again is committed whole, and, from 4.3 on, each run in it once more as it is needed.
 * - A chunk may be passed to dalloc as not committed, although it was just committed whole.
 * - dalloc takes chunks back: then jemalloc retains none, and asks for each again. It has no steps of growth that this would spoil, and does
 *   not merge chunks of different arenas.
 * Concurrency: as for extent_hooks.c.                                                                               */
#include "jemalloc.h"
#include "../../fault.h"
#include "../../fork.h"
#include "../../pagemap.h"

_Thread_local bool jh_this_runs;
static _Atomic(jh_shard *) shards[JH_ARENAS];
static atomic_size_t records; /* bytes of them in each chunk, once known */

void jh_chunk_hooks_bind(unsigned arena, jh_shard *shard) {
    atomic_store(&shards[arena], shard);
}

/* NULL: nobody's, or that of an arena from before a fork. */
static jh_shard *shard_of(unsigned arena) {
    jh_shard *shard = arena < JH_ARENAS ? atomic_load_explicit(&shards[arena], memory_order_acquire) : NULL;
    return shard && !jh_frozen(shard->space->rails.epoch) ? shard : NULL;
}

static jh_region *region_of(const jh_shard *shard, const void *chunk) {
    return jh_space_region_at(shard->space, chunk);
}

static void *hook_alloc(void *new_addr, size_t size, size_t alignment, bool *zero, bool *commit, unsigned arena) {
    jh_shard *shard = shard_of(arena);
    if (!shard) return NULL;
    *zero |= !*commit; /* it takes uncommitted pages for zero, whatever is answered */
    void *p = new_addr ? jh_space_carve_at(shard->space, new_addr, size, zero, commit)
                       : jh_space_carve(shard->space, size, alignment, zero, commit);
    if (p) atomic_fetch_add(&shard->chunks, size);
    return p;
}

static bool hook_dalloc(void *chunk, size_t size, bool committed, unsigned arena) {
    jh_shard *shard = shard_of(arena);
    if (!shard) return true;
    if (committed || !JH_FAULT(dalloc_stays_committed)) jh_region_decommit(region_of(shard, chunk), chunk, size);
    jh_space_uncarve(shard->space, chunk, size);
    atomic_fetch_sub(&shard->chunks, size);
    return false;
}

static bool hook_commit(void *chunk, size_t size, size_t offset, size_t length, unsigned arena) {
    jh_shard *shard = shard_of(arena);
    if (!shard) return false;
    bool whole = length == size;
    if (!offset && !whole) atomic_store_explicit(&records, length, memory_order_relaxed);
    size_t first = atomic_load_explicit(&records, memory_order_relaxed);
    if (whole && jh_this_runs && first && !JH_FAULT(commit_whole)) length = first, whole = false;
    jh_region *r = region_of(shard, chunk);
    char *p = (char *)chunk + offset;
    return !(offset || whole ? jh_region_commit(r, p, length) : jh_region_commit_own(r, p, length));
}

/* Where the other runs of the chunk are committed, a free one could not join them otherwise. */
static bool hook_decommit(void *chunk, size_t size, size_t offset, size_t length, unsigned arena) {
    jh_shard *shard = shard_of(arena);
    if (!shard || JH_FAULT(decommit_refused)) return true;
    jh_region *r = region_of(shard, chunk);
    size_t first = atomic_load_explicit(&records, memory_order_relaxed);
    if (offset) { /* a run, so this is a chunk of runs */
        bool all = offset == first && offset + length == size;
        if (!all && !JH_FAULT(runs_mixed) && jh_region_is_committed(r, chunk, size)) return true;
        if (first && !JH_FAULT(records_busy)) jh_region_own(r, chunk, first);
    }
    jh_region_decommit(r, (char *)chunk + offset, length);
    return false;
}

/* Never. To agree would be to promise zeroes. */
static bool hook_purge(void *chunk, size_t size, size_t offset, size_t length, unsigned arena) {
    (void)chunk, (void)size, (void)offset, (void)length, (void)arena;
    return true;
}

static bool hook_split(void *chunk, size_t size, size_t size_a, size_t size_b, bool committed, unsigned arena) {
    (void)chunk, (void)size, (void)size_a, (void)size_b, (void)committed, (void)arena;
    return JH_FAULT(split_refused);
}

/* True: do not, where the chunks lie in different regions: a block must have one key. */
static bool hook_merge(void *chunk_a, size_t size_a, void *chunk_b, size_t size_b, bool committed, unsigned arena) {
    (void)size_a, (void)size_b, (void)committed;
    const jh_shard *shard = shard_of(arena);
    if (!shard) return true;
    return region_of(shard, chunk_a) != region_of(shard, chunk_b) && !JH_FAULT(merge_across);
}

const jh_chunk_hooks jh_chunk_hooks_4 = {
    hook_alloc, hook_dalloc, hook_commit, hook_decommit, hook_purge, hook_split, hook_merge,
};
