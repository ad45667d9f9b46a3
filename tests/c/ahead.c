/* ahead.c - regions made ready ahead: no allocation registers in the steady state, no budget is exceeded, and the thread that
 * does it ends with its arena, with the process, and is not missed in a forked child.
 *     test_ahead [case=…] rounds=200
 * Concurrency: the arena's own thread tells `note` of registrations; atomics are all that is shared.                */
#include "check.h"

#include <dirent.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_long here, elsewhere; /* registrations on the test's thread, and on others */
static pid_t me;

static void note(void *self, const jemhooks_event *event) {
    (void)self, (void)event;
    atomic_fetch_add((pid_t)syscall(SYS_gettid) == me ? &here : &elsewhere, 1);
}

static jemhooks_config config_with(jemhooks_registrar *const *registrar, int policy) {
    jemhooks_config c = JEMHOOKS_CONFIG_INIT;
    c.registrars = registrar;
    c.registrar_count = policy == JEMHOOKS_NONE ? 0 : 1;
    c.policy = policy;
    c.prepare = JEMHOOKS_PREPARE_AHEAD;
    c.region_max = 8 * MIB;
    return c;
}

/* Is there a region that nothing was carved from yet, registered? */
static bool ready(jemhooks_arena *arena) {
    size_t count, fresh = 0;
    jemhooks_region_info *r = regions_of(arena, &count);
    for (size_t i = 0; i < count; i++) fresh += !r[i].committed && r[i].state == JEMHOOKS_REGISTERED;
    free(r);
    return fresh;
}

static bool mapped(jemhooks_arena *arena) {
    MUST(jemhooks_wait_ready(arena));
    return stats_of(arena).mapped;
}

static size_t threads(void) {
    DIR *d = opendir("/proc/self/task");
    size_t n = 0;
    while (readdir(d)) n++;
    closedir(d);
    return n - 2; /* . and .. */
}

/* ---- the steady state -------------------------------------------------------------------------------------------- */

static void steady(void) {
    static char *block[400];
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    jemhooks_arena *arena = arena_of(&c);
    jemhooks_subscription *s;
    me = (pid_t)syscall(SYS_gettid);
    atomic_store(&here, 0);
    atomic_store(&elsewhere, 0);
    MUST(jemhooks_subscribe(arena, JEMHOOKS_ON_REGISTER, note, NULL, &s));
    for (int i = 0; i < 400; i++) {
        MUST(jemhooks_wait_ready(arena));
        if (!i) CHECK("ahead", ready(arena), "no region was made ready");
        block[i] = must_have(jemhooks_alloc(arena, 256 * KIB), "block");
        jemhooks_key key;
        CHECK("ahead", !jemhooks_lookup(block[i], &key), "an eager block has no key");
        fill(block[i], 256 * KIB, (uint64_t)i + 1);
    }
    for (int i = 0; i < 400; i++) CHECK("bytes", filled(block[i], 256 * KIB, 256 * KIB, (uint64_t)i + 1), "block %d has other bytes", i);
    CHECK("ahead", !atomic_load(&here), "%ld registrations were waited for by allocations", atomic_load(&here));
    CHECK("ahead", atomic_load(&elsewhere) >= 2, "only %ld regions were made ready", atomic_load(&elsewhere));
    figure("regions", (double)stats_of(arena).regions);
    CHECK("growth", stats_of(arena).mapped < 400 * MIB, "%zu bytes are mapped for 100 MiB", (size_t)stats_of(arena).mapped);
    for (int i = 0; i < 400; i++) MUST(jemhooks_free(block[i]));
    MUST(jemhooks_trim(arena, NULL));
    MUST(jemhooks_unsubscribe(s));
    arena_end(arena);
    jemhooks_registrar_close(null);
}

