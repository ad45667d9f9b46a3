/* lookup.c - from addresses to regions and keys: every kind of address, regions inside regions, many small ones in one
 * 2 MiB slot, and readers that must never mix two registrations while writers change them.
 *     test_lookup [case=…] seed=1 rounds=3000 readers=2
 * Concurrency: the cases `readers` and `crowd` run several threads; their shared state is atomic.                    */
#include "check.h"

#include <sys/mman.h>

#define HELD (16 * MIB)

/* ---- any address ------------------------------------------------------------------------------------------------- */

static void expect(const char *where, const void *p, const jemhooks_region *region) {
    jemhooks_key key;
    const jemhooks_region *found = jemhooks_region_of(p);
    CHECK("lookup", found == region && jemhooks_find_region(p) == region, "%s, %p, is in region %p, not %p", where, p,
          (const void *)found, (const void *)region);
    if (!region)
        CHECK("lookup", jemhooks_lookup(p, &key) == -ENOENT && jemhooks_get_key(p, &key) == -ENOENT, "%s has a key",
              where);
}

static void addresses(void) {
    static int foreign_static;
    int foreign_stack;
    void *foreign_heap = must_have(malloc(100), "memory"), *huge = map_aligned(4 * MIB, PROT_NONE);
    expect("an address before the first arena", huge, NULL);
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_arena *arena = arena_on(NULL, &null, 1);
    char *p = must_have(jemhooks_alloc(arena, 3 * MIB), "block");
    const jemhooks_region *r = must_have(jemhooks_region_of(p), "region");
    uintptr_t base = r->base, end = base + r->length;
    jemhooks_key key;
    expect("the first byte", (void *)base, r);
    expect("the last byte", (void *)(end - 1), r);
    expect("one past the last byte", (void *)end, NULL);
    expect("one before the first byte", (void *)(base - 1), NULL);
    expect("the heap", foreign_heap, NULL);
    expect("the stack", &foreign_stack, NULL);
    expect("static memory", &foreign_static, NULL);
    expect("someone's mapping", huge, NULL);
    expect("NULL", NULL, NULL);
    expect("a kernel address", (void *)0xffff800000000000, NULL);
    expect("the highest address", (void *)UINTPTR_MAX, NULL);
    expect("2^48", (void *)((uintptr_t)1 << 48), NULL);
    expect("2^48 - 1", (void *)(((uintptr_t)1 << 48) - 1), NULL);
    MUST(jemhooks_get_key((void *)(end - 1), &key));
    CHECK("lookup", key.length == 1 && key.addr == end - 1, "the key of the last byte reaches %zu bytes",
          (size_t)key.length);
    CHECK("foreign",
          jemhooks_free(foreign_heap) == -ENOENT && jemhooks_free(&foreign_stack) == -ENOENT &&
              jemhooks_free_sized(&foreign_static, 4) == -ENOENT && !jemhooks_usable_size(foreign_heap) &&
              !jemhooks_realloc(arena, foreign_heap, 10) && errno == ENOENT &&
              jemhooks_lease(&foreign_stack, NULL) == -ENOENT && jemhooks_release(foreign_heap) == -ENOENT,
          "a foreign address was not refused");
    CHECK("foreign", !jemhooks_free(NULL), "free of NULL failed");
    MUST(jemhooks_free(p));
    arena_end(arena);
    expect("a destroyed region's first byte", (void *)base, NULL);
    expect("a destroyed region's last byte", (void *)(end - 1), NULL);
    jemhooks_registrar_close(null);
    free(foreign_heap);
    munmap(huge, 4 * MIB);
}

/* ---- regions inside regions -------------------------------------------------------------------------------------- */

/* NULL where it may not be. */
static jemhooks_arena *try_arena_in(char *base, size_t length) {
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    jemhooks_arena *arena;
    config.provider = fixed_range(base, length, false, false);
    config.policy = JEMHOOKS_NONE;
    int rc = jemhooks_arena_create(&config, &arena);
    jemhooks_provider_close(config.provider);
    CHECK("lookup", !rc || rc == -EEXIST, "a range was refused with %d: %s", rc, jemhooks_last_error());
    return rc ? NULL : arena;
}

