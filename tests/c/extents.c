/* extents.c - the extent hook "alloc", asked as each jemalloc 5 asks it, on a machine that has one of them: metadata must lie in no region
 * and go when it is given back, and extents must lie in one.
 *   metadata    base.c base_map(): zeroed and committed; on a page in 5.0, on 2 MiB since 5.1
 *   extents     extent.c extent_alloc_wrapper(), extent_grow_retained(): uncommitted; on the block's alignment. Zeroed if the block
 *               must be, which heap.c asks for since 5.3 only, and not on 2 MiB
 *     test_extents [case=…]
 * Concurrency: one thread.                                                                                          */
#include "check.h"

#include "allocator/jemalloc/jemalloc.h"

static const struct asked {
    const char *by;
    size_t metadata, extent; /* alignment */
    bool zeroes;
} versions[] = {{"5.0", PAGE, SLOT, false}, {"5.1 and 5.2", SLOT, 4 * SLOT, false}, {"5.3", SLOT, SLOT / 2, true}};

static void metadata_apart(void) {
    for (const struct asked *v = versions; v < versions + sizeof versions / sizeof versions[0]; v++) {
        jemhooks_arena *arena = arena_on(NULL, NULL, 0);
        size_t before = stats_of(arena).regions;
        jh_jemalloc.zeroes = v->zeroes;
        jh_jemalloc.retain = true;
        jh_shard shard = {.hooks = jh_extent_hooks_5, .space = (jh_space *)arena, .bound = SIZE_MAX};
        bool zero = true, commit = true;
        char *p = must_have(shard.hooks.alloc(&shard.hooks, NULL, SLOT, v->metadata, &zero, &commit, 0), "metadata");
        CHECK("metadata", !jemhooks_region_of(p) && !jemhooks_region_of(p + SLOT - 1) && stats_of(arena).regions == before,
              "%s: metadata lies in a region", v->by);
        CHECK("metadata", !((uintptr_t)p % v->metadata) && zero && commit && all_zero(p, SLOT),
              "%s: metadata is not as asked for", v->by);
        CHECK("metadata", !shard.hooks.dalloc(&shard.hooks, p, SLOT, true, 0) && !is_mapped(p), "%s: metadata stays mapped",
              v->by);
        for (int zeroed = 0; zeroed <= v->zeroes; zeroed++) {
            zero = zeroed, commit = false;
            p = must_have(shard.hooks.alloc(&shard.hooks, NULL, SLOT, v->extent, &zero, &commit, 0), "extent");
            const jemhooks_region *r = jemhooks_region_of(p);
            CHECK("span", r && r == jemhooks_region_of(p + SLOT - 1), "%s: an extent lies in no region", v->by);
            CHECK("alignment", !((uintptr_t)p % v->extent), "%s: an extent is at %p", v->by, (void *)p);
            CHECK("idle", shard.hooks.dalloc(&shard.hooks, p, SLOT, commit, 0), "%s: an extent is taken back", v->by);
        }
        arena_end(arena);
    }
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"metadata", metadata_apart}, {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
