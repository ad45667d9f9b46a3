/* budget.c - limits on what is registered: who is evicted for whom, and what is refused. With the registrar "null", whose own
 * count of live bytes must never exceed a limit.
 *     test_budget [case=…] rounds=3000
 * Concurrency: `crowd` runs several threads on two arenas with one budget, which share atomics only.                 */
#include "check.h"

#include <sched.h>
#include <time.h>

#define REGION (2 * MIB)

static jemhooks_registrar *null;

/* An arena whose regions are 2 MiB each, so that a block of more than half of that has one of its own. */
static jemhooks_arena *small_regions(uint64_t pin_limit, uint64_t max_regions, ssize_t decay, int64_t ttl, int evict) {
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.registrars = &null;
    config.registrar_count = 1;
    config.region_max = REGION;
    config.dirty_decay_ms = config.muzzy_decay_ms = decay;
    config.pin_limit = pin_limit;
    config.max_regions = max_regions;
    config.idle_ttl_ms = ttl;
    config.evict = evict;
    return arena_of(&config);
}

static jemhooks_arena *limited(uint64_t pin_limit, uint64_t max_regions) {
    return small_regions(pin_limit, max_regions, 0, JEMHOOKS_FOREVER, JEMHOOKS_EVICT_IDLE);
}

static void *region_block(jemhooks_arena *a) {
    return must_have(jemhooks_alloc(a, 3 * REGION / 4), "block");
}

static bool is_registered(const void *p) {
    jemhooks_key key;
    return !jemhooks_lookup(p, &key);
}

static jemhooks_budget_info info_of(jemhooks_budget *b) {
    jemhooks_budget_info info = {.size = sizeof info};
    MUST(jemhooks_budget_get(b, &info));
    return info;
}

static void limit_registrar(uint64_t pin_limit, uint64_t max_regions) {
    MUST(jemhooks_budget_set(jemhooks_registrar_budget(null), pin_limit, max_regions));
}

static void expect_refused(const void *p, const char *says) {
    jemhooks_key key;
    int rc = jemhooks_get_key(p, &key);
    CHECK("refused", rc == -ENOBUFS && jemhooks_last_error_kind() == JEMHOOKS_ERROR_PIN_LIMIT &&
          strstr(jemhooks_last_error(), says), "beyond the limit a key gave %d, '%s', without '%s'", rc, jemhooks_last_error(), says);
    CHECK("refused", !is_registered(p), "a refused region is registered");
}

/* ---- the longest idle first, and nothing that is in use ---------------------------------------------------------- */

static void oldest_first(void) {
    enum { N = 4 };
    jemhooks_arena *a = limited(N * REGION, JEMHOOKS_UNLIMITED);
    jemhooks_key key;
    char *p[N + 2];
    for (int i = 0; i < N + 2; i++) p[i] = region_block(a);
    for (int i = 0; i < N; i++) MUST(jemhooks_get_key(p[i], &key));
    expect_refused(p[N], "at most 8388608 bytes may be registered, and 8388608 bytes in 4 regions are");
    MUST(jemhooks_free(p[2])); /* idle from now on, and longer than the next one */
    MUST(jemhooks_free(p[0]));
    MUST(jemhooks_get_key(p[N], &key));
    CHECK("order", !is_registered(p[2]) && is_registered(p[0]), "the region that became idle last was evicted first");
    CHECK("order", is_registered(p[1]) && is_registered(p[3]), "a region in use was evicted");
    MUST(jemhooks_get_key(p[N + 1], &key));
    CHECK("order", !is_registered(p[0]), "there is no room without evicting the other idle region");
    jemhooks_stats s = stats_of(a);
    CHECK("count", s.evictions == 2 && s.registrations == N + 2 && s.registered == N * REGION && s.registered_peak == N * REGION,
          "%zu evictions, %zu registrations, %zu bytes now, %zu at most", (size_t)s.evictions, (size_t)s.registrations,
          (size_t)s.registered, (size_t)s.registered_peak);
    uint64_t timed = 0;
    for (int i = 0; i < JEMHOOKS_DURATIONS; i++) timed += s.durations[i];
    CHECK("count", timed == s.registrations, "%zu of %zu registrations were timed", (size_t)timed, (size_t)s.registrations);
    for (int i = 0; i < N + 2; i++)
        if (i != 0 && i != 2) MUST(jemhooks_free(p[i]));
    arena_end(a);
}

