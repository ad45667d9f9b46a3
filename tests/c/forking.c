/* forking.c - forked children: what the parent made is frozen there and unharmed afterwards, what the child makes
 * works, and no fork hangs, whatever the parent's other threads are doing.
 *     test_forking [case=…] forks=300
 * Concurrency: `busy` forks while three threads work; everything else is one thread.                                */
#include "check.h"
#include "jemhooks_uring.h"

#include <semaphore.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

static jemhooks_registrar *null;
static jemhooks_arena *arena;
static char *block, *other;
static jemhooks_key key;

/* ---- frozen ------------------------------------------------------------------------------------------------------ */

static void expect_frozen(const char *what, bool refused) {
    CHECK("frozen", refused && errno == ECHILD && jemhooks_last_error_kind() == JEMHOOKS_ERROR_FORK,
          "%s in a child: errno %d, '%s'", what, errno, jemhooks_last_error());
    errno = 0;
}

/* An arena of the child's own, with everything that there is. */
static void live_on(void) {
    jemhooks_registrar *mine = null_open(NULL);
    jemhooks_arena *a = arena_on(NULL, &mine, 1);
    char *p = must_have(jemhooks_alloc(a, 100 * KIB), "block"), *q = must_have(jemhooks_calloc(a, 10, 300), "block");
    jemhooks_key k;
    CHECK("child", all_zero(q, 3000) && !jemhooks_get_key(p, &k) && k.addr == (uintptr_t)p,
          "a child's own arena does not work");
    p = must_have(jemhooks_realloc(a, p, MIB), "larger block");
    memset(p, 1, MIB);
    MUST(jemhooks_lease(q, &k));
    MUST(jemhooks_release(q));
    MUST(jemhooks_free(p));
    MUST(jemhooks_free(q));
    MUST(jemhooks_trim(a, NULL));
    check_idle(a, false);
    arena_end(a);
    CHECK("child", !null_stats(mine).live && !null_stats(mine).errors,
          "a child's registrar is left with registrations or errors");
    jemhooks_registrar_close(mine);
}

static void grandchild(void) {
    expect_frozen("alloc", !jemhooks_alloc(arena, 10));
    live_on();
}

static void child(void) {
    jemhooks_key k;
    jemhooks_stats stats = {.size = sizeof stats};
    size_t count = 0, done = 1;
    uint64_t address = (uintptr_t)block;
    expect_frozen("alloc", !jemhooks_alloc(arena, 10));
    expect_frozen("calloc", !jemhooks_calloc(arena, 10, 10));
    expect_frozen("aligned_alloc", !jemhooks_aligned_alloc(arena, 4096, 10));
    expect_frozen("realloc", !jemhooks_realloc(arena, block, 2 * MIB));
    expect_frozen("realloc to the same size", !jemhooks_realloc(arena, block, MIB));
    expect_frozen("get_key", jemhooks_get_key(block, &k) == -ECHILD);
    expect_frozen("get_keys", jemhooks_get_keys(1, &address, &k, &done) == -ECHILD && !done);
    expect_frozen("get_rail_key", jemhooks_get_rail_key(block, 0, &k) == -ECHILD);
    expect_frozen("lease", jemhooks_lease(block, &k) == -ECHILD);
    expect_frozen("release", jemhooks_release(block) == -ECHILD);
    expect_frozen("trim", jemhooks_trim(arena, NULL) == -ECHILD);
    expect_frozen("regions", jemhooks_regions(arena, NULL, &count) == -ECHILD);
    expect_frozen("get_stats", jemhooks_get_stats(arena, &stats) == -ECHILD);
    expect_frozen("destroy", jemhooks_arena_destroy(arena) == -ECHILD);
    CHECK("frozen", !jemhooks_usable_size(block), "a frozen block has a usable size");
    CHECK("content", filled(block, MIB, MIB, 1) && filled(other, 200, 200, 2),
          "a child cannot read its parent's blocks");
    for (int i = 0; i < 2; i++)
        CHECK("frozen", !jemhooks_free(block) && !jemhooks_free(other) && !jemhooks_free_sized(other, 200),
              "free in a child failed: %s", jemhooks_last_error());
    CHECK("content", filled(block, MIB, MIB, 1) && filled(other, 200, 200, 2), "free in a child touched the block");
    live_on();
    CHECK("content", filled(block, MIB, MIB, 1) && filled(other, 200, 200, 2),
          "a child's own arena touched the parent's blocks");
    in_child("a grandchild", grandchild);
}

static void check_parent(void) {
    jemhooks_key k;
    CHECK("parent", filled(block, MIB, MIB, 1) && filled(other, 200, 200, 2), "a child changed its parent's blocks");
    CHECK("parent", !jemhooks_lookup(block, &k) && k.generation == key.generation && k.lkey == key.lkey,
          "a child changed its parent's key");
    char *p = jemhooks_calloc(arena, 1, 2 * MIB);
    CHECK("parent", p && all_zero(p, 2 * MIB), "the parent's arena does not go on");
    MUST(jemhooks_free(p));
    size_t registered = 0;
    check_arena(arena, 64 * MIB, 0, &registered);
}