static jemhooks_arena *arena_in(char *base, size_t length) {
    return must_have(try_arena_in(base, length), "arena in a range");
}

static jemhooks_arena *owner_of(const void *p) {
    const jemhooks_region *r = jemhooks_region_of(p);
    return r ? r->arena : NULL;
}

/* A fixed range in a block of one arena, and another in a block of that. */
static void nested_blocks(void) {
    jemhooks_arena *a = arena_on(NULL, NULL, 0);
    char *outer = must_have(jemhooks_alloc(a, 16 * MIB), "block");
    jemhooks_arena *b = arena_in(outer + 5 * PAGE, 9 * MIB);
    char *middle = must_have(jemhooks_alloc(b, 4 * MIB), "block");
    jemhooks_arena *c = arena_in(middle + 3 * PAGE, MIB);
    char *inner = must_have(jemhooks_alloc(c, 64 * KIB), "block");
    CHECK("nested",
          owner_of(inner) == c && owner_of(middle) == b && owner_of(outer) == a &&
              owner_of(middle + 4 * MIB - 1) == b && owner_of(outer + 16 * MIB - 1) == a,
          "an address is not in its innermost region");
    CHECK("nested", jemhooks_arena_destroy(a) == -EBUSY && jemhooks_arena_destroy(b) == -EBUSY,
          "destroyed around a live block");
    MUST(jemhooks_free(inner));
    arena_end(c);
    CHECK("nested", owner_of(inner) == b && owner_of(middle + 3 * PAGE) == b,
          "the middle region did not get its range back");
    MUST(jemhooks_free(middle));
    arena_end(b);
    CHECK("nested", owner_of(inner) == a && owner_of(middle) == a, "the outer region did not get its range back");
    MUST(jemhooks_free(outer));
    arena_end(a);
    CHECK("nested", !jemhooks_region_of(inner), "a destroyed region is still found");
}

/* A range in a block of a range in a block, and so on. */
static void nested_deep(void) {
    enum { LEVELS = 6 };
    jemhooks_arena *level[LEVELS];
    char *block[LEVELS], *base = map_aligned(HELD, PROT_READ | PROT_WRITE), *start = base;
    size_t length = HELD;
    for (int i = 0; i < LEVELS; i++) {
        level[i] = arena_in(start, length);
        block[i] = must_have(jemhooks_aligned_alloc(level[i], PAGE, length / 2), "block");
        CHECK("nested", owner_of(block[i]) == level[i] && owner_of(block[i] + length / 2 - 1) == level[i],
              "level %d is not found", i);
        start = block[i] + PAGE;
        length = length / 2 - 2 * PAGE;
    }
    for (int i = LEVELS - 1; i >= 0; i--) {
        for (int k = 0; k <= i; k++)
            CHECK("nested", owner_of(block[k]) == level[k] && owner_of(block[k] + PAGE) == level[k < i ? k + 1 : k],
                  "level %d of %d is not found", k, i);
        MUST(jemhooks_free(block[i]));
        arena_end(level[i]);
    }
    CHECK("nested", !owner_of(block[0]), "a destroyed region is still found");
    munmap(base, HELD);
}

/* A range over all of a block, its first page included, is refused or works: the block can be freed afterwards. */
static void over_whole_block(void) {
    for (size_t size = 2 * PAGE; size <= MIB; size *= 2) {
        jemhooks_arena *outer = arena_on(NULL, NULL, 0);
        char *block = must_have(jemhooks_aligned_alloc(outer, PAGE, size), "block");
        jemhooks_arena *inner = try_arena_in(block, size);
        if (inner) {
            MUST(jemhooks_free(jemhooks_alloc(inner, 100)));
            MUST(jemhooks_free(jemhooks_alloc(inner, size / 2)));
            arena_end(inner);
        }
        MUST(jemhooks_free(block));
        arena_end(outer);
    }
}