static void leases(void) {
    jemhooks_arena *a = limited(2 * REGION, JEMHOOKS_UNLIMITED);
    jemhooks_key key;
    char *p[3];
    for (int i = 0; i < 3; i++) p[i] = region_block(a);
    MUST(jemhooks_lease(p[0], &key));
    MUST(jemhooks_lease(p[1], &key));
    MUST(jemhooks_free(p[0]));
    expect_refused(p[2], "arena");
    CHECK("lease", is_registered(p[0]), "a leased region was evicted");
    MUST(jemhooks_release(p[0]));
    MUST(jemhooks_get_key(p[2], &key));
    CHECK("lease", !is_registered(p[0]), "a region that is neither leased nor in use was kept");
    MUST(jemhooks_release(p[1]));
    MUST(jemhooks_free(p[1]));
    MUST(jemhooks_free(p[2]));
    arena_end(a);
}

/* With dirty pages kept for good every region stays busy, until they are given up for the budget's sake. */
static void dirty_pages(void) {
    jemhooks_arena *a = small_regions(2 * REGION, JEMHOOKS_UNLIMITED, -1, JEMHOOKS_FOREVER, JEMHOOKS_EVICT_IDLE);
    jemhooks_key key;
    char *p[3];
    for (int i = 0; i < 3; i++) p[i] = region_block(a);
    MUST(jemhooks_get_key(p[0], &key));
    MUST(jemhooks_get_key(p[1], &key));
    MUST(jemhooks_free(p[0]));
    CHECK("setup", region_at(a, p[1]).committed && stats_of(a).dirty, "there are no dirty pages");
    MUST(jemhooks_get_key(p[2], &key));
    CHECK("dirty", !is_registered(p[0]) && !stats_of(a).dirty, "dirty pages kept a region from being evicted");
    MUST(jemhooks_free(p[1]));
    MUST(jemhooks_free(p[2]));
    arena_end(a);
}

/* ---- one budget for several arenas ------------------------------------------------------------------------------- */