static void end_parent(void) {
    MUST(jemhooks_release(block));
    MUST(jemhooks_free(block));
    MUST(jemhooks_free(other));
    MUST(jemhooks_trim(arena, NULL));
    arena_end(arena);
}

static void make_blocks(void) {
    block = must_have(jemhooks_alloc(arena, MIB), "block");
    other = must_have(jemhooks_alloc(arena, 200), "block");
    fill(block, MIB, 1);
    fill(other, 200, 2);
    MUST(jemhooks_lease(block, &key));
}

static void frozen(void) {
    null = null_open(NULL);
    arena = arena_on(NULL, &null, 1);
    make_blocks();
    uint64_t live = null_stats(null).live;
    for (int i = 0; i < 3; i++) {
        in_child("a child", child);
        check_parent();
    }
    CHECK("parent", null_stats(null).live == live && !null_stats(null).errors,
          "a child changed its parent's registrations");
    end_parent();
    jemhooks_registrar_close(null);
}

/* The parent's range is shared with the child: what the child does to its pages, the parent sees. */
static void shared_range(void) {
    const size_t length = 16 * MIB;
    char *base =
        must_have(mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), "shared memory");
    jemhooks_provider *provider = fixed_range(base, length, true, true);
    null = null_open(NULL);
    arena = arena_on(provider, &null, 1);
    make_blocks();
    char *before = must_have(malloc(length), "copy");
    memcpy(before, base, length);
    in_child("a child with shared memory", child);
    CHECK("parent", !memcmp(before, base, length), "a child wrote to its parent's memory");
    end_parent();
    free(before);
    jemhooks_provider_close(provider);
    jemhooks_registrar_close(null);
    munmap(base, length);
}

/* ---- a registrar that the child shares --------------------------------------------------------------------------- */

static jemhooks_registrar *uring;

static void close_all(void) {
    jemhooks_registrar_close(uring);
    jemhooks_free(block);
    CHECK("frozen", jemhooks_arena_destroy(arena) == -ECHILD, "a child destroyed its parent's arena");
    live_on();
}

/* The parent's memory stays pinned, and its device goes on, whatever a child closes and frees. */
static void pinned(void) {
    int file = memfd_create("pattern", 0);
    char *pattern = must_have(malloc(MIB), "pattern");
    memset(pattern, 0x5A, MIB);
    CHECK("setup", pwrite(file, pattern, MIB, 0) == (ssize_t)MIB, "a pattern file");
    MUST(jemhooks_registrar_open("uring", NULL, &uring));
    jemhooks_anonymous_config pages = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    jemhooks_provider *provider;
    pages.transparent_huge = 0;
    MUST(jemhooks_provider_anonymous(&pages, &provider));
    arena = arena_on(provider, &uring, 1);
    make_blocks();
    size_t registered = stats_of(arena).registered;
    for (int i = 0; i < 3; i++) {
        in_child("a child that closes everything", close_all);
        check_parent();
        check_pinned("after a child has ended", registered);
        const jemhooks_region *r = jemhooks_region_of(block);
        jemhooks_uring_transfer t = {
            .fd = file, .slot = (uint32_t)key.lkey, .base = r->base, .address = (uintptr_t)block, .length = MIB};
        CHECK("device", jemhooks_uring_read(uring, &t) == (int64_t)MIB, "%s", jemhooks_last_error());
        CHECK("stale", !memcmp(block, pattern, MIB),
              "after a child has ended the CPU does not see what the device writes");
        fill(block, MIB, 1);
    }
    end_parent();
    check_pinned("after destroy", 0);
    jemhooks_registrar_close(uring);
    jemhooks_provider_close(provider);
    close(file);
    free(pattern);
}

/* ---- forks at any moment ------------------------------------------------------------------------------------------
 */

static atomic_bool stop;
static atomic_ulong operations;

static void *allocate(void *arg) {
    enum { COUNT = 200 };
    char *p[COUNT] = {NULL};
    dice d = {(uint64_t)(uintptr_t)arg};
    while (!atomic_load(&stop)) {
        size_t k = roll_below(&d, COUNT);
        if (p[k]) {
            MUST(jemhooks_free(p[k]));
            p[k] = NULL;
        } else {
            size_t size = (size_t)1 << roll_below(&d, 21);
            jemhooks_key any;
            p[k] =
                must_have(roll_below(&d, 2) ? jemhooks_alloc(arena, size) : jemhooks_calloc(arena, 1, size), "block");
            if (!roll_below(&d, 4)) MUST(jemhooks_get_key(p[k], &any));
        }
        atomic_fetch_add(&operations, 1);
    }
    for (int k = 0; k < COUNT; k++) MUST(jemhooks_free(p[k]));
    return NULL;
}