static void nested_whole(void) {
    in_child("an arena over a whole block of another", over_whole_block);
}

/* A region may lie wholly in one live block of another arena, or outside of it, but not in part or around it. */
static void nested_refused(void) {
    char *base = map_aligned(HELD, PROT_READ | PROT_WRITE);
    jemhooks_provider *middle = fixed_range(base + 4 * MIB, 4 * MIB, true, false);
    jemhooks_arena *a = arena_on(middle, NULL, 0);
    char *block = must_have(jemhooks_aligned_alloc(a, PAGE, MIB), "block");
    const struct {
        const char *what;
        char *base;
        size_t length;
        bool allowed;
    } range[] = {
        {"around it", base, HELD, false},
        {"its own range", base + 4 * MIB, 4 * MIB, false},
        {"into it", base + 2 * MIB, 4 * MIB, false},
        {"out of it", base + 6 * MIB, 4 * MIB, false},
        {"into it by a page", base + 4 * MIB - PAGE, 2 * PAGE, false},
        {"out of it by a page", base + 8 * MIB - PAGE, 2 * PAGE, false},
        {"where no block lives", base + 7 * MIB, PAGE, false},
        {"a block and more", block, MIB + 64 * PAGE, false},
        {"before it", base, 4 * MIB, true},
        {"behind it", base + 8 * MIB, 4 * MIB, true},
        {"a block", block, MIB, true},
        {"some pages of a block", block + 5 * PAGE, 5 * PAGE, true},
    };
    MUST(jemhooks_trim(a, NULL));
    for (size_t i = 0; i < sizeof range / sizeof range[0]; i++) {
        jemhooks_arena *other = try_arena_in(range[i].base, range[i].length);
        CHECK("overlap", !other == !range[i].allowed, "%s: an arena was %s", range[i].what,
              other ? "allowed" : "refused");
        if (other) CHECK("overlap", owner_of(range[i].base) == other, "%s: it is not found", range[i].what);
        if (other) arena_end(other);
        for (size_t page = 0; page < HELD / PAGE; page++)
            if (!CHECK("overlap", owner_of(base + page * PAGE) == (page >= 1024 && page < 2048 ? a : NULL),
                       "%s: page %zu is in another region afterwards", range[i].what, page))
                break;
    }
    MUST(jemhooks_free(block));
    arena_end(a);
    jemhooks_provider_close(middle);
    munmap(base, HELD);
}

/* Thousands of ranges of 64 KiB, 32 to a slot. */
static void small_ranges(void) {
    enum { MOST = 2500 };
    static jemhooks_arena *arena[MOST];
    const size_t length = 64 * KIB;
    long ranges = option("ranges", 10000), at_a_time = option("at_a_time", 40);
    at_a_time = at_a_time < MOST ? at_a_time : MOST;
    char *base = map_aligned((size_t)ranges * length, PROT_NONE);
    dice d = {(uint64_t)option("seed", 1)};
    for (long first = 0; first < ranges; first += at_a_time) {
        long n = ranges - first < at_a_time ? ranges - first : at_a_time;
        char *p = base + (size_t)first * length;
        for (long i = 0; i < n; i++) arena[i] = arena_in(p + (size_t)i * length, length);
        for (long i = 0; i < n; i++, p += length)
            CHECK("small", owner_of(p) == arena[i] && owner_of(p + length - 1) == arena[i], "range %ld is not found",
                  first + i);
        for (long left = n; left > 0; left--) {
            size_t i = roll_below(&d, (size_t)left);
            arena_end(arena[i]);
            arena[i] = arena[left - 1];
        }
    }
    size_t found = 0;
    for (size_t i = 0; i < (size_t)ranges * length / PAGE; i++) found += jemhooks_region_of(base + i * PAGE) != NULL;
    CHECK("small", !found, "%zu pages are in a region after all were destroyed", found);
    figure("ranges", (double)ranges);
    munmap(base, (size_t)ranges * length);
}

