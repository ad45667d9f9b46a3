/* provider.c - providers of the user's own: what the library asks of them, in which order, and what it makes of their failures.
 *     test_provider [case=…] arenas=500 ops=20000 seed=1
 * Concurrency: the case `threads` runs arenas of one provider on several threads; `mine.lock` guards the account.    */
#include "account.h"

#include <stdio.h>
#include <sys/mman.h>

#define WINDOW (1024 * MIB)

/* ---- providers that do as they are told -------------------------------------------------------------------------- */

static void complete(void) {
    static const size_t pages[] = {0, PAGE, 64 * KIB, SLOT};
    for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
        account_reset();
        jemhooks_provider_ops ops = account_ops();
        ops.page = pages[i];
        mine.page = pages[i] ? pages[i] : PAGE;
        mine.reads_zero = i % 2;
        mine.fail_give_back = i == 3 ? EINVAL : 0; /* a failing give_back must not be trusted */
        jemhooks_provider *provider = account_provider(&ops);
        jemhooks_provider_info info = {.size = sizeof info};
        MUST(jemhooks_provider_get_info(provider, &info));
        CHECK("info",
              !strcmp(info.name, "mine") && info.page == mine.page && !info.total && info.host_accessible && info.pinnable &&
                  info.gives_back && info.unmaps && info.divides && !info.shares,
              "it says page %zu, total %zu, unmaps %d, divides %d", (size_t)info.page, (size_t)info.total, info.unmaps, info.divides);
        for (int round = 0; round < 2; round++) {
            jemhooks_arena *one = arena_on(provider, NULL, 0), *two = arena_on(provider, NULL, 0);
            account_work(one, option("ops", 20000) / 8, 1);
            account_work(two, option("ops", 20000) / 8, 2);
            arena_end(one);
            arena_end(two);
            CHECK("leak", !mine.count, "%zu mappings outlive their arenas", mine.count);
        }
        CHECK("given_back", mine.gives, "give_back was never called");
        account_close(provider, false);
    }
}

/* The caller's reference goes first: the provider lives as long as its arena. */
static void order(void) {
    account_reset();
    jemhooks_provider_ops ops = account_ops();
    jemhooks_provider *provider = account_provider(&ops);
    jemhooks_arena *arena = arena_on(provider, NULL, 0);
    jemhooks_provider_close(provider);
    CHECK("closed", !mine.closed, "closed under its arena");
    account_work(arena, 500, 1);
    arena_end(arena);
    CHECK("closed", mine.closed == 1 && mine.left == 1 && !mine.count, "closed %zu times, left %zu times, %zu mappings", mine.closed,
          mine.left, mine.count);
}

/* Never unmapping: memory is kept for the next arena, old bytes and all; or (gives) given back page by page, where each call must
 * be about one mapping, though others lie beside it. */
static void kept_by(bool gives) {
    account_reset();
    jemhooks_provider_ops ops = {.size = sizeof ops, .name = "kept", .map = account_map, .give_back = gives ? account_give_back : NULL};
    jemhooks_provider *provider = account_provider(&ops);
    jemhooks_provider_info info = {.size = sizeof info};
    size_t first = 0;
    for (long i = 0; i < option("arenas", 500); i++) {
        jemhooks_arena *arena = arena_on(provider, NULL, 0);
        account_work(arena, 60, 1 + (uint64_t)i % 7);
        arena_end(arena);
        if (i == 20) first = mine.bytes;
    }
    MUST(jemhooks_provider_get_info(provider, &info));
    CHECK("info", info.gives_back == gives && !info.unmaps && info.divides && info.free == mine.bytes, "of %zu bytes %zu are free", mine.bytes,
          (size_t)info.free);
    CHECK("reused", mine.bytes <= 2 * first, "%zu bytes were mapped for the first arenas, and %zu for all", first, mine.bytes);
    CHECK("reused", mine.maps, "nothing was mapped");
    CHECK("gives", !gives || mine.gives, "nothing was given back");
    figure("kept_bytes", (double)mine.bytes);
    jemhooks_provider_close(provider);
    for (size_t i = 0; i < mine.count; i++) munmap(mine.live[i].base, (mine.live[i].length + SLOT - 1) & ~(SLOT - 1));
}

static void kept(void) {
    kept_by(false);
    kept_by(true);
}

