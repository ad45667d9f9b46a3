/* lifetime.c - arenas and threads that come and go by the thousand, and leave nothing behind: no memory, no mapping, no
 * file, no cached block.
 *     test_lifetime [case=…] arenas=10000 threads=2000
 * Concurrency: each case starts threads that share arenas, one slot of a table each, and barriers.                   */
#include "check.h"

#include <dlfcn.h>

static jemhooks_registrar *null;
static jemhooks_arena *arena;

typedef struct footprint {
    long rss_kib, mappings, files;
} footprint;

static footprint measure(void) {
    return (footprint){status_kib("VmRSS"), count_mappings(), count_files()};
}

static void check_flat(const char *what, footprint before, long extra_mappings) {
    footprint now = measure();
    CHECK("flat", now.rss_kib <= before.rss_kib + 4096, "%s: %ld KiB resident, %ld before", what,
          now.rss_kib, before.rss_kib);
    CHECK("flat", now.mappings <= before.mappings + 30 + extra_mappings, "%s: %ld mappings, %ld before", what, now.mappings,
          before.mappings);
    CHECK("flat", now.files == before.files, "%s: %ld open files, %ld before", what, now.files, before.files);
}

static void open_arena(unsigned shards) {
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    null = null_open(NULL);
    config.registrars = &null;
    config.registrar_count = 1;
    config.shards = shards;
    arena = arena_of(&config);
}

static void close_arena(void) {
    MUST(jemhooks_trim(arena, NULL));
    check_idle(arena, true);
    jemhooks_stats s = stats_of(arena);
    CHECK("leak", !s.active && !s.dirty && !s.muzzy && !s.committed && !s.allocated,
          "after everything was freed %zu bytes are active, %zu allocated", (size_t)s.active, (size_t)s.allocated);
    arena_end(arena);
    CHECK("errors", !null_stats(null).live && !null_stats(null).errors,
          "the registrar is left with registrations or errors");
    jemhooks_registrar_close(null);
}

/* ---- arenas ------------------------------------------------------------------------------------------------------ */

static void churn(void) {
    long arenas = option("arenas", 10000), warm = arenas / 10;
    footprint before = {0, 0, 0};
    null = null_open(NULL);
    for (long i = 0; i < arenas; i++) {
        if (i == warm) before = measure();
        jemhooks_arena *a = arena_on(NULL, &null, 1);
        jemhooks_key key;
        char *p = must_have(jemhooks_alloc(a, 1000), "block"), *q = must_have(jemhooks_alloc(a, 100 * KIB), "block");
        MUST(jemhooks_get_key(p, &key));
        MUST(jemhooks_free(p));
        MUST(jemhooks_free(q));
        arena_end(a);
    }
    check_flat("after many arenas", before, 0);
    CHECK("errors", !null_stats(null).live && !null_stats(null).errors,
          "the registrar is left with registrations or errors");
    jemhooks_registrar_close(null);
    figure("arenas", (double)arenas);
}

static void *come_and_go(void *arg) {
    for (long i = 0; i < (long)(intptr_t)arg; i++) {
        jemhooks_arena *a = arena_on(NULL, NULL, 0);
        void *p = must_have(jemhooks_alloc(a, 100), "block");
        region_at(a, p);
        MUST(jemhooks_free(p));
        arena_end(a);
    }
    return NULL;
}