/* ---- readers ----------------------------------------------------------------------------------------------------- */

/* A registrar whose keys tell what they are for: what it registered under key n is in issued[n % ISSUED]. */
#define ISSUED 65536
static struct {
    atomic_uintptr_t base, end;
    atomic_ulong lkey;
} issued[ISSUED];
static atomic_ulong issues, lookups, hits;
static atomic_bool stop;
static char *stage;

static uint64_t remote_of(uint64_t lkey) {
    return lkey << 32;
}

static int issue(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    (void)self, (void)access;
    unsigned long n = atomic_fetch_add(&issues, 1) + 1;
    atomic_store(&issued[n % ISSUED].base, (uintptr_t)address);
    atomic_store(&issued[n % ISSUED].end, (uintptr_t)address + length);
    atomic_store(&issued[n % ISSUED].lkey, n);
    mr->lkey = n;
    mr->rkey = ~(uint64_t)n;
    mr->remote_base = remote_of(n);
    return 0;
}

static int take_back(void *self, jemhooks_mr *mr) {
    (void)self, (void)mr;
    return 0;
}

static const jemhooks_registrar_ops issuer = {
    .size = sizeof issuer, .name = "issuer", .register_memory = issue, .deregister_memory = take_back};

/* Looks addresses up as fast as it can and checks that all of a key is of one registration. */
static void *read_keys(void *arg) {
    dice d = {(uint64_t)(uintptr_t)arg};
    unsigned long n = 0, found = 0;
    for (; !atomic_load_explicit(&stop, memory_order_relaxed); n++) {
        jemhooks_key k;
        uintptr_t p = (uintptr_t)stage + roll_below(&d, HELD);
        if (jemhooks_lookup((void *)p, &k)) continue;
        found++;
        if (!CHECK("mixed", k.rkey == ~k.lkey && k.lkey, "lkey %zu goes with rkey %zu", (size_t)k.lkey,
                   (size_t)~k.rkey))
            continue;
        uintptr_t base = atomic_load(&issued[k.lkey % ISSUED].base), end = atomic_load(&issued[k.lkey % ISSUED].end);
        if (atomic_load(&issued[k.lkey % ISSUED].lkey) != k.lkey) continue; /* long ago: its record is gone */
        CHECK("mixed", p >= base && p < end && k.length == end - p && k.addr == remote_of(k.lkey) + (p - base),
              "key %zu, issued for [%#zx, %#zx), was given for %#zx with %zu bytes and address %#zx", (size_t)k.lkey,
              base, end, p, (size_t)k.length, (size_t)k.addr);
    }
    atomic_fetch_add(&lookups, n);
    atomic_fetch_add(&hits, found);
    return NULL;
}

/* Arenas come and go on the stage, at other places each time, one in a block of the other, and are registered and
 * deregistered meanwhile. */
static void *change_keys(void *arg) {
    dice d = {77 + (uint64_t)(uintptr_t)arg};
    jemhooks_registrar *registrar;
    char *mine = stage + (uintptr_t)arg * HELD / 2;
    MUST(jemhooks_registrar_create(&issuer, NULL, &registrar));
    for (long i = 0; i < option("rounds", 3000); i++) {
        char *base = mine + roll_below(&d, 512) * PAGE;
        jemhooks_provider *outer_range = fixed_range(base, MIB + roll_below(&d, 5 * MIB), false, false);
        jemhooks_arena *outer = arena_on(outer_range, &registrar, 1);
        for (int times = 0; times < 3; times++) {
            jemhooks_key k;
            char *block = must_have(jemhooks_alloc(outer, 128 * PAGE), "block");
            jemhooks_provider *inner_range = fixed_range(block + 8 * PAGE, 64 * PAGE, false, false);
            jemhooks_arena *inner = arena_on(inner_range, &registrar, 1);
            MUST(jemhooks_get_key(block + 80 * PAGE, &k));
            MUST(jemhooks_get_key(block + 20 * PAGE, &k));
            MUST(jemhooks_trim(inner, NULL));
            MUST(jemhooks_get_key(block + 20 * PAGE, &k));
            arena_end(inner);
            jemhooks_provider_close(inner_range);
            MUST(jemhooks_free(block));
            MUST(jemhooks_trim(outer, NULL));
        }
        arena_end(outer);
        jemhooks_provider_close(outer_range);
    }
    jemhooks_registrar_close(registrar);
    return NULL;
}