/* What a peer may have written to a region before it came into use is not what calloc() gives. */
static void zeroes(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    jemhooks_arena *arena = arena_of(&c);
    size_t count;
    CHECK("ahead", (!jemhooks_wait_ready(arena) && ready(arena)), "no region was made ready");
    for (int round = 0; round < 8; round++) {
        jemhooks_region_info *r = regions_of(arena, &count);
        for (size_t i = 0; i < count; i++)
            if (!r[i].committed) memset((void *)(uintptr_t)r[i].base, 0xAA, r[i].length); /* as a device would */
        free(r);
        char *p = must_have(jemhooks_calloc(arena, 1, MIB), "block");
        CHECK("zero", all_zero(p, MIB), "calloc gave bytes that a peer had written");
        char *q = must_have(jemhooks_alloc(arena, MIB), "block");
        memset(q, 0xBB, MIB);
        MUST(jemhooks_free(q));
        if (round % 2) MUST(jemhooks_trim(arena, NULL));
        q = must_have(jemhooks_calloc(arena, 1, MIB), "block");
        CHECK("zero", all_zero(q, MIB), "calloc gave bytes of an earlier block");
        memset(q, 0xCC, MIB);
        MUST(jemhooks_free(q));
        memset(p, 0xDD, MIB);
        MUST(jemhooks_free(p));
    }
    arena_end(arena);
    jemhooks_registrar_close(null);
}

static void without_registrar(void) {
    jemhooks_config c = config_with(NULL, JEMHOOKS_NONE);
    jemhooks_arena *arena = arena_of(&c);
    CHECK("ahead", mapped(arena), "no region was mapped ahead");
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, MIB), "block")));
    arena_end(arena);
}

/* ---- limits ------------------------------------------------------------------------------------------------------ */

static void within_budget(void) {
    char *block[16];
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    c.pin_limit = 8 * MIB;
    jemhooks_arena *arena = arena_of(&c);
    CHECK("ahead", (!jemhooks_wait_ready(arena) && ready(arena)), "no region was made ready, though the budget has room");
    int n = 0;
    while (n < 16 && (block[n] = jemhooks_alloc(arena, 1500 * KIB))) n++;
    CHECK("budget", n >= 4 && n < 16 && jemhooks_last_error_kind() == JEMHOOKS_ERROR_PIN_LIMIT, "%d blocks of 1.5 MiB in 8 MiB: %s", n,
          jemhooks_last_error());
    CHECK("budget", stats_of(arena).registered_peak <= 8 * MIB, "%zu bytes were registered at a time",
          (size_t)stats_of(arena).registered_peak);
    while (n) MUST(jemhooks_free(block[--n]));
    MUST(jemhooks_trim(arena, NULL));
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, MIB), "block")));
    arena_end(arena);
    jemhooks_registrar_close(null);
}

/* A budget that two rails share: what it has no room for is not even mapped. */
static void two_rails(void) {
    jemhooks_registrar *rail[2] = {null_open(NULL), null_open(NULL)};
    jemhooks_budget *budget;
    MUST(jemhooks_budget_create(JEMHOOKS_UNLIMITED, 3, &budget));
    for (int i = 0; i < 2; i++) MUST(jemhooks_registrar_set_budget(rail[i], budget));
    jemhooks_config c = config_with(rail, JEMHOOKS_EAGER);
    c.registrar_count = 2;
    jemhooks_arena *arena = arena_of(&c);
    char *p = must_have(jemhooks_alloc(arena, 64), "block");
    for (int i = 0; i < 10; i++) MUST(jemhooks_wait_ready(arena));
    CHECK("budget", stats_of(arena).regions <= 2, "%zu regions are mapped, and one can be registered", (size_t)stats_of(arena).regions);
    MUST(jemhooks_free(p));
    arena_end(arena);
    for (int i = 0; i < 2; i++) jemhooks_registrar_close(rail[i]);
    jemhooks_budget_close(budget);
}

