/* registration.c - registering, deregistering and leases, with the registrar "null" and registrars that call back:
 * once however many ask, all rails or none, failures that leave everything as it was, and keys that stay valid while
 * a block lives.
 *     test_registration [case=…] rounds=300
 * Concurrency: `once`, `lasting` and `leased` run several threads, which share atomics only.                        */
#include "check.h"

#define MOST_RAILS JEMHOOKS_MAX_RAILS

static jemhooks_region_info region_info(jemhooks_arena *arena, const void *p) {
    size_t count;
    jemhooks_region_info *r = regions_of(arena, &count), found = {.base = 0};
    for (size_t i = 0; i < count; i++)
        if ((uintptr_t)p - r[i].base < r[i].length) found = r[i];
    free(r);
    CHECK("setup", found.base, "%p is in no region of its arena", p);
    return found;
}

/* ---- once, however many ask -------------------------------------------------------------------------------------- */

enum { ASKERS = 8 };
static pthread_barrier_t gate;
static char *asked_for;
static jemhooks_key answer[ASKERS];

static void *ask(void *arg) {
    size_t me = (size_t)(uintptr_t)arg;
    for (long round = 0; round < option("rounds", 300); round++) {
        pthread_barrier_wait(&gate);
        int rc = jemhooks_get_key(asked_for + me, &answer[me]);
        CHECK("once", !rc, "asking at the same time gave %d: %s", rc, jemhooks_last_error());
        pthread_barrier_wait(&gate);
    }
    return NULL;
}

static void once(void) {
    pthread_t thread[ASKERS];
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_arena *arena = arena_on(NULL, &null, 1);
    pthread_barrier_init(&gate, NULL, ASKERS + 1);
    for (size_t i = 0; i < ASKERS; i++) thread[i] = start_thread(ask, (void *)i);
    for (long round = 0; round < option("rounds", 300); round++) {
        uint64_t before = null_stats(null).registers;
        asked_for = must_have(jemhooks_alloc(arena, MIB), "block");
        pthread_barrier_wait(&gate);
        pthread_barrier_wait(&gate);
        CHECK("once", null_stats(null).registers == before + 1, "%d threads at the same time registered %zu times", ASKERS,
              (size_t)(null_stats(null).registers - before));
        for (size_t i = 1; i < ASKERS; i++)
            CHECK("once", answer[i].lkey == answer[0].lkey && answer[i].generation == answer[0].generation
                  && answer[i].addr == answer[0].addr + i, "threads got different keys");
        MUST(jemhooks_free(asked_for));
        MUST(jemhooks_trim(arena, NULL));
    }
    for (int i = 0; i < ASKERS; i++) join_thread(thread[i]);
    arena_end(arena);
    jemhooks_registrar_close(null);
}

/* ---- failures ---------------------------------------------------------------------------------------------------- */

static void same(const char *when, const jemhooks_region_info *a, const jemhooks_region_info *b) {
    CHECK("unchanged", a->base == b->base && a->length == b->length && a->committed == b->committed && a->state == b->state
          && a->leases == b->leases && a->lkey == b->lkey && a->rkey == b->rkey, "%s changed the region: state %u and then %u, "
          "%zu bytes committed and then %zu", when, a->state, b->state, (size_t)a->committed, (size_t)b->committed);
}

