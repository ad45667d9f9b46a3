/* registration.c - registering and leases while others do the same, with the registrar "null" and one that calls back:
 * once however many ask, keys that stay valid while a block lives, leases that hold.
 *     test_registration [case=…] rounds=300
 * Concurrency: `once`, `lasting` and `leased` run several threads, which share atomics only.                        */
#include "check.h"

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
        CHECK("once", null_stats(null).registers == before + 1, "%d threads at the same time registered %zu times",
              ASKERS, (size_t)(null_stats(null).registers - before));
        for (size_t i = 1; i < ASKERS; i++)
            CHECK("once",
                  answer[i].lkey == answer[0].lkey && answer[i].generation == answer[0].generation &&
                      answer[i].addr == answer[0].addr + i,
                  "threads got different keys");
        MUST(jemhooks_free(asked_for));
        MUST(jemhooks_trim(arena, NULL));
    }
    for (int i = 0; i < ASKERS; i++) join_thread(thread[i]);
    arena_end(arena);
    jemhooks_registrar_close(null);
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
    CHECK("lease", key.lkey == first.lkey && key.addr == first.addr + 5 && region_at(arena, p).leases == 3,
          "%u leases are counted, not 3", region_at(arena, p).leases);
    MUST(jemhooks_free(p));
    for (int left = 3; left > 0; left--) {
        CHECK("lease", !jemhooks_trim(arena, &released) && !released, "a trim released %zu leased bytes", released);
        CHECK("lease", !jemhooks_lookup(p, &key) && key.generation == first.generation, "a leased region lost its key");
        CHECK("lease", jemhooks_arena_destroy(arena) == -EBUSY && jemhooks_last_error_kind() == JEMHOOKS_ERROR_BUSY,
              "destroyed with %d leases", left);
        CHECK("lease", region_at(arena, p).leases == (unsigned)left, "%u leases are counted, not %d",
              region_at(arena, p).leases, left);
        MUST(jemhooks_release(p));
    }
    CHECK("lease", jemhooks_release(p) == -EALREADY, "released more often than leased");
    MUST(jemhooks_trim(arena, &released));
    CHECK("lease", released, "a region without leases was not released");
    arena_end(arena);
    jemhooks_registrar_close(null);
}

/* ---- revoked, blocks and leases or not ------------------------------------------------------------------------------ */

static void revoked(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_arena *arena = arena_on(NULL, &null, 1);
    unsigned char *p = must_have(jemhooks_alloc(arena, MIB), "block");
    jemhooks_key first, second, none = {0};
    MUST(jemhooks_revoke(arena)); /* nothing is registered */
    fill(p, MIB, 1);
    MUST(jemhooks_lease(p, &first));
    MUST(jemhooks_revoke(arena));
    CHECK("revoked", jemhooks_lookup(p, &none) == -EAGAIN && !null_stats(null).live && region_at(arena, p).leases == 1,
          "a key outlived its registration");
    CHECK("revoked", filled(p, MIB, MIB, 1), "revoking changed live bytes");
    CHECK("revoked", jemhooks_arena_destroy(arena) == -EBUSY, "a lease counts although its registration was revoked");
    MUST(jemhooks_lease(p, &second));
    CHECK("revoked", region_at(arena, p).leases == 2 && second.lkey != first.lkey && second.generation != first.generation &&
          !jemhooks_lookup(p, &none), "a second lease registers anew");
    CHECK("revoked", filled(p, MIB, MIB, 1), "registering again changed live bytes");
    MUST(jemhooks_release(p));
    MUST(jemhooks_release(p));
    CHECK("revoked", jemhooks_release(p) == -EALREADY, "leases are counted across a revocation");
    MUST(jemhooks_null_fail(null, JEMHOOKS_NULL_DEREGISTER, 1, EIO));
    CHECK("revoked", jemhooks_revoke(arena) == -EIO && !jemhooks_lookup(p, &none) && none.lkey == second.lkey,
          "a registrar that fails to deregister leaves region and key as they were");
    MUST(jemhooks_revoke(arena));
    MUST(jemhooks_free(p));
    CHECK("revoked", jemhooks_revoke(NULL) == -EINVAL, "no arena");
    arena_end(arena);
    jemhooks_registrar_close(null);
}