/* What cannot be registered ahead is an error of whoever uses it, and only his. */
static void refused_ahead(void) {
    jemhooks_null_config n = JEMHOOKS_NULL_CONFIG_INIT;
    n.fail_at = 1;
    n.fail_errno = EPERM;
    jemhooks_registrar *null = null_open(&n);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    jemhooks_arena *arena = arena_of(&c);
    CHECK("ahead", mapped(arena), "no region was mapped ahead");
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, MIB), "block")));
    arena_end(arena);
    jemhooks_registrar_close(null);
}

static int never(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    (void)self, (void)address, (void)length, (void)access, (void)mr;
    return -EPERM;
}

static int nor_this(void *self, jemhooks_mr *mr) {
    (void)self, (void)mr;
    return 0;
}

static void bad_configs(void) {
    jemhooks_registrar *null = null_open(NULL), *shy;
    jemhooks_registrar_ops ops = {.size = sizeof ops, .name = "shy", .register_memory = never, .deregister_memory = nor_this,
                                  .not_in_free = 1};
    MUST(jemhooks_registrar_create(&ops, NULL, &shy));
    jemhooks_arena *arena = NULL;
    jemhooks_config c = config_with(&shy, JEMHOOKS_LAZY);
    CHECK("bad", jemhooks_arena_create(&c, &arena) == -EINVAL && strstr(jemhooks_last_error(), "shy"), "a registrar for the caller's "
          "threads: %s", jemhooks_last_error());
    c = config_with(&null, JEMHOOKS_LAZY);
    c.prepare = 2;
    CHECK("bad", jemhooks_arena_create(&c, &arena) == -EINVAL && !arena, "prepare 2 was taken");
    jemhooks_registrar_close(shy);
    jemhooks_registrar_close(null);
}

/* ---- time passes ------------------------------------------------------------------------------------------------- */

/* Nobody calls anything: the thread looks after idle regions, and lets free pages age. */
static void expires(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_LAZY);
    c.idle_ttl_ms = 50;
    c.dirty_decay_ms = c.muzzy_decay_ms = 50;
    jemhooks_arena *arena = arena_of(&c);
    char *p = must_have(jemhooks_alloc(arena, MIB), "block");
    jemhooks_key key;
    MUST(jemhooks_get_key(p, &key));
    MUST(jemhooks_free(p));
    uint64_t before = stats_of(arena).evictions;
    bool gone = false;
    for (time_t end = time(NULL) + 30; !gone && time(NULL) < end; sched_yield()) gone = stats_of(arena).evictions > before;
    CHECK("expires", gone, "an idle region was not deregistered, with idle_ttl 50 ms");
    arena_end(arena);
    CHECK("expires", !null_stats(null).live, "registrations are left");
    jemhooks_registrar_close(null);
}

/* ---- ends -------------------------------------------------------------------------------------------------------- */

static void ends(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    arena_end(arena_of(&c));
    size_t before = threads(); /* a sanitizer's own one included */
    for (long round = 0; round < option("rounds", 200); round++) {
        jemhooks_arena *arena = arena_of(&c);
        char *p = round % 3 ? must_have(jemhooks_alloc(arena, (1 + (size_t)round % 5) * MIB), "block") : NULL;
        if (p && round % 5 == 1)
            CHECK("ends", jemhooks_arena_destroy(arena) == -EBUSY, "an arena with a block was destroyed");
        if (p) MUST(jemhooks_free(p));
        arena_end(arena);
    }
    for (time_t end = time(NULL) + 30; threads() > before && time(NULL) < end;) sched_yield(); /* joined, but still listed */
    CHECK("ends", threads() <= before, "%zu threads are left of %ld arenas", threads() - before, option("rounds", 200));
    CHECK("ends", !null_stats(null).live && !null_stats(null).errors, "%zu registrations are left", (size_t)null_stats(null).live);
    jemhooks_registrar_close(null);
}