/* The Nth registration fails: nothing has changed, and the next attempt succeeds. */
static void nth_fails(void) {
    enum { COUNT = 6 };
    const size_t size = 65 * MIB; /* more than region_max: each has a region of its own */
    for (uint64_t nth = 1; nth <= COUNT; nth++) {
        jemhooks_null_config config = JEMHOOKS_NULL_CONFIG_INIT;
        config.fail_at = nth;
        config.fail_errno = ENOSPC;
        jemhooks_registrar *null = null_open(&config);
        jemhooks_arena *arena = arena_on(NULL, &null, 1);
        char *p[COUNT + 1];
        for (uint64_t i = 1; i <= COUNT; i++) {
            jemhooks_key key = {.addr = 1}, untouched = key;
            p[i] = must_have(jemhooks_alloc(arena, size), "block");
            fill(p[i], size, i);
            jemhooks_region_info before = region_info(arena, p[i]);
            int rc = i == 3 ? jemhooks_lease(p[i], &key) : jemhooks_get_key(p[i], &key);
            if (i == nth) {
                jemhooks_region_info after = region_info(arena, p[i]);
                jemhooks_stats s = stats_of(arena);
                CHECK("fails", rc == -ENOSPC && jemhooks_last_error_kind() == JEMHOOKS_ERROR_REGISTRATION
                      && strstr(jemhooks_last_error(), "null"), "a failing registration gave %d: %s", rc, jemhooks_last_error());
                same("a failed registration", &before, &after);
                CHECK("unchanged", !memcmp(&key, &untouched, sizeof key), "a failed registration wrote to the key");
                CHECK("unchanged", jemhooks_lookup(p[i], &key) == -EAGAIN, "a failed registration left a key");
                CHECK("unchanged", s.registered == (i - 1) * after.length && null_stats(null).live == i - 1
                      && s.registration_failures == 1, "a failed registration is not counted as one");
                rc = jemhooks_get_key(p[i], &key);
            } else if (i == 3) {
                MUST(jemhooks_release(p[i]));
            }
            CHECK("fails", !rc, "registration %zu gave %d", (size_t)i, rc);
            CHECK("content", filled(p[i], size, size, i), "registering changed the block");
        }
        for (int i = 1; i <= COUNT; i++) MUST(jemhooks_free(p[i]));
        MUST(jemhooks_trim(arena, NULL));
        check_idle(arena, true);
        arena_end(arena);
        CHECK("errors", !null_stats(null).live && !null_stats(null).errors, "the registrar is left with registrations or errors");
        jemhooks_registrar_close(null);
    }
}

/* Eager: the allocation fails, and its block is free again. */
static void eager_fails(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.registrars = &null;
    config.registrar_count = 1;
    config.policy = JEMHOOKS_EAGER;
    jemhooks_arena *arena = arena_of(&config);
    MUST(jemhooks_null_fail(null, JEMHOOKS_NULL_REGISTER, 1, EPERM));
    CHECK("eager", !jemhooks_alloc(arena, MIB) && errno == EPERM && jemhooks_last_error_kind() == JEMHOOKS_ERROR_REGISTRATION,
          "an allocation whose registration fails: errno %d", errno);
    CHECK("eager", !stats_of(arena).registered && !stats_of(arena).active, "a failed allocation is not free again");
    char *p = must_have(jemhooks_alloc(arena, MIB), "block");
    jemhooks_key key;
    CHECK("eager", !jemhooks_lookup(p, &key), "a block of an eager arena has no key");
    fill(p, MIB, 1);
    MUST(jemhooks_null_fail(null, JEMHOOKS_NULL_REGISTER, 1, EPERM));
    char *q = jemhooks_realloc(arena, p, 128 * MIB);
    CHECK("eager", !q && errno == EPERM && filled(p, MIB, MIB, 1), "a realloc whose registration fails lost the old block");
    CHECK("eager", !jemhooks_lookup(p, &key), "a failed realloc took the old block's key");
    MUST(jemhooks_free(p));
    arena_end(arena);
    CHECK("errors", !null_stats(null).live && !null_stats(null).errors, "the registrar is left with registrations or errors");
    jemhooks_registrar_close(null);
}

/* ---- all rails or none ------------------------------------------------------------------------------------------- */