/* While others ask for keys and take leases: after each revocation every key is new. */
static atomic_bool quiet;
static jemhooks_arena *revocable;

static void *revoke_always(void *arg) {
    (void)arg;
    while (!atomic_load(&quiet)) MUST(jemhooks_revoke(revocable));
    return NULL;
}

static void revoked_under_load(void) {
    jemhooks_registrar *null = null_open(NULL);
    revocable = arena_on(NULL, &null, 1);
    pthread_t thread[2];
    for (int i = 0; i < 2; i++) thread[i] = start_thread(revoke_always, NULL);
    for (long i = 0; i < 20 * option("rounds", 300); i++) {
        jemhooks_key key;
        char *p = must_have(jemhooks_alloc(revocable, 1 + (size_t)i % (3 * MIB)), "block");
        MUST(jemhooks_get_key(p, &key));
        CHECK("revoked", key.addr == (uintptr_t)p && key.lkey, "a key that makes no sense");
        MUST(jemhooks_lease(p, &key));
        MUST(jemhooks_release(p));
        MUST(jemhooks_free(p));
    }
    atomic_store(&quiet, true);
    for (int i = 0; i < 2; i++) join_thread(thread[i]);
    MUST(jemhooks_revoke(revocable));
    CHECK("revoked", !null_stats(null).live && !null_stats(null).errors, "%zu registrations are left",
          (size_t)null_stats(null).live);
    arena_end(revocable);
    jemhooks_registrar_close(null);
}

static atomic_bool stop;
static atomic_ulong trims;
static jemhooks_arena *shared;

/* Trims as fast as it can, which takes away every registration that is not held by a block or a lease. */
static void *trim_always(void *arg) {
    (void)arg;
    for (; !atomic_load(&stop); atomic_fetch_add(&trims, 1))
        CHECK("trim", !jemhooks_trim(shared, NULL), "%s", jemhooks_last_error());
    return NULL;
}

/* While a block lives it keeps its contents and its key: whether a trim has begun before, while its region was empty,
 * or begins now. */