/* Mappings side by side that are not so in their file are not joined: each call is about one of them. */
/* Mappings that begin where the last one ends, but not so in their file. */
static int map_beside(void *self, void *tenant, size_t alignment, jemhooks_mapping *m) {
    (void)self;
    LOCKED {
        account_tenant("map", tenant);
        size_t length = (m->length + SLOT - 1) & ~(SLOT - 1);
        CHECK("setup", alignment <= SLOT && mine.bytes + length <= WINDOW, "%zu bytes on %zu after %zu", length, alignment, mine.bytes);
        *m = (jemhooks_mapping){mine.window + mine.bytes, length, ++mine.maps << 40, true};
        mine.live[mine.count++] = *m;
        mine.bytes += m->length;
    }
    return 0;
}

static void beside(void) {
    account_reset();
    mine.window = map_aligned(WINDOW, PROT_READ | PROT_WRITE);
    jemhooks_provider_ops ops = {.size = sizeof ops, .name = "beside", .map = map_beside, .give_back = account_give_back};
    jemhooks_provider *provider = account_provider(&ops);
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.provider = provider;
    config.policy = JEMHOOKS_NONE;
    config.region_min = config.region_max = SLOT;
    config.dirty_decay_ms = config.muzzy_decay_ms = 0;
    size_t neighbours = 0;
    for (int i = 0; i < 20; i++) {
        jemhooks_arena *arena = arena_of(&config);
        void *p[20];
        for (int k = 0; k < 20; k++) p[k] = must_have(jemhooks_alloc(arena, k % 5 < i % 5 ? 3 * MIB : MIB + MIB / 2), "block");
        for (int k = 0; k < 20; k++) MUST(jemhooks_free(p[k]));
        arena_end(arena);
    }
    for (size_t i = 1; i < mine.count; i++) neighbours += (char *)mine.live[i - 1].base + mine.live[i - 1].length == (char *)mine.live[i].base;
    CHECK("setup", neighbours && mine.gives, "%zu neighbours, %zu pages given back", neighbours, mine.gives);
    jemhooks_provider_close(provider);
    munmap(mine.window, WINDOW);
}

/* What was mapped is used again as it was, neither split nor joined. */
static void solid(void) {
    account_reset();
    jemhooks_provider_ops ops = {.size = sizeof ops, .name = "solid", .map = account_map, .flags = JEMHOOKS_NOT_DIVISIBLE};
    jemhooks_provider *provider = account_provider(&ops);
    jemhooks_provider_info info = {.size = sizeof info};
    size_t first = 0;
    for (long i = 0; i < option("arenas", 500) / 2; i++) {
        size_t count;
        jemhooks_arena *one = arena_on(provider, NULL, 0), *two = arena_on(provider, NULL, 0);
        account_work(one, 60, 1 + (uint64_t)i % 7);
        account_work(two, 60, 2 + (uint64_t)i % 5);
        jemhooks_region_info *r = regions_of(one, &count);
        for (size_t k = 0; k < count; k++) {
            bool same = false;
            for (size_t l = 0; l < mine.count; l++)
                same |= (uintptr_t)mine.live[l].base == r[k].base && mine.live[l].length == r[k].length;
            CHECK("solid", same, "a region of %zu bytes at %#zx is no mapping", (size_t)r[k].length, (size_t)r[k].base);
        }
        free(r);
        arena_end(one);
        arena_end(two);
        if (i == 20) first = mine.bytes;
    }
    MUST(jemhooks_provider_get_info(provider, &info));
    CHECK("info", !info.divides && info.free == mine.bytes, "of %zu bytes %zu are free; divides %d", mine.bytes, (size_t)info.free,
          info.divides);
    CHECK("reused", mine.bytes <= 4 * first, "%zu bytes were mapped for the first arenas, and %zu for all", first, mine.bytes);
    jemhooks_provider_close(provider);
    for (size_t i = 0; i < mine.count; i++) munmap(mine.live[i].base, (mine.live[i].length + SLOT - 1) & ~(SLOT - 1));
}

static void *churn(void *shared) {
    for (int i = 0; i < 20; i++) {
        jemhooks_arena *arena = arena_on(*(jemhooks_provider **)shared, NULL, 0);
        account_work(arena, option("ops", 20000) / 100, 1 + (uint64_t)i);
        arena_end(arena);
    }
    return NULL;
}

/* Arenas come and go on several threads, over one provider that unmaps and one that keeps. */
static void threads(void) {
    for (int keeps = 0; keeps < 2; keeps++) {
        pthread_t thread[4];
        account_reset();
        jemhooks_provider_ops ops = account_ops();
        if (keeps) {
            ops = (jemhooks_provider_ops){.size = sizeof ops, .name = "kept", .map = account_map, .close = account_end};
            mine.has_tenants = false;
        }
        jemhooks_provider *provider = account_provider(&ops);
        for (int i = 0; i < 4; i++) thread[i] = start_thread(churn, &provider);
        for (int i = 0; i < 4; i++) join_thread(thread[i]);
        jemhooks_provider_info info = {.size = sizeof info};
        MUST(jemhooks_provider_get_info(provider, &info));
        if (keeps) CHECK("reused", info.free == mine.bytes, "of %zu bytes %zu are free", mine.bytes, (size_t)info.free);
        account_close(provider, keeps);
        for (size_t i = 0; i < mine.count; i++) munmap(mine.live[i].base, (mine.live[i].length + SLOT - 1) & ~(SLOT - 1));
    }
}

