/* ucx_cache.c - a registration cache of UCX over memory of an arena, in an application that reports itself what goes: told by
 * jemhooks' adapter it keeps nothing stale; untold it does.
 *     test_ucx_cache told=1 rounds=300          with UCX_MEM_MMAP_HOOK_MODE=none
 * Concurrency: another thread allocates, frees and trims in the same arena.                                          */
#include "check.h"

#include <limits.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucm/api/ucm.h>
#include <ucp/api/ucp_version.h>
#include <ucs/memory/rcache.h>

static atomic_size_t registered, deregistered;

static ucs_status_t reg(void *context, ucs_rcache_t *cache, void *arg, ucs_rcache_region_t *region, uint16_t flags) {
    (void)context, (void)cache, (void)arg, (void)region, (void)flags;
    atomic_fetch_add(&registered, 1);
    return UCS_OK;
}

static void dereg(void *context, ucs_rcache_t *cache, ucs_rcache_region_t *region) {
    (void)context, (void)cache, (void)region;
    atomic_fetch_add(&deregistered, 1);
}

static void dump(void *context, ucs_rcache_t *cache, ucs_rcache_region_t *region, char *text, size_t size) {
    (void)context, (void)cache, (void)region;
    snprintf(text, size, "test");
}

#if UCP_API_VERSION >= UCP_VERSION(1, 18)
static void merge(void *context, ucs_rcache_t *cache, void *arg, ucs_rcache_region_t *region) {
    (void)context, (void)cache, (void)arg, (void)region;
}
#endif

static ucs_rcache_t *cache_new(void) {
    static ucs_rcache_ops_t ops = {.mem_reg = reg, .mem_dereg = dereg, .dump_region = dump};
    ucs_rcache_params_t params = {.region_struct_size = sizeof(ucs_rcache_region_t), .ucm_events = UCM_EVENT_VM_UNMAPPED,
                                  .ucm_event_priority = 1000, .ops = &ops, .max_regions = ULONG_MAX, .max_size = SIZE_MAX,
                                  .max_unreleased = SIZE_MAX};
    ucs_rcache_t *cache = NULL;
#if UCP_API_VERSION >= UCP_VERSION(1, 18)
    ops.merge = merge;
#endif
#if UCP_API_VERSION < UCP_VERSION(1, 17)
    params.alignment = UCS_RCACHE_MIN_ALIGNMENT;
    params.max_alignment = PAGE;
#endif
    ucs_status_t status = ucs_rcache_create(&params, "test", NULL, &cache);
    if (status) violated("setup", "ucs_rcache_create: %s", ucs_status_string(status)), exit(1);
    return cache;
}

/* Looks the range up, as a transfer does; did the cache have it? */
static bool hit(ucs_rcache_t *cache, void *p, size_t length) {
    ucs_rcache_region_t *region;
    size_t before = atomic_load(&registered);
#if UCP_API_VERSION < UCP_VERSION(1, 17)
    ucs_status_t status = ucs_rcache_get(cache, p, length, PROT_READ | PROT_WRITE, NULL, &region);
#else
    ucs_status_t status = ucs_rcache_get(cache, p, length, UCS_RCACHE_MIN_ALIGNMENT, PROT_READ | PROT_WRITE, NULL, &region);
#endif
    if (status) violated("setup", "ucs_rcache_get: %s", ucs_status_string(status)), exit(1);
    bool had = atomic_load(&registered) == before;
    ucs_rcache_region_put(cache, region);
    return had;
}

static jemhooks_arena *arena;
static atomic_bool stop;

static void *churn(void *arg) {
    (void)arg;
    while (!atomic_load(&stop)) {
        void *p = must_have(jemhooks_alloc(arena, 300 * KIB), "block");
        memset(p, 1, 300 * KIB);
        MUST(jemhooks_free(p));
        MUST(jemhooks_trim(arena, NULL));
    }
    return NULL;
}

static void cached(void) {
    size_t stale = 0, went = 0, had = 0;
    ucm_set_external_event(UCM_EVENT_VM_UNMAPPED); /* as an application does that calls ucm_vm_munmap() itself */
    ucs_rcache_t *cache = cache_new();
    if (option("told", 1))
        for (int i = 0; i < 2; i++) MUST(jemhooks_notify_cache("ucx"));
    jemhooks_anonymous_config memory = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    jemhooks_provider *provider;
    memory.transparent_huge = 0;
    MUST(jemhooks_provider_anonymous(&memory, &provider));
    arena = arena_on(provider, NULL, 0);
    dice random = {(uint64_t)option("seed", 1)};
    pthread_t thread = start_thread(churn, NULL);
    long rounds = option("rounds", 300), round = 0;
    for (; round < rounds || (!went && round < 50 * rounds); round++) { /* the other thread may always be there first */
        size_t size = (1 + roll_below(&random, 64)) * PAGE;
        unsigned char *p = must_have(jemhooks_aligned_alloc(arena, PAGE, size), "block");
        memset(p, 0x5A, size);
        hit(cache, p, size);
        had += hit(cache, p, size); /* rarely not: UCX puts off what it is told while it is looking something up */
        MUST(jemhooks_free(p));
        if (round % 2) MUST(jemhooks_trim(arena, NULL));
        unsigned char *q = must_have(jemhooks_aligned_alloc(arena, PAGE, size), "block");
        if (q == p && *q != 0x5A) { /* other pages at the same address */
            went++;
            stale += hit(cache, q, size);
        }
        MUST(jemhooks_free(q));
    }
    atomic_store(&stop, true);
    join_thread(thread);
    CHECK("setup", had > (size_t)round / 2, "UCX had %zu of %ld blocks in its cache", had, round);
    CHECK("setup", went, "the pages of no block went, so nothing was tested");
    CHECK("stale", !stale, "%zu of %zu times UCX had a registration of pages that had gone", stale, went);
    figure("went", (double)went);
    arena_end(arena);
    jemhooks_provider_close(provider);
    ucs_rcache_destroy(cache);
    CHECK("ends", atomic_load(&registered) == atomic_load(&deregistered), "%zu registrations, %zu ended", atomic_load(&registered),
          atomic_load(&deregistered));
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"cached", cached}, {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