/* No arena gets another's memory, though its number was that of one which is just being destroyed. */
static void side_by_side(void) {
    enum { THREADS = 4 };
    pthread_t thread[THREADS];
    long arenas = option("arenas", 10000);
    for (int i = 0; i < THREADS; i++) thread[i] = start_thread(come_and_go, (void *)(intptr_t)arenas);
    for (int i = 0; i < THREADS; i++) join_thread(thread[i]);
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

enum { CROWD = 16 };
static void *left_behind[CROWD];

/* Fills its caches, frees what it made, leaves one block for another thread to free. */
static void *visit(void *arg) {
    size_t me = (size_t)(uintptr_t)arg;
    void *p[64];
    for (size_t i = 0; i < 64; i++) p[i] = must_have(jemhooks_alloc(arena, 16 << i % 12), "block");
    for (size_t i = 0; i < 64; i++) MUST(jemhooks_free(p[i]));
    MUST(jemhooks_free(left_behind[me]));
    left_behind[me] = must_have(jemhooks_alloc(arena, 100 + me), "block");
    return NULL;
}

/* Threads exit with full caches: their blocks are free for all again. */
static void visitors(void) {
    long rounds = option("threads", 2000) / CROWD;
    footprint before = {0, 0, 0};
    long regions = 0;
    open_arena(4);
    for (long round = 0; round < rounds; round++) {
        pthread_t thread[CROWD];
        if (round == rounds / 10) {
            before = measure();
            regions = (long)stats_of(arena).regions;
        }
        for (size_t i = 0; i < CROWD; i++) thread[i] = start_thread(visit, (void *)i);
        for (int i = 0; i < CROWD; i++) join_thread(thread[i]);
    }
    long more = (long)stats_of(arena).regions - regions; /* each with what lies behind its end */
    CHECK("flat", more < 40, "after many threads: %ld more regions", more); /* a shard that was crowded grows once, by steps */
    check_flat("after many threads", before, 2 * more);
    for (int i = 0; i < CROWD; i++) MUST(jemhooks_free(left_behind[i]));
    close_arena();
    figure("threads", (double)(rounds * CROWD));
}

static pthread_key_t late;
static atomic_ulong served, refused;
typedef struct last_will {
    int rounds;
    char *block;
} last_will;

/* Runs when the thread's caches, and jemalloc's own state, may be gone: memory from this arena, or a clean refusal. */
static void late_in_exit(void *arg) {
    last_will *will = arg;
    for (int i = 0; i < 20; i++) {
        jemhooks_key key;
        char *p = i % 2 ? jemhooks_alloc(arena, 100 << i) : jemhooks_calloc(arena, 1, 100 << i);
        atomic_fetch_add(p ? &served : &refused, 1);
        if (!p) {
            CHECK("late", errno == ENOMEM && jemhooks_last_error_kind() == JEMHOOKS_ERROR_MEMORY,
                  "refused with errno %d: %s", errno, jemhooks_last_error());
            continue;
        }
        const jemhooks_region *r = jemhooks_region_of(p);
        if (!CHECK("late", r && r->arena == arena, "a block is not of the arena that it was asked of")) return;
        CHECK("zero", i % 2 || all_zero(p, 100 << i), "a zeroed block is not zero");
        memset(p, 1, 100 << i);
        CHECK("late", !jemhooks_get_key(p, &key) && !jemhooks_free(p), "%s", jemhooks_last_error());
    }
    if (will->block) CHECK("late", !jemhooks_free(will->block), "%s", jemhooks_last_error());
    will->block = NULL;
    CHECK("late", !jemhooks_trim(arena, NULL), "%s", jemhooks_last_error());
    if (--will->rounds) pthread_setspecific(late, will);
    else free(will);
}

static void *die(void *arg) {
    last_will *will = must_have(malloc(sizeof *will), "memory");
    *will = (last_will){4, arg ? must_have(jemhooks_alloc(arena, 5000), "block") : NULL};
    pthread_setspecific(late, will);
    return NULL;
}

static void late_exit(void) {
    open_arena(1);
    pthread_key_create(&late, late_in_exit);
    for (long i = 0; i < 100; i++) join_thread(start_thread(die, i % 2 ? &late : NULL));
    pthread_key_delete(late);
    close_arena();
    figure("late_served", (double)atomic_load(&served));
    figure("late_refused", (double)atomic_load(&refused));
}

/* ---- more threads times arenas than jemalloc has caches -----------------------------------------------------------
 */

enum { THREADS = 25, ARENAS = 200 };
static jemhooks_arena *many[ARENAS];
static char *held[THREADS][ARENAS];
static pthread_barrier_t gate;

static void *use_all(void *arg) {
    size_t me = (size_t)(uintptr_t)arg, next = (me + 1) % THREADS;
    for (size_t i = 0; i < ARENAS; i++) {
        held[me][i] = must_have(jemhooks_alloc(many[i], 500), "block");
        fill(held[me][i], 500, me * ARENAS + i);
    }
    pthread_barrier_wait(&gate);
    for (size_t i = 0; i < ARENAS; i++) {
        CHECK("content", filled(held[next][i], 500, 500, next * ARENAS + i), "a block lost its contents");
        const jemhooks_region *r = jemhooks_region_of(held[next][i]);
        CHECK("caches", r && r->arena == many[i], "a block is not of the arena that it was asked of");
        MUST(jemhooks_free(held[next][i]));
        char *p = must_have(jemhooks_alloc(many[i], 500), "block");
        r = jemhooks_region_of(p);
        CHECK("caches", r && r->arena == many[i], "a block is not of the arena that it was asked of");
        MUST(jemhooks_free(p));
    }
    pthread_barrier_wait(&gate);
    return NULL;
}

static void many_caches(void) {
    pthread_t thread[THREADS];
    for (int round = 0; round < 2; round++) {
        pthread_barrier_init(&gate, NULL, THREADS);
        for (int i = 0; i < ARENAS; i++) many[i] = arena_on(NULL, NULL, 0);
        for (size_t i = 0; i < THREADS; i++) thread[i] = start_thread(use_all, (void *)i);
        for (int i = 0; i < THREADS; i++) join_thread(thread[i]);
        for (int i = 0; i < ARENAS; i++) {
            MUST(jemhooks_trim(many[i], NULL));
            check_idle(many[i], true);
            arena_end(many[i]);
        }
        pthread_barrier_destroy(&gate);
    }
    figure("caches", THREADS * ARENAS);
}

/* ---- an arena destroyed while other threads' caches hold its blocks ------------------------------------------------
 */

static pthread_barrier_t step;

static void *keep_cache(void *arg) {
    void *p[100];
    (void)arg;
    for (int round = 0; round < 20; round++) {
        pthread_barrier_wait(&step);
        for (int i = 0; i < 100; i++) p[i] = must_have(jemhooks_alloc(arena, 50 + 13 * (size_t)i), "block");
        for (int i = 0; i < 100; i++) MUST(jemhooks_free(p[i]));
        pthread_barrier_wait(&step);
    }
    pthread_barrier_wait(&step); /* an exiting thread has no cache */
    return NULL;
}

static void cached_destroy(void) {
    pthread_t thread[4];
    pthread_barrier_init(&step, NULL, 5);
    for (int i = 0; i < 4; i++) thread[i] = start_thread(keep_cache, NULL);
    for (int round = 0; round < 20; round++) {
        open_arena(1);
        pthread_barrier_wait(&step);
        pthread_barrier_wait(&step);
        CHECK("caches", stats_of(arena).active || !jemalloc_at_least(5, 0), "no thread has a cached block");
        arena_end(arena);
        jemhooks_registrar_close(null);
    }
    pthread_barrier_wait(&step);
    for (int i = 0; i < 4; i++) join_thread(thread[i]);
}

/* ---- an arena that a thread is bound to by jemalloc's thread.arena ------------------------------------------------
 * Between bind and unbind the process's own malloc may come from the arena: nothing there may keep a block.         */

typedef int (*control)(const char *, void *, size_t *, void *, size_t);

static control mallctl_of(void) {
    void *found = dlsym(RTLD_DEFAULT, "mallctl"); /* or as --with-jemalloc-prefix=je_ names it */
    if (!found) found = must_have(dlsym(RTLD_DEFAULT, "je_mallctl"), "mallctl");
    control ctl;
    memcpy(&ctl, &found, sizeof ctl); /* ISO C has no cast from object to function pointer */
    return ctl;
}

static void bound(void) {
    control ctl = mallctl_of();
    open_arena(1);
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, 100), "block")));
    MUST(jemhooks_trim(arena, NULL)); /* nothing committed: the thread alone holds it */
    unsigned newest, mine;
    size_t size = sizeof newest;
    MUST(ctl("arenas.narenas", &newest, &size, NULL, 0)); /* ours is the last: no arena was destroyed yet */
    newest--;
    MUST(ctl("thread.arena", &mine, &size, &newest, sizeof newest));
    int rc = jemhooks_arena_destroy(arena);
    MUST(ctl("thread.arena", &newest, &size, &mine, sizeof mine));
    CHECK("bound", rc == -EBUSY && jemhooks_last_error_kind() == JEMHOOKS_ERROR_BUSY &&
          strstr(jemhooks_last_error(), "thread.arena"), "destroy while a thread is bound gave %d: %s", rc,
          jemhooks_last_error());
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, 100), "block after the refusal")));
    close_arena();
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"bound", bound}, /* first, before numbers of destroyed arenas are used again */
                                      {"churn", churn},
                                      {"side_by_side", side_by_side},
                                      {"visitors", visitors},
                                      {"late_exit", late_exit},
                                      {"many_caches", many_caches},
                                      {"cached_destroy", cached_destroy},
                                      {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