/* ---- providers that fail ----------------------------------------------------------------------------------------- */

static void enter_fails(void) {
    account_reset();
    jemhooks_provider_ops ops = account_ops();
    jemhooks_provider *provider = account_provider(&ops);
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    jemhooks_arena *arena = NULL;
    config.provider = provider;
    config.policy = JEMHOOKS_NONE;
    config.name = "joseph";
    long files = count_files(), mappings = 0;
    for (int i = 0; i < 200; i++) {
        mine.fail_enter = i % 2 ? EACCES : EDQUOT;
        int rc = jemhooks_arena_create(&config, &arena);
        CHECK("refused", rc == -mine.fail_enter && !arena && jemhooks_last_error_kind() == JEMHOOKS_ERROR_PROVIDER,
              "a refused arena gave %d: %s", rc, jemhooks_last_error());
        CHECK("message", strstr(jemhooks_last_error(), "no room for joseph in the inn") && strstr(jemhooks_last_error(), "mine"),
              "the provider's words are lost: %s", jemhooks_last_error());
        if (i == 10) mappings = count_mappings();
    }
    CHECK("leak", count_files() == files && count_mappings() <= mappings + 2, "refused arenas left %ld files and %ld mappings",
          count_files() - files, count_mappings() - mappings);
    CHECK("tenant", !mine.left && !mine.maps, "who did not come in left, or mapped");
    mine.fail_enter = 0;
    arena = arena_of(&config);
    account_work(arena, 500, 1);
    arena_end(arena);
    account_close(provider, false);
}

/* The Nth mapping fails: the allocation may, with an error that says so, and the arena goes on. */
static void map_fails(void) {
    size_t failed = 0;
    for (long nth = 1; nth < 12; nth++) {
        account_reset();
        jemhooks_provider_ops ops = account_ops();
        jemhooks_provider *provider = account_provider(&ops);
        jemhooks_arena *arena = arena_on(provider, NULL, 0);
        char *p[10];
        mine.fail_map = nth;
        for (size_t i = 0; i < 10; i++) {
            long fuse = mine.fail_map;
            p[i] = jemhooks_alloc(arena, (i + 1) * MIB);
            CHECK("refused", p[i] || (fuse && errno == ENOMEM && jemhooks_last_error_kind() == JEMHOOKS_ERROR_MEMORY),
                  "block %zu was refused with errno %d: %s", i, errno, jemhooks_last_error());
            failed += fuse && !mine.fail_map;
            if (p[i]) fill(p[i], (i + 1) * MIB, i);
        }
        for (size_t i = 0; i < 10; i++) {
            if (p[i]) CHECK("content", filled(p[i], (i + 1) * MIB, (i + 1) * MIB, i), "block %zu changed", i);
            MUST(jemhooks_free(p[i]));
        }
        mine.fail_map = 0;
        account_work(arena, 500, 1);
        arena_end(arena);
        account_close(provider, false);
    }
    CHECK("setup", failed > 5, "only %zu mappings failed", failed);
}

/* Memory that is another region's already is refused, and unmapped again. (But for what lies in one live block: arenas nest.) */
static void overlapping(void) {
    account_reset();
    jemhooks_provider_ops ops = account_ops();
    jemhooks_provider *provider = account_provider(&ops);
    jemhooks_arena *arena = arena_on(provider, NULL, 0), *other = arena_on(provider, NULL, 0);
    char *p = must_have(jemhooks_alloc(arena, 64 * KIB), "block");
    fill(p, 64 * KIB, 1);
    mine.overlaps = true;
    char *q = jemhooks_alloc(other, MIB);
    CHECK("overlap", !q, "a block of another arena at %p, where %p is a region", (void *)q, (void *)p);
    CHECK("content", filled(p, 64 * KIB, 64 * KIB, 1), "a block was overwritten");
    jemhooks_region *r = jemhooks_region_of(p);
    CHECK("overlap", r && r->arena == arena, "the block's region is %p, of arena %p, not %p", (void *)r, r ? (void *)r->arena : NULL,
          (void *)arena);
    MUST(jemhooks_free(p));
    mine.overlaps = false;
    arena_end(other);
    arena_end(arena);
    account_close(provider, false);
}