static void rails(void) {
    for (unsigned count = 2; count <= MOST_RAILS; count++)
        for (unsigned failing = 0; failing < count; failing++) {
            jemhooks_registrar *null[MOST_RAILS];
            for (unsigned i = 0; i < count; i++) null[i] = null_open(NULL);
            jemhooks_arena *arena = arena_on(NULL, null, count);
            char *p = must_have(jemhooks_alloc(arena, MIB), "block");
            jemhooks_key key, each[MOST_RAILS];
            jemhooks_region_info before = region_info(arena, p);
            MUST(jemhooks_null_fail(null[failing], JEMHOOKS_NULL_REGISTER, 1, EMLINK));
            int rc = jemhooks_get_key(p, &key);
            jemhooks_region_info after = region_info(arena, p);
            CHECK("rails", rc == -EMLINK, "rail %u of %u fails: %d", failing, count, rc);
            same("a rail that failed", &before, &after);
            for (unsigned i = 0; i < count; i++)
                CHECK("rails", !null_stats(null[i]).live, "rail %u of %u failed, and rail %u is registered", failing, count, i);
            MUST(jemhooks_get_key(p, &key));
            for (unsigned i = 0; i < count; i++) {
                MUST(jemhooks_get_rail_key(p, i, &each[i]));
                jemhooks_null_stats n = null_stats(null[i]);
                jemhooks_null_call call[8];
                size_t calls = 8;
                MUST(jemhooks_null_get_calls(null[i], call, &calls));
                CHECK("rails", n.live == 1 && each[i].lkey == call[calls - 1].lkey && each[i].addr == (uintptr_t)p, "rail %u has %zu "
                      "registrations, and key %zu", i, (size_t)n.live, (size_t)each[i].lkey);
            }
            CHECK("rails", jemhooks_get_rail_key(p, count, &key) == -EINVAL, "there is a rail beyond the last");
            MUST(jemhooks_free(p));
            MUST(jemhooks_trim(arena, NULL));
            for (unsigned i = 0; i < count; i++) CHECK("rails", !null_stats(null[i]).live, "trim left rail %u registered", i);
            arena_end(arena);
            for (unsigned i = 0; i < count; i++) {
                CHECK("errors", !null_stats(null[i]).errors, "rail %u saw errors", i);
                jemhooks_registrar_close(null[i]);
            }
        }
}

/* ---- deregistration that fails ----------------------------------------------------------------------------------- */

/* In trim: the region stays registered, its key good. In destroy: it is stranded, mapped and registered for good. */
static void stranded(void) {
    for (unsigned count = 1; count <= 2; count++) {
        jemhooks_registrar *null[2];
        for (unsigned i = 0; i < count; i++) null[i] = null_open(NULL);
        jemhooks_arena *arena = arena_on(NULL, null, count);
        char *p = must_have(jemhooks_alloc(arena, 3 * MIB), "block"), *q = must_have(jemhooks_alloc(arena, 65 * MIB), "block");
        jemhooks_key key, again;
        size_t released = 1, before = jemhooks_stranded_bytes(), live = null_stats(null[0]).live;
        MUST(jemhooks_get_key(p, &key));
        jemhooks_region_info r = region_info(arena, p), other = region_info(arena, q);
        MUST(jemhooks_free(p));
        MUST(jemhooks_null_fail(null[0], JEMHOOKS_NULL_DEREGISTER, 1, EBADF));
        int rc = jemhooks_trim(arena, &released);
        CHECK("stranded", rc == -EBADF && !released && jemhooks_last_error_kind() == JEMHOOKS_ERROR_REGISTRATION, "a trim that could "
              "not deregister gave %d and released %zu bytes", rc, released);
        CHECK("stranded", !jemhooks_get_key(p, &again) && again.lkey == key.lkey && null_stats(null[0]).live == live + 1,
              "a region that could not be deregistered has no key any more");
        if (count == 1) {
            MUST(jemhooks_trim(arena, &released));
            CHECK("stranded", released == r.length, "the next trim released %zu bytes of %zu", released, (size_t)r.length);
            p = must_have(jemhooks_alloc(arena, 3 * MIB), "block");
            MUST(jemhooks_get_key(p, &key));
            r = region_info(arena, p);
            MUST(jemhooks_free(p));
        }
        MUST(jemhooks_free(q));
        MUST(jemhooks_null_fail(null[0], JEMHOOKS_NULL_DEREGISTER, 1, EBADF));
        rc = jemhooks_arena_destroy(arena);
        CHECK("stranded", rc == -EBADF, "a destroy that could not deregister gave %d", rc);
        CHECK("stranded", jemhooks_stranded_bytes() == before + r.length, "%zu bytes are stranded, not %zu",
              jemhooks_stranded_bytes() - before, (size_t)r.length);
        CHECK("stranded", is_mapped((void *)(uintptr_t)r.base) && is_mapped((void *)(uintptr_t)(r.base + r.length - 1)),
              "a stranded region is not mapped");
        CHECK("stranded", !jemhooks_region_of((void *)(uintptr_t)r.base) && jemhooks_get_key((void *)(uintptr_t)r.base, &key) == -ENOENT,
              "a stranded region is found");
        CHECK("stranded", !is_mapped((void *)(uintptr_t)other.base) || other.base == r.base, "the other region is still mapped");
        CHECK("stranded", null_stats(null[0]).live == 1, "the stranded region is not registered");
        for (unsigned i = 0; i < count; i++) jemhooks_registrar_close(null[i]);
    }
}