static void *come_and_go(void *arg) {
    (void)arg;
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, 100), "block")));
    return NULL;
}

/* Arenas, threads and registrations that come and go. */
static void *make_and_end(void *arg) {
    (void)arg;
    while (!atomic_load(&stop)) {
        jemhooks_arena *a = arena_on(NULL, &null, 1);
        jemhooks_key any;
        char *p = must_have(jemhooks_alloc(a, 3 * MIB), "block");
        MUST(jemhooks_get_key(p, &any));
        MUST(jemhooks_free(p));
        MUST(jemhooks_trim(a, NULL));
        arena_end(a);
        MUST(jemhooks_trim(arena, NULL));
        join_thread(start_thread(come_and_go, NULL));
        atomic_fetch_add(&operations, 1);
    }
    return NULL;
}

static void busy_child(void) {
    expect_frozen("alloc", !jemhooks_alloc(arena, 10));
    live_on();
}

static void busy(void) {
    null = null_open(NULL);
    arena = arena_on(NULL, &null, 1);
    pthread_t thread[3];
    for (long i = 0; i < 2; i++) thread[i] = start_thread(allocate, (void *)(intptr_t)(i + 1));
    thread[2] = start_thread(make_and_end, NULL);
    for (long i = 0; i < option("forks", 300); i++) in_child("a child of a busy parent", busy_child);
    atomic_store(&stop, true);
    for (int i = 0; i < 3; i++) join_thread(thread[i]);
    size_t registered = 0;
    check_arena(arena, 64 * MIB, 0, &registered);
    MUST(jemhooks_trim(arena, NULL));
    check_idle(arena, true);
    arena_end(arena);
    jemhooks_null_stats n = null_stats(null);
    CHECK("errors", !n.errors && !n.live, "the registrar saw %zu errors and holds %zu registrations", (size_t)n.errors,
          (size_t)n.live);
    figure("forks", (double)option("forks", 300));
    figure("meanwhile", (double)atomic_load(&operations));
    jemhooks_registrar_close(null);
}

/* ---- forks while the allocator learns of new addresses ------------------------------------------------------------- */

enum { APART = 16 };
#define GIB ((size_t)1 << 30)

/* 2 MiB in each of APART GiB where nothing was before: jemalloc's tree of addresses has a node for each GiB. */
typedef struct far_apart {
    jemhooks_range range[APART];
    jemhooks_provider *provider;
    jemhooks_arena *arena;
} far_apart;

static void make_far_apart(far_apart *f) {
    static atomic_ulong next = (size_t)1 << 44;
    char *base = (char *)atomic_fetch_add(&next, APART * GIB);
    for (int i = 0; i < APART; i++, base += GIB) {
        f->range[i] = (jemhooks_range){base, SLOT};
        void *p = mmap(base, SLOT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        CHECK("setup", p == base, "memory at %p", (void *)base);
    }
    jemhooks_fixed_config config = JEMHOOKS_FIXED_CONFIG_INIT;
    config.ranges = f->range;
    config.range_count = APART;
    config.zeroed = 1;
    MUST(jemhooks_provider_fixed(&config, &f->provider));
    f->arena = arena_on(f->provider, NULL, 0);
}

static void fill_and_end(far_apart *f) {
    char *p[APART];
    for (int i = 0; i < APART; i++) p[i] = must_have(jemhooks_alloc(f->arena, MIB), "block");
    for (int i = 0; i < APART; i++) MUST(jemhooks_free(p[i]));
    arena_end(f->arena);
    jemhooks_provider_close(f->provider);
    for (int i = 0; i < APART; i++) munmap(f->range[i].base, SLOT);
}

static sem_t ready, go;

static void *grow(void *arg) {
    (void)arg;
    while (!atomic_load(&stop)) {
        far_apart f;
        make_far_apart(&f);
        sem_post(&ready);
        sem_wait(&go);
        fill_and_end(&f);
    }
    return NULL;
}

static void growing_child(void) {
    far_apart f;
    make_far_apart(&f);
    fill_and_end(&f);
}

static void growing(void) {
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0); /* a node is 2 MiB, of which a page or two are used */
    sem_init(&ready, 0, 0);
    sem_init(&go, 0, 0);
    atomic_store(&stop, false);
    pthread_t thread = start_thread(grow, NULL);
    for (long i = 0; i < option("forks", 300) && !anything_violated(); i++) {
        sem_wait(&ready);
        sem_post(&go);
        in_child("a child of a growing parent", growing_child);
    }
    atomic_store(&stop, true);
    sem_post(&go);
    join_thread(thread);
}

int main(int argc, char **argv) {
    static const test_case cases[] = {
        {"frozen", frozen}, {"shared_range", shared_range}, {"pinned", pinned}, {"busy", busy}, {"growing", growing}, {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