enum { TRUTH, SHORT, EMPTY, ODD, CROOKED, NOWHERE, BEYOND, WRAPPED, POSITIVE, LIES };
static int lie;
static jemhooks_mapping truth;

static int lying_map(void *self, void *tenant, size_t alignment, jemhooks_mapping *m) {
    (void)self, (void)tenant;
    CHECK("alignment", alignment <= SLOT, "map on %zu", alignment);
    truth = *m = (jemhooks_mapping){map_aligned(m->length, PROT_READ | PROT_WRITE), m->length, 0, 1};
    mine.maps++;
    if (lie == SHORT) m->length -= PAGE;
    if (lie == EMPTY) m->length = 0;
    if (lie == ODD) m->length += 1;
    if (lie == CROOKED) m->base = (char *)m->base + PAGE / 2;
    if (lie == NOWHERE) m->base = NULL;
    if (lie == BEYOND) m->base = (void *)((uintptr_t)1 << 50);
    if (lie == WRAPPED) m->length = SIZE_MAX & ~(SLOT - 1);
    if (lie != POSITIVE) return 0;
    munmap(truth.base, truth.length);
    return 5;
}

static void lying_unmap(void *self, void *tenant, const jemhooks_mapping *m) {
    (void)self, (void)tenant, (void)m;
    munmap(truth.base, truth.length);
    mine.unmaps++;
}

/* What is not as it was asked for is not used. */
static void map_lies(void) {
    account_reset();
    const jemhooks_provider_ops ops = {.size = sizeof ops, .name = "liar", .map = lying_map, .unmap = lying_unmap};
    jemhooks_provider *provider = account_provider(&ops);
    for (lie = SHORT; lie < LIES; lie++) {
        int said = lie;
        jemhooks_arena *arena = arena_on(provider, NULL, 0);
        mine.maps = mine.unmaps = 0;
        char *p = jemhooks_alloc(arena, 100 * KIB);
        CHECK("lie", !p && errno == ENOMEM && jemhooks_last_error_kind() == JEMHOOKS_ERROR_MEMORY && strstr(jemhooks_last_error(), "liar"),
              "lie %d: a block at %p, errno %d: %s", lie, (void *)p, errno, jemhooks_last_error());
        CHECK("lie", mine.maps && mine.unmaps == (lie == POSITIVE ? 0 : mine.maps), "lie %d: %zu mappings, of which %zu were unmapped",
              lie, mine.maps, mine.unmaps);
        CHECK("lie", !stats_of(arena).mapped && !stats_of(arena).abandoned, "lie %d: %zu bytes are mapped", lie,
              (size_t)stats_of(arena).mapped);
        lie = TRUTH;
        p = must_have(jemhooks_alloc(arena, 100 * KIB), "block when the provider speaks the truth");
        fill(p, 100 * KIB, 1);
        MUST(jemhooks_free(p));
        arena_end(arena);
        lie = said;
    }
    lie = TRUTH;
    jemhooks_provider_close(provider);
}

/* A forked child drops its references; the parent's things stay open. */
static jemhooks_provider *inherited;
static void drop_in_child(void) {
    jemhooks_provider_close(inherited);
    CHECK("closed", !mine.closed, "the child closed what is its parent's");
}

static void forked(void) {
    account_reset();
    jemhooks_provider_ops ops = account_ops();
    inherited = account_provider(&ops);
    in_child("dropping a provider", drop_in_child);
    jemhooks_arena *arena = arena_on(inherited, NULL, 0);
    in_child("dropping a provider with an arena", drop_in_child);
    account_work(arena, 500, 1);
    arena_end(arena);
    account_close(inherited, false);
}

static int no_register(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    (void)self, (void)address, (void)length, (void)access, (void)mr;
    return 0;
}

static int no_deregister(void *self, jemhooks_mr *mr) {
    (void)self, (void)mr;
    return 0;
}