/* ---- leases ------------------------------------------------------------------------------------------------------ */

static void leases(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_arena *arena = arena_on(NULL, &null, 1);
    char *p = must_have(jemhooks_alloc(arena, MIB), "block");
    jemhooks_key key, first;
    size_t released = 1;
    CHECK("lease", jemhooks_release(p) == -EALREADY, "released without a lease");
    MUST(jemhooks_lease(p, &first));
    MUST(jemhooks_lease(p + 5, &key));
    MUST(jemhooks_lease(p, NULL));
    CHECK("lease", key.lkey == first.lkey && key.addr == first.addr + 5 && region_info(arena, p).leases == 3, "%u leases are counted, "
          "not 3", region_info(arena, p).leases);
    MUST(jemhooks_free(p));
    for (int left = 3; left > 0; left--) {
        CHECK("lease", !jemhooks_trim(arena, &released) && !released, "a trim released %zu leased bytes", released);
        CHECK("lease", !jemhooks_lookup(p, &key) && key.generation == first.generation, "a leased region lost its key");
        CHECK("lease", jemhooks_arena_destroy(arena) == -EBUSY && jemhooks_last_error_kind() == JEMHOOKS_ERROR_BUSY, "destroyed with "
              "%d leases", left);
        CHECK("lease", region_info(arena, p).leases == (unsigned)left, "%u leases are counted, not %d", region_info(arena, p).leases, left);
        MUST(jemhooks_release(p));
    }
    CHECK("lease", jemhooks_release(p) == -EALREADY, "released more often than leased");
    MUST(jemhooks_trim(arena, &released));
    CHECK("lease", released, "a region without leases was not released");
    arena_end(arena);
    jemhooks_registrar_close(null);
}

static atomic_bool stop;
static atomic_ulong trims;
static jemhooks_arena *shared;

/* Trims as fast as it can, which takes away every registration that is not held by a block or a lease. */
static void *trim_always(void *arg) {
    (void)arg;
    for (; !atomic_load(&stop); atomic_fetch_add(&trims, 1)) CHECK("trim", !jemhooks_trim(shared, NULL), "%s", jemhooks_last_error());
    return NULL;
}

/* While a block lives its key does not change: not by a trim that has begun before, while its region was empty, nor by
 * one that has begun since. */