/* A refused end leaves the thread at work. */
static void busy(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    jemhooks_arena *arena = arena_of(&c);
    char *p = must_have(jemhooks_alloc(arena, 64), "block");
    CHECK("busy", jemhooks_arena_destroy(arena) == -EBUSY, "an arena with a block was destroyed");
    char *block[64];
    uint64_t before = stats_of(arena).regions;
    for (int i = 0; i < 64; i++) block[i] = must_have(jemhooks_alloc(arena, 512 * KIB), "block");
    MUST(jemhooks_wait_ready(arena));
    CHECK("busy", stats_of(arena).regions > before, "nothing is made ready any more");
    for (int i = 0; i < 64; i++) MUST(jemhooks_free(block[i]));
    MUST(jemhooks_free(p));
    arena_end(arena);
    jemhooks_registrar_close(null);
}

static jemhooks_arena *inherited;

static void child(void) {
    CHECK("child", !jemhooks_alloc(inherited, 10) && jemhooks_last_error_kind() == JEMHOOKS_ERROR_FORK, "the parent's arena can be used");
    CHECK("child", threads() == 1, "the child has %zu threads", threads());
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    jemhooks_arena *arena = arena_of(&c);
    CHECK("child", (!jemhooks_wait_ready(arena) && ready(arena)), "nothing is made ready in the child");
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, MIB), "block")));
    arena_end(arena);
    jemhooks_registrar_close(null);
}

static void forked(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    inherited = arena_of(&c);
    char *block[200];
    for (int i = 0; i < 10; i++) {
        for (int j = 0; j < 20; j++) block[20 * i + j] = must_have(jemhooks_alloc(inherited, 300 * KIB), "block");
        in_child("ahead", child);
    }
    uint64_t before = stats_of(inherited).regions;
    char *large[40];
    for (int i = 0; i < 40; i++) large[i] = must_have(jemhooks_alloc(inherited, 2 * MIB), "block");
    MUST(jemhooks_wait_ready(inherited));
    CHECK("child", stats_of(inherited).regions > before, "after forks nothing is made ready in "
          "the parent");
    for (int i = 0; i < 40; i++) MUST(jemhooks_free(large[i]));
    for (int i = 0; i < 200; i++) MUST(jemhooks_free(block[i]));
    arena_end(inherited);
    jemhooks_registrar_close(null);
}

static void make_another(void *self, const jemhooks_event *event) {
    (void)event;
    jemhooks_config c = config_with(NULL, JEMHOOKS_NONE);
    jemhooks_arena *another;
    if (!jemhooks_arena_create(&c, &another)) *(jemhooks_arena **)self = another;
}

/* exit() while a subscriber on the arena's thread makes such an arena itself. */
static void exit_in_subscriber(void) {
    static jemhooks_arena *another;
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_subscription *s;
    MUST(jemhooks_subscribe(NULL, JEMHOOKS_ON_REGISTER, make_another, &another, &s));
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    arena_of(&c);
    exit(anything_violated());
}

/* exit() with arenas at work, in the parent of such a child and in the child. Runs in processes of its own. */
static void exit_now(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    for (int i = 0; i < 8; i++) jemhooks_alloc(arena_of(&c), 100);
    exit(anything_violated());
}

static void fork_and_exit(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config c = config_with(&null, JEMHOOKS_EAGER);
    jemhooks_alloc(arena_of(&c), 100);
    in_child("exit", exit_now);
    exit_now();
}

static void exits(void) {
    for (int i = 0; i < 10; i++) {
        in_child("exit", exit_now);
        in_child("exit", exit_in_subscriber);
        in_child("exit", fork_and_exit);
    }
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"steady", steady},
                                      {"zeroes", zeroes},
                                      {"without_registrar", without_registrar},
                                      {"within_budget", within_budget},
                                      {"two_rails", two_rails},
                                      {"refused_ahead", refused_ahead},
                                      {"bad_configs", bad_configs},
                                      {"expires", expires},
                                      {"ends", ends},
                                      {"busy", busy},
                                      {"forked", forked},
                                      {"exits", exits},
                                      {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