/* What the flags forbid. */
static void flags(void) {
    account_reset();
    jemhooks_provider_ops ops = account_ops();
    ops.flags = JEMHOOKS_NOT_HOST_ACCESSIBLE | JEMHOOKS_NOT_PINNABLE;
    jemhooks_provider *provider = account_provider(&ops);
    jemhooks_provider_info info = {.size = sizeof info};
    MUST(jemhooks_provider_get_info(provider, &info));
    CHECK("info", !info.host_accessible && !info.pinnable, "host_accessible %d, pinnable %d", info.host_accessible, info.pinnable);
    jemhooks_arena *arena = arena_on(provider, NULL, 0), *pinned = NULL;
    CHECK("flags", !jemhooks_calloc(arena, 1, 64) && errno == EOPNOTSUPP, "calloc in device memory: errno %d", errno);
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, 64), "block")));
    arena_end(arena);
    for (int pins = 1; pins <= 2; pins++) {
        const jemhooks_registrar_ops pinning = {.size = sizeof pinning, .name = "pinning", .register_memory = no_register,
                                                .deregister_memory = no_deregister, .pins = pins};
        jemhooks_registrar *registrar;
        MUST(jemhooks_registrar_create(&pinning, NULL, &registrar));
        jemhooks_config config = JEMHOOKS_CONFIG_INIT;
        config.provider = provider;
        config.registrars = &registrar;
        config.registrar_count = 1;
        int rc = jemhooks_arena_create(&config, &pinned);
        CHECK("flags", rc == -EOPNOTSUPP && strstr(jemhooks_last_error(), "pinning") && strstr(jemhooks_last_error(), "mine"),
              "an arena that pins memory that cannot be pinned: %d: %s", rc, jemhooks_last_error());
        config.access |= JEMHOOKS_ON_DEMAND;
        rc = jemhooks_arena_create(&config, &pinned);
        CHECK("flags", pins == 1 ? rc == -EOPNOTSUPP : !rc, "with on-demand access: %d: %s", rc, jemhooks_last_error());
        if (!rc) arena_end(pinned);
        jemhooks_registrar_close(registrar);
    }
    account_close(provider, false);
}

static void refuses(const char *what, const jemhooks_provider_ops *ops, jemhooks_provider **provider, int rc) {
    int got = jemhooks_provider_create(ops, &mine, provider);
    CHECK("bad_ops", got == rc && jemhooks_last_error_kind() == JEMHOOKS_ERROR_CONFIG && *jemhooks_last_error(), "%s gave %d: %s", what,
          got, jemhooks_last_error());
    CHECK("bad_ops", !provider || !*provider, "%s left a provider", what);
    CHECK("closed", !mine.closed, "%s: what was not made was closed", what);
}

static void bad_ops(void) {
    account_reset();
    jemhooks_provider *provider = NULL;
    struct {
        jemhooks_provider_ops ops;
        char later[16];
    } longer = {account_ops(), {0}};
    jemhooks_provider_ops ops = account_ops();
    refuses("no ops", NULL, &provider, -EINVAL);
    refuses("nowhere to put it", &ops, NULL, -EINVAL);
    static const size_t sizes[] = {0, 4, offsetof(jemhooks_provider_ops, map), 65537, SIZE_MAX};
    for (size_t i = 0; i < 5; i++) {
        ops.size = sizes[i];
        refuses("a wrong size", &ops, &provider, -EINVAL);
    }
    ops = account_ops();
    ops.name = NULL;
    refuses("no name", &ops, &provider, -EINVAL);
    ops = account_ops();
    ops.map = NULL;
    refuses("no map", &ops, &provider, -EINVAL);
    static const size_t pages[] = {1, 2048, 4095, 4097, 12288, SIZE_MAX};
    for (size_t i = 0; i < 6; i++) {
        ops = account_ops();
        ops.page = pages[i];
        refuses("a wrong page", &ops, &provider, -EINVAL);
    }
    longer.ops.size = sizeof longer;
    longer.later[3] = 1;
    refuses("a field that is not known", &longer.ops, &provider, -E2BIG);
    longer.later[3] = 0;
    MUST(jemhooks_provider_create(&longer.ops, &mine, &provider));
    jemhooks_provider_info info = {.size = sizeof info};
    CHECK("info", jemhooks_provider_get_info(NULL, &info) == -EINVAL && jemhooks_provider_get_info(provider, NULL) == -EINVAL,
          "info of or into NULL");
    info.size = 0;
    CHECK("info", jemhooks_provider_get_info(provider, &info) == -EINVAL, "info without a size");
    jemhooks_arena *arena = arena_on(provider, NULL, 0);
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, 64), "block")));
    arena_end(arena);
    account_close(provider, false);
    jemhooks_provider_close(NULL);
}

static const test_case cases[] = {{"complete", complete}, {"order", order}, {"kept", kept}, {"beside", beside}, {"solid", solid},
                                  {"threads", threads}, {"enter_fails", enter_fails}, {"map_fails", map_fails},
                                  {"overlapping", overlapping}, {"map_lies", map_lies}, {"forked", forked}, {"flags", flags},
                                  {"bad_ops", bad_ops}, {NULL, NULL}};

int main(int argc, char **argv) {
    take_options(argc, argv);
    return run_cases(cases);
}
