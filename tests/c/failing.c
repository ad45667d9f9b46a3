/* failing.c - registrars that fail: everything is as it was, all rails are registered or none, and a region that cannot
 * be deregistered stays where it is.
 *     test_failing [case=…]
 * Concurrency: one thread.                                                                                          */
#include "check.h"

#define MOST_RAILS JEMHOOKS_MAX_RAILS

/* ---- failures ---------------------------------------------------------------------------------------------------- */

static void same(const char *when, const jemhooks_region_info *a, const jemhooks_region_info *b) {
    CHECK("unchanged",
          a->base == b->base && a->length == b->length && a->committed == b->committed && a->state == b->state &&
              a->leases == b->leases && a->lkey == b->lkey && a->rkey == b->rkey,
          "%s changed the region: state %u and then %u, %zu bytes committed and then %zu", when, a->state, b->state,
          (size_t)a->committed, (size_t)b->committed);
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
            MUST(jemhooks_trim(arena, NULL)); /* jemalloc 5.3.1 rounds the size up, and gives the rest up when it next purges */
            jemhooks_region_info before = region_at(arena, p[i]);
            size_t registered = stats_of(arena).registered;
            int rc = i == 3 ? jemhooks_lease(p[i], &key) : jemhooks_get_key(p[i], &key);
            if (i == nth) {
                jemhooks_region_info after = region_at(arena, p[i]);
                jemhooks_stats s = stats_of(arena);
                CHECK("fails",
                      rc == -ENOSPC && jemhooks_last_error_kind() == JEMHOOKS_ERROR_REGISTRATION &&
                          strstr(jemhooks_last_error(), "null"),
                      "a failing registration gave %d: %s", rc, jemhooks_last_error());
                same("a failed registration", &before, &after);
                CHECK("unchanged", !memcmp(&key, &untouched, sizeof key), "a failed registration wrote to the key");
                CHECK("unchanged", jemhooks_lookup(p[i], &key) == -EAGAIN, "a failed registration left a key");
                CHECK("unchanged",
                      s.registered == registered && null_stats(null).live == i - 1 && s.registration_failures == 1,
                      "a failed registration is not counted as one");
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
        CHECK("errors", !null_stats(null).live && !null_stats(null).errors,
              "the registrar is left with registrations or errors");
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
    CHECK("eager",
          !jemhooks_alloc(arena, MIB) && errno == EPERM && jemhooks_last_error_kind() == JEMHOOKS_ERROR_REGISTRATION,
          "an allocation whose registration fails: errno %d", errno);
    CHECK("eager", !stats_of(arena).registered && !stats_of(arena).active, "a failed allocation is not free again");
    char *p = must_have(jemhooks_alloc(arena, MIB), "block");
    jemhooks_key key;
    CHECK("eager", !jemhooks_lookup(p, &key), "a block of an eager arena has no key");
    fill(p, MIB, 1);
    MUST(jemhooks_null_fail(null, JEMHOOKS_NULL_REGISTER, 1, EPERM));
    char *q = jemhooks_realloc(arena, p, 128 * MIB);
    CHECK("eager", !q && errno == EPERM && filled(p, MIB, MIB, 1),
          "a realloc whose registration fails lost the old block");
    CHECK("eager", !jemhooks_lookup(p, &key), "a failed realloc took the old block's key");
    MUST(jemhooks_free(p));
    arena_end(arena);
    CHECK("errors", !null_stats(null).live && !null_stats(null).errors,
          "the registrar is left with registrations or errors");
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
            jemhooks_region_info before = region_at(arena, p);
            MUST(jemhooks_null_fail(null[failing], JEMHOOKS_NULL_REGISTER, 1, EMLINK));
            int rc = jemhooks_get_key(p, &key);
            jemhooks_region_info after = region_at(arena, p);
            CHECK("rails", rc == -EMLINK, "rail %u of %u fails: %d", failing, count, rc);
            same("a rail that failed", &before, &after);
            for (unsigned i = 0; i < count; i++)
                CHECK("rails", !null_stats(null[i]).live, "rail %u of %u failed, and rail %u is registered", failing,
                      count, i);
            MUST(jemhooks_get_key(p, &key));
            for (unsigned i = 0; i < count; i++) {
                MUST(jemhooks_get_rail_key(p, i, &each[i]));
                jemhooks_null_stats n = null_stats(null[i]);
                jemhooks_null_call call[8];
                size_t calls = 8;
                MUST(jemhooks_null_get_calls(null[i], call, &calls));
                CHECK("rails", n.live == 1 && each[i].lkey == call[calls - 1].lkey && each[i].addr == (uintptr_t)p,
                      "rail %u has %zu registrations, and key %zu", i, (size_t)n.live, (size_t)each[i].lkey);
            }
            CHECK("rails", jemhooks_get_rail_key(p, count, &key) == -EINVAL, "there is a rail beyond the last");
            MUST(jemhooks_free(p));
            MUST(jemhooks_trim(arena, NULL));
            for (unsigned i = 0; i < count; i++)
                CHECK("rails", !null_stats(null[i]).live, "trim left rail %u registered", i);
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
        char *p = must_have(jemhooks_alloc(arena, 3 * MIB), "block"),
             *q = must_have(jemhooks_alloc(arena, 65 * MIB), "block");
        jemhooks_key key, again;
        size_t released = 1, before = jemhooks_stranded_bytes(), live = null_stats(null[0]).live;
        MUST(jemhooks_get_key(p, &key));
        jemhooks_region_info r = region_at(arena, p), other = region_at(arena, q);
        MUST(jemhooks_free(p));
        MUST(jemhooks_null_fail(null[0], JEMHOOKS_NULL_DEREGISTER, 1, EBADF));
        int rc = jemhooks_trim(arena, &released);
        CHECK("stranded", rc == -EBADF && !released && jemhooks_last_error_kind() == JEMHOOKS_ERROR_REGISTRATION,
              "a trim that could not deregister gave %d and released %zu bytes", rc, released);
        CHECK("stranded",
              !jemhooks_get_key(p, &again) && again.lkey == key.lkey && null_stats(null[0]).live == live + 1,
              "a region that could not be deregistered has no key any more");
        if (count == 1) {
            MUST(jemhooks_trim(arena, &released));
            CHECK("stranded", released == r.length, "the next trim released %zu bytes of %zu", released,
                  (size_t)r.length);
            p = must_have(jemhooks_alloc(arena, 3 * MIB), "block");
            MUST(jemhooks_get_key(p, &key));
            r = region_at(arena, p);
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
        CHECK("stranded",
              !jemhooks_region_of((void *)(uintptr_t)r.base) &&
                  jemhooks_get_key((void *)(uintptr_t)r.base, &key) == -ENOENT,
              "a stranded region is found");
        CHECK("stranded", !is_mapped((void *)(uintptr_t)other.base) || other.base == r.base,
              "the other region is still mapped");
        CHECK("stranded", null_stats(null[0]).live == 1, "the stranded region is not registered");
        for (unsigned i = 0; i < count; i++) jemhooks_registrar_close(null[i]);
    }
}

/* A policy of none has no keys; a wish that cannot be met is refused before anything is made. */
static void refused(void) {
    jemhooks_arena *arena = arena_on(NULL, NULL, 0), *none = NULL;
    char *p = must_have(jemhooks_alloc(arena, 100), "block");
    jemhooks_key key;
    CHECK("refused", jemhooks_get_key(p, &key) == -EOPNOTSUPP && jemhooks_lease(p, NULL) == -EOPNOTSUPP,
          "policy none has keys");
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
        CHECK("limit", region_at(arena, block[i]).length <= 4 * MIB, "a region is larger than max_mr_size");
    }
    for (int i = 0; i < COUNT; i++) MUST(jemhooks_free(block[i]));
    arena_end(arena);
    jemhooks_registrar_close(null);
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    CHECK("refused", jemhooks_arena_create(&config, &none) == -EINVAL && !none,
          "lazy without a registrar was accepted");
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"nth_fails", nth_fails}, {"eager_fails", eager_fails}, {"rails", rails},
                                      {"stranded", stranded},   {"refused", refused},         {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