static void *keep_keys(void *arg) {
    size_t size = (size_t)(uintptr_t)arg * MIB;
    dice d = {(uint64_t)(uintptr_t)arg};
    for (long i = 0; i < option("rounds", 300); i++) {
        jemhooks_key key, again;
        char *p = must_have(jemhooks_alloc(shared, size), "block");
        MUST(jemhooks_get_key(p, &key));
        for (unsigned long now = atomic_load(&trims); atomic_load(&trims) < now + 2;) {
            int rc = jemhooks_lookup(p, &again);
            if (!CHECK("key", !rc && again.generation == key.generation && again.lkey == key.lkey, "the key of a live block changed "
                       "(look-up gave %d)", rc)) break;
        }
        MUST(jemhooks_free(p));
        for (size_t pause = roll_below(&d, 20000); pause; pause--) jemhooks_region_of(p);
    }
    return NULL;
}

static void *keep_leases(void *arg) {
    char *p = arg;
    dice d = {(uint64_t)(uintptr_t)arg};
    for (long i = 0; i < option("rounds", 300); i++) {
        jemhooks_key key, again;
        MUST(jemhooks_lease(p, &key));
        for (unsigned long now = atomic_load(&trims); atomic_load(&trims) < now + 2;)
            if (!CHECK("lease", !jemhooks_lookup(p, &again) && again.generation == key.generation, "the key of a leased region "
                       "changed")) break;
        MUST(jemhooks_release(p));
        for (size_t pause = roll_below(&d, 20000); pause; pause--) jemhooks_region_of(p);
    }
    return NULL;
}

static void against_trim(void *(*run)(void *), void *one, void *other) {
    pthread_t trimmer, thread[2];
    atomic_store(&stop, false);
    trimmer = start_thread(trim_always, NULL);
    thread[0] = start_thread(run, one);
    thread[1] = start_thread(run, other);
    join_thread(thread[0]);
    join_thread(thread[1]);
    atomic_store(&stop, true);
    join_thread(trimmer);
}

static void lasting(void) {
    jemhooks_registrar *null = null_open(NULL);
    shared = arena_on(NULL, &null, 1);
    against_trim(keep_keys, (void *)65, (void *)66); /* more than region_max: each in a region of its own */
    MUST(jemhooks_trim(shared, NULL));
    check_idle(shared, true);
    jemhooks_null_stats n = null_stats(null);
    CHECK("errors", !n.errors && !n.live, "the registrar saw %zu errors and holds %zu registrations", (size_t)n.errors, (size_t)n.live);
    figure("registrations", (double)n.registers);
    arena_end(shared);
    jemhooks_registrar_close(null);
}

/* Leases on memory in which no block lives: nothing else keeps its regions. */
static void leased(void) {
    jemhooks_registrar *null = null_open(NULL);
    shared = arena_on(NULL, &null, 1);
    char *p = must_have(jemhooks_alloc(shared, 65 * MIB), "block"), *q = must_have(jemhooks_alloc(shared, 65 * MIB), "block");
    MUST(jemhooks_free(p));
    MUST(jemhooks_free(q));
    against_trim(keep_leases, p, q);
    jemhooks_null_stats n = null_stats(null);
    CHECK("errors", !n.errors, "the registrar saw %zu errors", (size_t)n.errors);
    figure("leased_registrations", (double)n.registers);
    arena_end(shared);
    jemhooks_registrar_close(null);
}

/* ---- a registrar that calls back --------------------------------------------------------------------------------- */

static char *meddle_with, *meddle_elsewhere;
static int meddled;

static int meddle(void) {
    jemhooks_key key;
    meddled++;
    CHECK("reentry", jemhooks_get_key(meddle_with, &key) == -EDEADLK, "a registrar got a key of the region that it works on");
    CHECK("reentry", jemhooks_lease(meddle_with, NULL) == -EDEADLK, "a registrar got a lease on the region that it works on");
    CHECK("reentry", jemhooks_lookup(meddle_with, &key) == -EAGAIN, "a region under way has a key");
    CHECK("reentry", !jemhooks_get_key(meddle_elsewhere, &key), "a registrar cannot use another arena: %s", jemhooks_last_error());
    char *p = jemhooks_alloc(shared, 100), *q = jemhooks_calloc(shared, 1, 100 * KIB);
    CHECK("reentry", p && q && all_zero(q, 100 * KIB), "a registrar cannot allocate: %s", jemhooks_last_error());
    CHECK("reentry", !jemhooks_free(p) && !jemhooks_free(q), "a registrar cannot free: %s", jemhooks_last_error());
    return 0;
}