static void shared(void) {
    limit_registrar(3 * REGION, JEMHOOKS_UNLIMITED);
    jemhooks_arena *a = limited(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
    jemhooks_arena *b = small_regions(2 * REGION, JEMHOOKS_UNLIMITED, -1, JEMHOOKS_FOREVER, JEMHOOKS_EVICT_IDLE);
    jemhooks_key key;
    char *p[3], *q[3];
    for (int i = 0; i < 3; i++) {
        p[i] = region_block(a);
        q[i] = region_block(b);
    }
    for (int i = 0; i < 2; i++) MUST(jemhooks_get_key(q[i], &key));
    expect_refused(q[2], "4194304 bytes"); /* b's own limit */
    MUST(jemhooks_get_key(p[0], &key));
    expect_refused(p[1], "4194304 by arena 'arena', 2097152 by arena 'arena'");
    CHECK("shared", info_of(jemhooks_arena_budget(a)).peak == REGION, "what was refused was counted as a peak");
    MUST(jemhooks_free(q[0])); /* dirty */
    MUST(jemhooks_get_key(p[1], &key));
    CHECK("shared", !is_registered(q[0]), "an idle region of another arena stands in the way");
    CHECK("shared", stats_of(b).evictions == 1 && !stats_of(a).evictions, "the eviction is counted where it happened");
    jemhooks_budget_info info = info_of(jemhooks_registrar_budget(null));
    CHECK("shared", info.registered == 3 * REGION && info.regions == 3 && info.peak >= 3 * REGION && info.pin_limit == 3 * REGION,
          "the budget says %zu bytes in %zu regions", (size_t)info.registered, (size_t)info.regions);
    CHECK("shared", info_of(jemhooks_arena_budget(b)).registered == REGION, "the arena's own budget says something else");
    for (int i = 0; i < 3; i++) {
        MUST(jemhooks_free(p[i]));
        if (i) MUST(jemhooks_free(q[i]));
    }
    arena_end(a);
    CHECK("shared", info_of(jemhooks_registrar_budget(null)).registered == REGION, "an ended arena is still charged");
    arena_end(b);
    CHECK("shared", !info_of(jemhooks_registrar_budget(null)).registered, "ended arenas are still charged");
    limit_registrar(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
}

/* ---- changing limits --------------------------------------------------------------------------------------------- */

static void set(void) {
    jemhooks_arena *a = limited(JEMHOOKS_UNLIMITED, 3);
    jemhooks_budget *b = jemhooks_arena_budget(a);
    jemhooks_key key;
    char *p[4];
    for (int i = 0; i < 4; i++) p[i] = region_block(a);
    for (int i = 0; i < 3; i++) MUST(jemhooks_get_key(p[i], &key));
    expect_refused(p[3], "at most 3 regions may be registered");
    MUST(jemhooks_free(p[0]));
    MUST(jemhooks_budget_set(b, JEMHOOKS_UNLIMITED, 1));
    CHECK("set", !is_registered(p[0]) && is_registered(p[1]) && is_registered(p[2]),
          "a lower limit evicts what is idle and nothing else");
    MUST(jemhooks_free(p[1]));
    expect_refused(p[3], "at most 1 regions");
    MUST(jemhooks_budget_set(b, 2 * REGION, 2));
    MUST(jemhooks_get_key(p[3], &key));
    expect_refused(region_block(a), "at most 4194304 bytes in 2 regions");
    CHECK("set", jemhooks_budget_set(NULL, 1, 1) == -EINVAL && jemhooks_budget_get(b, NULL) == -EINVAL, "NULL was taken");
    CHECK("set", jemhooks_registrar_set_budget(null, b) == -EBUSY, "the budget of a registrar in use was changed");
    MUST(jemhooks_revoke(a));
    jemhooks_budget_info info = info_of(b);
    CHECK("set", !info.registered && !info.regions, "revoked regions are still charged");
    size_t count;
    jemhooks_region_info *r = regions_of(a, &count);
    free(r);
    for (int i = 2; i < 4; i++) MUST(jemhooks_free(p[i]));
    CHECK("set", jemhooks_arena_destroy(a) == -EBUSY, "a block is still there");
    MUST(jemhooks_get_key(p[3] = region_block(a), &key)); /* an arena that was not destroyed goes on */
    CHECK("set", info_of(b).regions == 1, "after a refused destroy the arena is not charged");
    null = NULL; /* what is left goes with the process */
}

static void bad_limits(void) {
    static const struct {
        uint64_t pin_limit, max_regions;
        int64_t ttl;
        int evict;
    } bad[] = {{REGION - 1, 9, 0, 0}, {0, 9, 0, 0}, {REGION, 0, 0, 0}, {REGION, 9, -2, 0}, {REGION, 9, INT64_MIN, 0},
               {REGION, 9, 0, 2}, {REGION, 9, INT64_MAX, 0}};
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.registrars = &null;
    config.registrar_count = 1;
    jemhooks_arena *a = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        config.pin_limit = bad[i].pin_limit;
        config.max_regions = bad[i].max_regions;
        config.idle_ttl_ms = bad[i].ttl;
        config.evict = bad[i].evict;
        CHECK("refused", jemhooks_arena_create(&config, &a) == -EINVAL && !a && strlen(jemhooks_last_error()) > 20,
              "bad limits %zu were taken", i);
    }
    jemhooks_config good = JEMHOOKS_CONFIG_INIT;
    good.registrars = &null;
    good.registrar_count = 1;
    limit_registrar(REGION / 2, 1);
    CHECK("refused", jemhooks_arena_create(&good, &a) == -EINVAL && strstr(jemhooks_last_error(), "1048576 bytes in 1 regions"),
          "a registrar's budget with no room for a region was taken: %s", jemhooks_last_error());
    limit_registrar(16 * REGION, JEMHOOKS_UNLIMITED);
    a = arena_of(&good);
    char *p = must_have(jemhooks_alloc(a, 40 * MIB), "block");
    expect_refused(p, "may be registered, and 0 bytes in 0 regions are");
    char *q[40];
    for (int i = 0; i < 40; i++) q[i] = must_have(jemhooks_alloc(a, MIB), "block");
    size_t count;
    jemhooks_region_info *r = regions_of(a, &count);
    for (size_t i = 0; i < count; i++)
        CHECK("growth", r[i].length <= 2 * REGION || r[i].length >= 40 * MIB, "a region of %zu bytes, with a pin limit of %zu",
              (size_t)r[i].length, 16 * REGION);
    free(r);
    for (int i = 0; i < 40; i++) MUST(jemhooks_free(q[i]));
    MUST(jemhooks_free(p));
    arena_end(a);
    limit_registrar(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
}

/* ---- how long idle regions stay ---------------------------------------------------------------------------------- */

static void spin(uint64_t ms) {
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < (long)ms);
}

static void ttl(void) {
    jemhooks_key key;
    jemhooks_arena *a = small_regions(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED, 0, 0, JEMHOOKS_EVICT_IDLE);
    char *p = region_block(a), *q = region_block(a);
    MUST(jemhooks_get_key(p, &key));
    MUST(jemhooks_lease(q, &key));
    MUST(jemhooks_free(p));
    CHECK("ttl", !is_registered(p), "with a time of 0 an idle region stayed registered");
    MUST(jemhooks_free(q));
    CHECK("ttl", is_registered(q), "a leased region was deregistered");
    MUST(jemhooks_release(q));
    CHECK("ttl", !is_registered(q), "the last lease had gone");
    arena_end(a);

    a = small_regions(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED, 0, 20, JEMHOOKS_EVICT_IDLE);
    p = region_block(a);
    q = region_block(a);
    MUST(jemhooks_get_key(p, &key));
    MUST(jemhooks_free(p));
    CHECK("ttl", is_registered(p), "an idle region was deregistered before its time");
    spin(25);
    MUST(jemhooks_get_key(q, &key));
    CHECK("ttl", !is_registered(p), "25 ms later, with a time of 20 ms, it was still registered");
    CHECK("ttl", stats_of(a).evictions == 1, "that was not counted");
    MUST(jemhooks_free(q));
    arena_end(a);
}

/* An idle region that comes into use again is a registration saved. */
static void hits(void) {
    jemhooks_arena *a = limited(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
    jemhooks_key key;
    for (int i = 0; i < 5; i++) {
        char *p = region_block(a);
        MUST(jemhooks_get_key(p, &key));
        MUST(jemhooks_free(p));
    }
    jemhooks_stats s = stats_of(a);
    CHECK("hits", s.registrations == 1 && s.hits == 4, "%zu registrations and %zu hits in 5 uses of one region",
          (size_t)s.registrations, (size_t)s.hits);
    arena_end(a);
}

/* ---- busy, but unleased ------------------------------------------------------------------------------------------ */

static void unleased(void) {
    jemhooks_arena *a = small_regions(2 * REGION, JEMHOOKS_UNLIMITED, 0, JEMHOOKS_FOREVER, JEMHOOKS_EVICT_UNLEASED);
    jemhooks_key key, first;
    char *p[3];
    for (int i = 0; i < 3; i++) {
        p[i] = region_block(a);
        fill(p[i], MIB, (uint64_t)i);
    }
    MUST(jemhooks_lease(p[0], &first));
    MUST(jemhooks_get_key(p[1], &key));
    MUST(jemhooks_get_key(p[2], &key));
    CHECK("unleased", is_registered(p[0]) && !is_registered(p[1]), "the leased region went, or the other one stayed");
    MUST(jemhooks_lease(p[2], NULL));
    expect_refused(p[1], "4194304 bytes in 2 regions are");
    MUST(jemhooks_release(p[0]));
    MUST(jemhooks_lease(p[1], &key));
    MUST(jemhooks_release(p[1]));
    MUST(jemhooks_release(p[2]));
    for (int i = 0; i < 3; i++) {
        CHECK("content", filled(p[i], MIB, MIB, (uint64_t)i), "evicting a busy region changed its bytes");
        MUST(jemhooks_free(p[i]));
    }
    arena_end(a);
}

/* ---- refused by the registrar ------------------------------------------------------------------------------------ */

static void refused(void) {
    jemhooks_null_config config = JEMHOOKS_NULL_CONFIG_INIT;
    config.max_mr = 3;
    jemhooks_registrar *all = null, *few = null_open(&config);
    null = few;
    jemhooks_arena *a = limited(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
    limit_registrar(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED); /* against what the registrar itself suggests */
    jemhooks_key key;
    char *p[5];
    for (int i = 0; i < 5; i++) p[i] = region_block(a);
    for (int i = 0; i < 3; i++) MUST(jemhooks_get_key(p[i], &key));
    CHECK("refused", jemhooks_get_key(p[3], &key) == -ENOSPC && jemhooks_last_error_kind() == JEMHOOKS_ERROR_REGISTRATION &&
          strstr(jemhooks_last_error(), "null failed to register"), "beyond the registrar's own limit: %s", jemhooks_last_error());
    MUST(jemhooks_free(p[1]));
    MUST(jemhooks_get_key(p[3], &key));
    jemhooks_stats s = stats_of(a);
    CHECK("retry", s.retries == 1 && s.evictions == 1 && !is_registered(p[1]), "%zu retries and %zu evictions, not 1 and 1",
          (size_t)s.retries, (size_t)s.evictions);
    MUST(jemhooks_free(p[0]));
    MUST(jemhooks_null_fail(few, JEMHOOKS_NULL_REGISTER, 1, EPERM));
    CHECK("retry", jemhooks_get_key(p[4], &key) == -EPERM && stats_of(a).retries == 1 && is_registered(p[0]),
          "an error that room does not cure was answered by evictions");
    MUST(jemhooks_null_fail(few, JEMHOOKS_NULL_DEREGISTER, 1, EIO));
    CHECK("retry", jemhooks_get_key(p[4], &key) == -ENOSPC, "with an eviction that fails there is no room");
    CHECK("retry", stats_of(a).evictions == 1, "an eviction that failed was counted");
    MUST(jemhooks_get_key(p[4], &key));
    for (int i = 2; i < 5; i++) MUST(jemhooks_free(p[i]));
    arena_end(a);

    jemhooks_arena *b = limited(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED); /* as suggested, none set: hence a new registrar */
    arena_end(b);
    jemhooks_registrar_close(few);
    null = few = null_open(&config);
    b = limited(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
    CHECK("suggested", info_of(jemhooks_registrar_budget(few)).max_regions == 3, "a registrar's max_mr is not its budget");
    for (int i = 0; i < 4; i++) {
        p[i] = region_block(b);
        if (i < 3) MUST(jemhooks_get_key(p[i], &key));
        else expect_refused(p[i], "at most 3 regions");
    }
    CHECK("suggested", null_stats(few).registers == 3, "the registrar was asked for what it cannot do");
    for (int i = 0; i < 4; i++) MUST(jemhooks_free(p[i]));
    arena_end(b);
    CHECK("errors", !null_stats(few).errors && !null_stats(few).live, "the registrar is left with registrations or errors");
    jemhooks_registrar_close(few);
    null = all;
}

/* ---- many at a time ---------------------------------------------------------------------------------------------- */

enum { MEMBERS = 4 };
#define CROWD_LIMIT (6 * REGION)
static jemhooks_arena *crowd_arena[2];
static atomic_ulong keys, refusals;

static void *member(void *arg) {
    enum { HELD = 5 };
    dice d = {(uint64_t)(uintptr_t)arg};
    struct { char *p; bool leased, registered; } held[HELD] = {{0}};
    for (long round = 0; round < option("rounds", 3000); round++) {
        size_t k = roll_below(&d, HELD);
        if (held[k].p) {
            CHECK("key", !held[k].registered || is_registered(held[k].p), "a live block lost its registration");
            if (held[k].leased) MUST(jemhooks_release(held[k].p));
            MUST(jemhooks_free(held[k].p));
            held[k].p = NULL;
            continue;
        }
        jemhooks_arena *a = crowd_arena[roll_below(&d, 2)];
        jemhooks_key key;
        char *p = held[k].p = must_have(jemhooks_alloc(a, (256 * KIB) << roll_below(&d, 4)), "block");
        bool lease = !roll_below(&d, 3);
        int rc = lease ? jemhooks_lease(p, &key) : jemhooks_get_key(p, &key);
        held[k].registered = !rc;
        held[k].leased = !rc && lease;
        CHECK("key", !rc || jemhooks_last_error_kind() == JEMHOOKS_ERROR_PIN_LIMIT, "%s", jemhooks_last_error());
        atomic_fetch_add(rc ? &refusals : &keys, 1);
        if (!roll_below(&d, 50)) MUST(jemhooks_trim(a, NULL));
        CHECK("limit", null_stats(null).live_bytes <= CROWD_LIMIT, "%zu bytes are registered", (size_t)null_stats(null).live_bytes);
    }
    for (int k = 0; k < HELD; k++) {
        if (held[k].p && held[k].leased) MUST(jemhooks_release(held[k].p));
        MUST(jemhooks_free(held[k].p));
    }
    return NULL;
}

static void crowd(void) {
    limit_registrar(CROWD_LIMIT, JEMHOOKS_UNLIMITED);
    pthread_t thread[MEMBERS];
    crowd_arena[0] = limited(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
    crowd_arena[1] = small_regions(4 * REGION, JEMHOOKS_UNLIMITED, 1, 3, JEMHOOKS_EVICT_IDLE);
    for (size_t i = 0; i < MEMBERS; i++) thread[i] = start_thread(member, (void *)(i + 1));
    for (int i = 0; i < MEMBERS; i++) join_thread(thread[i]);
    jemhooks_budget_info info = info_of(jemhooks_registrar_budget(null));
    CHECK("limit", info.peak <= CROWD_LIMIT, "%zu bytes were charged", (size_t)info.peak);
    CHECK("limit", info.registered == null_stats(null).live_bytes, "%zu bytes are charged and %zu registered",
          (size_t)info.registered, (size_t)null_stats(null).live_bytes);
    uint64_t evictions = stats_of(crowd_arena[0]).evictions + stats_of(crowd_arena[1]).evictions;
    CHECK("setup", evictions > 50 && atomic_load(&keys) > 100, "%zu evictions show nothing", (size_t)evictions);
    figure("evictions", (double)evictions);
    figure("keys", (double)atomic_load(&keys));
    figure("refusals", (double)atomic_load(&refusals));
    arena_end(crowd_arena[0]);
    arena_end(crowd_arena[1]);
    CHECK("errors", !null_stats(null).errors && !null_stats(null).live, "the registrar is left with registrations or errors");
    CHECK("limit", !info_of(jemhooks_registrar_budget(null)).registered, "ended arenas are still charged");
    limit_registrar(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
}

/* ---- what can never fit ------------------------------------------------------------------------------------------- */

static void never(void) {
    jemhooks_arena *a = limited(8 * REGION, JEMHOOKS_UNLIMITED);
    jemhooks_key key;
    char *p = region_block(a), *big = must_have(jemhooks_alloc(a, 9 * REGION), "block");
    MUST(jemhooks_get_key(p, &key));
    MUST(jemhooks_free(p));
    expect_refused(big, "and 2097152 bytes in 1 regions are");
    CHECK("never", is_registered(p) && !stats_of(a).evictions, "regions were evicted for one that is larger than the limit");
    MUST(jemhooks_free(big));
    arena_end(a);

    jemhooks_config config = JEMHOOKS_CONFIG_INIT; /* one registrar on two rails, charged twice */
    jemhooks_registrar *two[2] = {null, null};
    config.registrars = two;
    config.registrar_count = 2;
    limit_registrar(2 * REGION - 1, JEMHOOKS_UNLIMITED);
    CHECK("never", jemhooks_arena_create(&config, &a) == -EINVAL, "a budget that one region on two rails exceeds was taken");
    limit_registrar(JEMHOOKS_UNLIMITED, 1);
    CHECK("never", jemhooks_arena_create(&config, &a) == -EINVAL && strstr(jemhooks_last_error(), "on 2 rails"),
          "one registration was enough for two rails");
    limit_registrar(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
}

/* ---- an arena that ends ------------------------------------------------------------------------------------------- */

static jemhooks_arena *ending;
static atomic_int refusals_inside;

static void try_to_destroy(void *arg, int op, void *address, size_t length) {
    (void)arg, (void)op, (void)address, (void)length;
    if (jemhooks_arena_destroy(ending) == -EDEADLK) atomic_fetch_add(&refusals_inside, 1);
}

static void inside_a_registrar(void) {
    jemhooks_null_config config = JEMHOOKS_NULL_CONFIG_INIT;
    config.observer = try_to_destroy;
    jemhooks_registrar *calls_back = null_open(&config);
    ending = arena_on(NULL, &calls_back, 1);
    jemhooks_key key;
    char *p = must_have(jemhooks_alloc(ending, 100), "block");
    MUST(jemhooks_get_key(p, &key));
    MUST(jemhooks_free(p));
    MUST(jemhooks_trim(ending, NULL));
    CHECK("inside", atomic_load(&refusals_inside) == 2, "destroyed from inside its own registrar");
    arena_end(ending);
    jemhooks_registrar_close(calls_back);
}

static atomic_bool enough;

static void *evict_others(void *arg) {
    jemhooks_arena *a = arg;
    jemhooks_key key;
    while (!atomic_load(&enough)) {
        char *p = region_block(a);
        jemhooks_get_key(p, &key);
        MUST(jemhooks_free(p));
        MUST(jemhooks_trim(a, NULL));
    }
    return NULL;
}

/* While others evict from it. */
static void while_evicted_from(void) {
    limit_registrar(REGION, JEMHOOKS_UNLIMITED);
    jemhooks_arena *a = limited(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
    pthread_t thread = start_thread(evict_others, a);
    jemhooks_key key;
    dice d = {1};
    for (long round = 0; round < option("rounds", 3000); round++) {
        jemhooks_arena *b = limited(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
        char *p = region_block(b);
        CHECK("key", !jemhooks_get_key(p, &key) || jemhooks_last_error_kind() == JEMHOOKS_ERROR_PIN_LIMIT, "%s",
              jemhooks_last_error());
        MUST(jemhooks_free(p));
        for (size_t yields = roll_below(&d, 20); yields; yields--) sched_yield();
        arena_end(b);
    }
    atomic_store(&enough, true);
    join_thread(thread);
    arena_end(a);
    CHECK("errors", !null_stats(null).errors && !null_stats(null).live, "the registrar is left with registrations or errors");
    CHECK("limit", !info_of(jemhooks_registrar_budget(null)).registered, "ended arenas are still charged");
    limit_registrar(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED);
}

int main(int argc, char **argv) {
    static const test_case cases[] = {
        {"oldest_first", oldest_first}, {"leases", leases}, {"dirty_pages", dirty_pages}, {"shared", shared},
        {"bad_limits", bad_limits}, {"ttl", ttl}, {"hits", hits}, {"unleased", unleased}, {"refused", refused}, {"crowd", crowd},
        {"never", never}, {"inside_a_registrar", inside_a_registrar}, {"while_evicted_from", while_evicted_from},
        {"set", set}, {NULL, NULL}};
    take_options(argc, argv);
    null = null_open(NULL);
    int status = run_cases(cases);
    jemhooks_registrar_close(null);
    return status;
}