static void *keep_keys(void *arg) {
    size_t size = (size_t)(uintptr_t)arg * MIB;
    dice d = {(uint64_t)(uintptr_t)arg};
    for (long i = 0; i < option("rounds", 300); i++) {
        jemhooks_key key, again;
        char *p = must_have(jemhooks_alloc(shared, size), "block");
        fill(p, PAGE, (uint64_t)i);
        fill(p + size - PAGE, PAGE, (uint64_t)i);
        MUST(jemhooks_get_key(p, &key));
        for (unsigned long now = atomic_load(&trims); atomic_load(&trims) < now + 2;) {
            int rc = jemhooks_lookup(p, &again);
            if (!CHECK("key", !rc && again.generation == key.generation && again.lkey == key.lkey,
                       "the key of a live block changed (look-up gave %d)", rc))
                break;
        }
        CHECK("content", filled(p, PAGE, PAGE, (uint64_t)i) && filled(p + size - PAGE, PAGE, PAGE, (uint64_t)i),
              "a live block lost its contents");
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
            if (!CHECK("lease", !jemhooks_lookup(p, &again) && again.generation == key.generation,
                       "the key of a leased region changed"))
                break;
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
    CHECK("errors", !n.errors && !n.live, "the registrar saw %zu errors and holds %zu registrations", (size_t)n.errors,
          (size_t)n.live);
    figure("registrations", (double)n.registers);
    arena_end(shared);
    jemhooks_registrar_close(null);
}

/* Leases on memory in which no block lives: nothing else keeps its regions. */
static void leased(void) {
    jemhooks_registrar *null = null_open(NULL);
    shared = arena_on(NULL, &null, 1);
    char *p = must_have(jemhooks_alloc(shared, 65 * MIB), "block"),
         *q = must_have(jemhooks_alloc(shared, 65 * MIB), "block");
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
    CHECK("reentry", jemhooks_get_key(meddle_with, &key) == -EDEADLK,
          "a registrar got a key of the region that it works on");
    CHECK("reentry", jemhooks_lease(meddle_with, NULL) == -EDEADLK,
          "a registrar got a lease on the region that it works on");
    CHECK("reentry", jemhooks_lookup(meddle_with, &key) == -EAGAIN, "a region under way has a key");
    CHECK("reentry", !jemhooks_get_key(meddle_elsewhere, &key), "a registrar cannot use another arena: %s",
          jemhooks_last_error());
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
    static const jemhooks_registrar_ops ops = {.size = sizeof ops,
                                               .name = "meddler",
                                               .register_memory = meddling_register,
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

/* ---- what a block holds stays ------------------------------------------------------------------------------------ */

/* Whatever becomes of registrations around it, a block keeps its bytes, zeroed at first or not, and a zeroed one is zero. */
static void keep(int policy, int prepare) {
    enum { BLOCKS = 48 };
    static struct { char *p; size_t size; uint64_t tag; } block[BLOCKS];
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_anonymous_config memory = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    memory.transparent_huge = 0;
    MUST(jemhooks_provider_anonymous(&memory, &config.provider));
    config.registrars = &null;
    config.registrar_count = 1;
    config.policy = policy;
    config.prepare = prepare;
    config.dirty_decay_ms = config.muzzy_decay_ms = 0;
    jemhooks_arena *arena = arena_of(&config);
    dice random = {(uint64_t)(2 * policy + prepare + 1)};
    for (long step = 0; step < 10 * option("rounds", 300); step++) {
        size_t i = roll_below(&random, BLOCKS);
        if (!block[i].p) {
            bool zero = roll_below(&random, 3) == 0;
            block[i].size = 1 + roll_below(&random, roll_below(&random, 4) ? 20000 : 2000000);
            block[i].p = must_have(zero ? jemhooks_calloc(arena, 1, block[i].size) : jemhooks_alloc(arena, block[i].size), "block");
            if (zero) CHECK("zero", all_zero(block[i].p, block[i].size), "a zeroed block of %zu bytes is not zero", block[i].size);
            fill(block[i].p, block[i].size, block[i].tag = (uint64_t)step + 1);
            jemhooks_key key;
            if (!roll_below(&random, 3)) MUST(jemhooks_get_key(block[i].p, &key));
        } else {
            CHECK("bytes", filled(block[i].p, block[i].size, block[i].size, block[i].tag), "a block of %zu bytes lost some", block[i].size);
            MUST(jemhooks_free(block[i].p));
            block[i].p = NULL;
        }
        if (!roll_below(&random, 20)) MUST(jemhooks_revoke(arena));
        if (!roll_below(&random, 20)) MUST(jemhooks_trim(arena, NULL));
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        if (!block[i].p) continue;
        CHECK("bytes", filled(block[i].p, block[i].size, block[i].size, block[i].tag), "a block of %zu bytes lost some", block[i].size);
        MUST(jemhooks_free(block[i].p));
        block[i].p = NULL;
    }
    arena_end(arena);
    jemhooks_provider_close(config.provider);
    jemhooks_registrar_close(null);
}

static void kept(void) {
    for (int policy = JEMHOOKS_LAZY; policy <= JEMHOOKS_EAGER; policy++)
        for (int prepare = 0; prepare < 2; prepare++) keep(policy, prepare);
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"once", once},     {"leases", leases},   {"lasting", lasting},
                                      {"leased", leased}, {"reentry", reentry}, {"revoked", revoked},
                                      {"revoked_under_load", revoked_under_load}, {"kept", kept}, {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