static int meddling_register(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    (void)self, (void)address, (void)length, (void)access;
    mr->lkey = mr->rkey = 1;
    return meddle();
}

static int meddling_deregister(void *self, jemhooks_mr *mr) {
    (void)self, (void)mr;
    return meddle();
}

static void reentry(void) {
    static const jemhooks_registrar_ops ops = {.size = sizeof ops, .name = "meddler", .register_memory = meddling_register,
                                               .deregister_memory = meddling_deregister};
    jemhooks_registrar *meddler, *null = null_open(NULL);
    MUST(jemhooks_registrar_create(&ops, NULL, &meddler));
    jemhooks_arena *other = arena_on(NULL, &null, 1);
    shared = arena_on(NULL, &meddler, 1);
    meddle_elsewhere = must_have(jemhooks_alloc(other, 100), "block");
    meddle_with = must_have(jemhooks_alloc(shared, MIB), "block");
    jemhooks_key key;
    MUST(jemhooks_get_key(meddle_with, &key));
    MUST(jemhooks_free(meddle_with));
    MUST(jemhooks_trim(shared, NULL));
    MUST(jemhooks_trim(shared, NULL)); /* of what the registrar allocated during the first */
    CHECK("reentry", meddled == 2, "the registrar was called %d times, not twice", meddled);
    check_idle(shared, true);
    arena_end(shared);
    MUST(jemhooks_free(meddle_elsewhere));
    arena_end(other);
    jemhooks_registrar_close(meddler);
    jemhooks_registrar_close(null);
}

/* A policy of none has no keys; a wish that cannot be met is refused before anything is made. */
static void refused(void) {
    jemhooks_arena *arena = arena_on(NULL, NULL, 0), *none = NULL;
    char *p = must_have(jemhooks_alloc(arena, 100), "block");
    jemhooks_key key;
    CHECK("refused", jemhooks_get_key(p, &key) == -EOPNOTSUPP && jemhooks_lease(p, NULL) == -EOPNOTSUPP, "policy none has keys");
    MUST(jemhooks_free(p));
    arena_end(arena);
    jemhooks_null_config limited = JEMHOOKS_NULL_CONFIG_INIT;
    limited.max_mr_size = 4 * MIB;
    jemhooks_registrar *null = null_open(&limited);
    arena = arena_on(NULL, &null, 1);
    CHECK("limit", !jemhooks_alloc(arena, 5 * MIB) && errno == ENOMEM, "a block above max_mr_size: errno %d", errno);
    enum { COUNT = 200 };
    char *block[COUNT];
    for (int i = 0; i < COUNT; i++) {
        block[i] = must_have(jemhooks_alloc(arena, 100 * KIB), "block");
        MUST(jemhooks_get_key(block[i], &key));
        CHECK("limit", region_info(arena, block[i]).length <= 4 * MIB, "a region is larger than max_mr_size");
    }
    for (int i = 0; i < COUNT; i++) MUST(jemhooks_free(block[i]));
    arena_end(arena);
    jemhooks_registrar_close(null);
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    CHECK("refused", jemhooks_arena_create(&config, &none) == -EINVAL && !none, "lazy without a registrar was accepted");
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"once", once},         {"nth_fails", nth_fails}, {"eager_fails", eager_fails},
                                      {"rails", rails},       {"stranded", stranded},   {"leases", leases},
                                      {"lasting", lasting},   {"leased", leased},       {"reentry", reentry},
                                      {"refused", refused},   {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