static void readers(void) {
    enum { MOST = 8 };
    pthread_t reader[MOST], writer[2];
    long count = option("readers", 2);
    count = count < MOST ? count : MOST;
    stage = map_aligned(HELD, PROT_NONE);
    for (long i = 0; i < count; i++) reader[i] = start_thread(read_keys, (void *)(intptr_t)(i + 1));
    for (long i = 0; i < 2; i++) writer[i] = start_thread(change_keys, (void *)(intptr_t)i);
    for (int i = 0; i < 2; i++) join_thread(writer[i]);
    atomic_store(&stop, true);
    for (long i = 0; i < count; i++) join_thread(reader[i]);
    CHECK("setup", atomic_load(&hits) > 1000, "only %lu of %lu look-ups found a key", atomic_load(&hits),
          atomic_load(&lookups));
    figure("lookups", (double)atomic_load(&lookups));
    figure("registrations", (double)atomic_load(&issues));
    munmap(stage, HELD);
}

/* ---- many threads, one slot -------------------------------------------------------------------------------------- */

static jemhooks_arena *crowded;

/* Threads make and destroy ranges in blocks of one arena, side by side in its slots. */
static void *crowd_one(void *arg) {
    dice d = {(uint64_t)(uintptr_t)arg};
    for (long i = 0; i < option("rounds", 3000); i++) {
        size_t pages = 6 + roll_below(&d, 40);
        char *block = must_have(jemhooks_aligned_alloc(crowded, PAGE, pages * PAGE), "block"),
             *last = block + (pages - 2) * PAGE;
        jemhooks_arena *arena = try_arena_in(block + PAGE, (pages - 2) * PAGE);
        if (!CHECK("crowd", arena, "a range in a block was refused: %s", jemhooks_last_error())) break;
        CHECK("crowd", owner_of(block + PAGE) == arena && owner_of(last) == arena, "another region is found");
        MUST(jemhooks_free(must_have(jemhooks_alloc(arena, 64), "block")));
        arena_end(arena);
        CHECK("crowd", owner_of(block + PAGE) == crowded && owner_of(last) == crowded, "the outer region is not found");
        MUST(jemhooks_free(block));
    }
    return NULL;
}

static void crowd(void) {
    enum { THREADS = 4 };
    pthread_t thread[THREADS];
    stage = map_aligned(HELD, PROT_NONE);
    jemhooks_provider *range = fixed_range(stage, HELD, false, false);
    crowded = arena_on(range, NULL, 0);
    jemhooks_provider_close(range);
    for (long i = 0; i < THREADS; i++) thread[i] = start_thread(crowd_one, (void *)(intptr_t)i);
    for (int i = 0; i < THREADS; i++) join_thread(thread[i]);
    arena_end(crowded);
    for (size_t i = 0; i < HELD / PAGE; i++)
        if (!CHECK("crowd", !jemhooks_region_of(stage + i * PAGE), "page %zu is in a region after all were destroyed",
                   i))
            break;
    crowded = arena_in(stage, HELD);
    CHECK("crowd", owner_of(stage) == crowded, "the range is not found");
    arena_end(crowded);
    munmap(stage, HELD);
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"addresses", addresses},
                                      {"nested_blocks", nested_blocks},
                                      {"nested_deep", nested_deep},
                                      {"nested_whole", nested_whole},
                                      {"nested_refused", nested_refused},
                                      {"small_ranges", small_ranges},
                                      {"readers", readers},
                                      {"crowd", crowd},
                                      {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
