/* lookup.c - from addresses to regions and keys: every kind of address, regions inside regions, many small ones in one
 * 2 MiB slot, and readers that must never mix two registrations while writers change them.
 *     test_lookup [case=…] seed=1 rounds=3000 readers=2
 * Concurrency: the cases `readers` and `crowd` run several threads; their shared state is atomic.                    */
#include "check.h"

#include <stdio.h>
#include <sys/mman.h>

#define HELD (16 * MIB)

/* ---- any address ------------------------------------------------------------------------------------------------- */

static void expect(const char *where, const void *p, const jemhooks_region *region) {
    jemhooks_key key;
    const jemhooks_region *found = jemhooks_region_of(p);
    CHECK("lookup", found == region && jemhooks_find_region(p) == region, "%s, %p, is in region %p, not %p", where, p,
          (const void *)found, (const void *)region);
    if (!region) CHECK("lookup", jemhooks_lookup(p, &key) == -ENOENT && jemhooks_get_key(p, &key) == -ENOENT, "%s has a key", where);
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
    CHECK("lookup", key.length == 1 && key.addr == end - 1, "the key of the last byte reaches %zu bytes", (size_t)key.length);
    CHECK("foreign", jemhooks_free(foreign_heap) == -ENOENT && jemhooks_free(&foreign_stack) == -ENOENT
          && jemhooks_free_sized(&foreign_static, 4) == -ENOENT && !jemhooks_usable_size(foreign_heap)
          && !jemhooks_realloc(arena, foreign_heap, 10) && errno == ENOENT && jemhooks_lease(&foreign_stack, NULL) == -ENOENT
          && jemhooks_release(foreign_heap) == -ENOENT, "a foreign address was not refused");
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

static jemhooks_arena *arena_in(char *base, size_t length) {
    jemhooks_provider *provider = fixed_range(base, length, true, false);
    jemhooks_arena *arena = arena_on(provider, NULL, 0);
    jemhooks_provider_close(provider);
    return arena;
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
    CHECK("nested", owner_of(inner) == c && owner_of(middle) == b && owner_of(outer) == a && owner_of(middle + 4 * MIB - 1) == b
          && owner_of(outer + 16 * MIB - 1) == a, "an address is not in its innermost region");
    CHECK("nested", jemhooks_arena_destroy(a) == -EBUSY && jemhooks_arena_destroy(b) == -EBUSY, "destroyed around a live block");
    MUST(jemhooks_free(inner));
    arena_end(c);
    CHECK("nested", owner_of(inner) == b && owner_of(middle + 3 * PAGE) == b, "the middle region did not get its range back");
    MUST(jemhooks_free(middle));
    arena_end(b);
    CHECK("nested", owner_of(inner) == a && owner_of(middle) == a, "the outer region did not get its range back");
    MUST(jemhooks_free(outer));
    arena_end(a);
    CHECK("nested", !jemhooks_region_of(inner), "a destroyed region is still found");
}

/* Which arena, of those alive, should own page `page` of the memory? The last that was put there. */
static jemhooks_arena *innermost(jemhooks_arena *const *arena, const size_t (*range)[2], int count, size_t page) {
    jemhooks_arena *found = NULL;
    for (int i = 0; i < count; i++)
        if (arena[i] && page >= range[i][0] && page < range[i][1]) found = arena[i];
    return found;
}

/* Nested ranges (in pages), made from the outermost in and destroyed in every order. */
static void any_order(const char *what, char *base, const size_t (*range)[2], int count, size_t pages) {
    int orders = 1;
    for (int i = 2; i <= count; i++) orders *= i;
    for (int order = 0; order < orders; order++) {
        jemhooks_arena *arena[4];
        for (int i = 0; i < count; i++) arena[i] = arena_in(base + range[i][0] * PAGE, (range[i][1] - range[i][0]) * PAGE);
        int rest = order;
        for (int left = count; left > 0; left--) {
            int nth = rest % left, i = 0;
            rest /= left;
            while (!arena[i] || nth--) i++;
            arena_end(arena[i]);
            arena[i] = NULL;
            for (size_t page = 0; page < pages; page++)
                if (!CHECK("nested", owner_of(base + page * PAGE) == innermost(arena, range, count, page),
                           "%s: in order %d, after destroying range %d, page %zu is not in its innermost region", what, order, i, page))
                    break;
        }
        jemhooks_arena *again = arena_in(base, pages * PAGE);
        arena_end(again);
    }
}

static void nested_orders(void) {
    static const size_t three[][2] = {{0, 2048}, {100, 1500}, {600, 700}}, small[][2] = {{1, 40}, {2, 30}, {3, 20}, {4, 10}},
                        same[][2] = {{0, 1024}, {0, 1024}, {0, 1024}}, covered[][2] = {{0, 64}, {8, 10}, {8, 9}, {9, 10}},
                        slots[][2] = {{0, 2048}, {512, 1024}, {512, 1024}};
    char *base = map_aligned(HELD, PROT_READ | PROT_WRITE);
    any_order("three levels", base, three, 3, 2048);
    puts("1");    any_order("four levels in one slot", base, small, 4, 48);
puts("2");    any_order("whole slots", base, slots, 3, 2048);puts("3");
    any_order("a range that two others cover", base, covered, 4, 64);
    any_order("thrice the same range", base, same, 3, 1024);
    munmap(base, HELD);
}

/* 10,000 ranges of 64 KiB, 32 to a slot, some thousand at a time. */
static void small_ranges(void) {
    enum { RANGES = 10000, AT_A_TIME = 250 };
    const size_t length = 64 * KIB;
    static jemhooks_arena *arena[AT_A_TIME];
    char *base = map_aligned(RANGES * length, PROT_NONE);
    dice d = {(uint64_t)option("seed", 1)};
    for (int first = 0; first < RANGES; first += AT_A_TIME) {
        for (int i = 0; i < AT_A_TIME; i++) {
            jemhooks_provider *provider = fixed_range(base + (size_t)(first + i) * length, length, false, false);
            arena[i] = arena_on(provider, NULL, 0);
            jemhooks_provider_close(provider);
        }
        for (int i = 0; i < AT_A_TIME; i++) {
            char *p = base + (size_t)(first + i) * length;
            CHECK("small", owner_of(p) == arena[i] && owner_of(p + length - 1) == arena[i], "range %d is not found", first + i);
        }
        for (int left = AT_A_TIME; left > 0; left--) {
            int i = (int)roll_below(&d, (size_t)left);
            arena_end(arena[i]);
            arena[i] = arena[left - 1];
        }
    }
    size_t found = 0;
    for (size_t i = 0; i < RANGES * length / PAGE; i++) found += jemhooks_region_of(base + i * PAGE) != NULL;
    CHECK("small", !found, "%zu pages are in a region after all were destroyed", found);
    figure("ranges", RANGES);
    munmap(base, RANGES * length);
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

static const jemhooks_registrar_ops issuer = {.size = sizeof issuer, .name = "issuer", .register_memory = issue,
                                              .deregister_memory = take_back};

/* Looks addresses up as fast as it can and checks that all of a key is of one registration. */
static void *read_keys(void *arg) {
    dice d = {(uint64_t)(uintptr_t)arg};
    unsigned long n = 0, found = 0;
    for (; !atomic_load_explicit(&stop, memory_order_relaxed); n++) {
        jemhooks_key k;
        uintptr_t p = (uintptr_t)stage + roll_below(&d, HELD);
        if (jemhooks_lookup((void *)p, &k)) continue;
        found++;
        if (!CHECK("mixed", k.rkey == ~k.lkey && k.lkey, "lkey %zu goes with rkey %zu", (size_t)k.lkey, (size_t)~k.rkey)) continue;
        uintptr_t base = atomic_load(&issued[k.lkey % ISSUED].base), end = atomic_load(&issued[k.lkey % ISSUED].end);
        if (atomic_load(&issued[k.lkey % ISSUED].lkey) != k.lkey) continue; /* long ago: its record is gone */
        CHECK("mixed", p >= base && p < end && k.length == end - p && k.addr == remote_of(k.lkey) + (p - base),
              "key %zu, issued for [%#zx, %#zx), was given for %#zx with %zu bytes and address %#zx", (size_t)k.lkey, base, end, p,
              (size_t)k.length, (size_t)k.addr);
    }
    atomic_fetch_add(&lookups, n);
    atomic_fetch_add(&hits, found);
    return NULL;
}

/* Arenas come and go on the stage, at other places each time, and are registered and deregistered meanwhile. */
static void *change_keys(void *arg) {
    dice d = {77 + (uint64_t)(uintptr_t)arg};
    jemhooks_registrar *registrar;
    char *mine = stage + (uintptr_t)arg * HELD / 2;
    MUST(jemhooks_registrar_create(&issuer, NULL, &registrar));
    for (long i = 0; i < option("rounds", 3000); i++) {
        size_t at = roll_below(&d, 512) * PAGE;
        jemhooks_provider *outer_range = fixed_range(mine + at, MIB + roll_below(&d, 5 * MIB), false, false);
        jemhooks_provider *inner_range = fixed_range(mine + at + 16 * PAGE, 64 * PAGE, false, false);
        jemhooks_arena *outer = arena_on(outer_range, &registrar, 1), *inner = arena_on(inner_range, &registrar, 1);
        for (int times = 0; times < 4; times++) {
            jemhooks_key k;
            MUST(jemhooks_get_key(mine + at, &k));
            MUST(jemhooks_get_key(mine + at + 20 * PAGE, &k));
            MUST(jemhooks_trim(times % 2 ? outer : inner, NULL));
        }
        bool outer_first = roll_below(&d, 2);
        arena_end(outer_first ? outer : inner);
        arena_end(outer_first ? inner : outer);
        jemhooks_provider_close(outer_range);
        jemhooks_provider_close(inner_range);
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
    CHECK("setup", atomic_load(&hits) > 1000, "only %lu of %lu look-ups found a key", atomic_load(&hits), atomic_load(&lookups));
    figure("lookups", (double)atomic_load(&lookups));
    figure("registrations", (double)atomic_load(&issues));
    munmap(stage, HELD);
}

/* ---- many threads, one slot -------------------------------------------------------------------------------------- */

static atomic_int crowd_turn;

/* Threads make and destroy ranges around and beside each other's, all in one slot. */
static void *crowd_one(void *arg) {
    long me = (long)(intptr_t)arg;
    for (long i = 0; i < option("rounds", 3000) / 3; i++) {
        bool outermost = me == 0;
        char *base = outermost ? stage : stage + (size_t)me * 64 * PAGE;
        jemhooks_provider *provider = fixed_range(base, outermost ? SLOT : 32 * PAGE, false, false);
        jemhooks_config config = JEMHOOKS_CONFIG_INIT;
        jemhooks_arena *arena;
        config.provider = provider;
        config.policy = JEMHOOKS_NONE;
        int rc = jemhooks_arena_create(&config, &arena);
        /* around ranges that are there already it may not be made */
        CHECK("crowd", !rc || (outermost && rc == -EEXIST), "a range of its own was refused: %s", jemhooks_last_error());
        if (!rc) {
            if (!outermost) CHECK("crowd", owner_of(base) == arena, "another region is found where this one is innermost");
            arena_end(arena);
            if (outermost) atomic_fetch_add(&crowd_turn, 1);
        }
        jemhooks_provider_close(provider);
    }
    return NULL;
}

static void crowd(void) {
    enum { THREADS = 4 };
    pthread_t thread[THREADS];
    stage = map_aligned(HELD, PROT_NONE);
    for (long i = 0; i < THREADS; i++) thread[i] = start_thread(crowd_one, (void *)(intptr_t)i);
    for (int i = 0; i < THREADS; i++) join_thread(thread[i]);
    for (size_t i = 0; i < HELD / PAGE; i++)
        if (!CHECK("crowd", !jemhooks_region_of(stage + i * PAGE), "page %zu is in a region after all were destroyed", i)) break;
    jemhooks_arena *all = arena_in(stage, HELD);
    CHECK("crowd", owner_of(stage) == all, "the range is not found");
    arena_end(all);
    figure("surrounded", (double)atomic_load(&crowd_turn));
    munmap(stage, HELD);
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"addresses", addresses},         {"nested_blocks", nested_blocks},
                                      {"nested_orders", nested_orders}, {"small_ranges", small_ranges},
                                      {"readers", readers},             {"crowd", crowd},
                                      {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
