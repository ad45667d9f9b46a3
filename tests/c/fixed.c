/* fixed.c - arenas in ranges that the caller owns: memory that may hold old bytes and is never given back, and memory
 * that the host cannot touch, of which this library and the allocator must not read or write one byte.
 *     test_fixed [case=…] ops=20000 seed=1
 * Concurrency: one thread.                                                                                          */
#include "check.h"

#include <sys/mman.h>

#define RANGE (64 * MIB)

/* ---- memory that the host cannot touch --------------------------------------------------------------------------- */

/* Blocks of a range without any access right: whoever touches one dies of SIGSEGV. */
static void zero_touch(void) {
    enum { COUNT = 500 };
    static struct {
        char *p;
        size_t size;
    } block[COUNT];
    char *base = map_aligned(RANGE, PROT_NONE);
    jemhooks_provider *provider = fixed_range(base, RANGE, false, option("zeroed", 0));
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_arena *arena = arena_on(provider, &null, 1);
    dice d = {(uint64_t)option("seed", 1)};
    long kept = 0, moved = 0;
    for (long i = 0; i < option("ops", 20000); i++) {
        size_t k = roll_below(&d, COUNT), size = (size_t)1 << roll_below(&d, 18);
        size += roll_below(&d, size);
        jemhooks_key key;
        if (!block[k].p) {
            block[k].p = roll_below(&d, 4) ? jemhooks_alloc(arena, size) : jemhooks_aligned_alloc(arena, 4096, size);
            block[k].size = size;
            CHECK("alloc", block[k].p, "no memory: %s", jemhooks_last_error());
            CHECK("span", block[k].p >= base && block[k].p + size <= base + RANGE, "a block outside the range");
        } else if (roll_below(&d, 2)) {
            MUST(roll_below(&d, 2) ? jemhooks_free(block[k].p) : jemhooks_free_sized(block[k].p, block[k].size));
            block[k].p = NULL;
        } else if (jemhooks_realloc(arena, block[k].p, size)) {
            block[k].size = size;
            kept++;
        } else {
            CHECK("unsupported", errno == EOPNOTSUPP, "a realloc that would have to copy failed with errno %d", errno);
            moved++;
        }
        if (block[k].p && !roll_below(&d, 16)) MUST(jemhooks_get_key(block[k].p, &key));
        if (!roll_below(&d, 500)) MUST(jemhooks_trim(arena, NULL));
    }
    CHECK("unsupported", !jemhooks_calloc(arena, 1, 64) && errno == EOPNOTSUPP, "calloc gave errno %d", errno);
    CHECK("unsupported", !jemhooks_aligned_calloc(arena, 4096, 1, MIB) && errno == EOPNOTSUPP,
          "aligned_calloc gave errno %d", errno);
    CHECK("unsupported", *jemhooks_last_error(), "a refused calloc left no message");
    for (int k = 0; k < COUNT; k++) MUST(jemhooks_free(block[k].p));
    MUST(jemhooks_trim(arena, NULL));
    check_idle(arena, false);
    arena_end(arena);
    figure("in_place", (double)kept);
    figure("not_in_place", (double)moved);
    CHECK("setup", kept && moved, "%ld reallocs in place and %ld not: both must be met", kept, moved);
    jemhooks_registrar_close(null);
    jemhooks_provider_close(provider);
    munmap(base, RANGE);
}

/* Shrinking a large block, and growing it into the pages that it gave up, need no copy. */
static void in_place(void) {
    char *base = map_aligned(RANGE, PROT_NONE);
    jemhooks_provider *provider = fixed_range(base, RANGE, false, false);
    jemhooks_arena *arena = arena_on(provider, NULL, 0);
    char *p = must_have(jemhooks_alloc(arena, 4 * MIB), "block");
    for (int i = 0; i < 20; i++) {
        CHECK("in_place", jemhooks_realloc(arena, p, MIB + (size_t)i) == p, "shrinking in place: %s",
              jemhooks_last_error());
        CHECK("in_place", jemhooks_realloc(arena, p, 4 * MIB) == p, "growing in place: %s", jemhooks_last_error());
    }
    MUST(jemhooks_free(p));
    arena_end(arena);
    jemhooks_provider_close(provider);
    munmap(base, RANGE);
}

/* ---- memory with old bytes in it --------------------------------------------------------------------------------- */

/* Allocates, dirties and frees zeroed blocks of many sizes. */
static void zeroed_blocks(jemhooks_arena *arena, const char *base, size_t length) {
    enum { COUNT = 64 };
    char *p[COUNT] = {NULL};
    dice d = {(uint64_t)option("seed", 1)};
    for (int i = 0; i < 4000; i++) {
        size_t k = roll_below(&d, COUNT), size = (size_t)1 << roll_below(&d, 19);
        size += roll_below(&d, size);
        if (p[k]) {
            MUST(jemhooks_free(p[k]));
            p[k] = NULL;
            continue;
        }
        p[k] = must_have(jemhooks_calloc(arena, 1, size), "zeroed block");
        CHECK("zero", all_zero(p[k], size), "a zeroed block of %zu bytes holds old bytes", size);
        CHECK("span", p[k] >= base && p[k] + size <= base + length, "a block outside the range");
        memset(p[k], 0xAA, size);
    }
    for (int k = 0; k < COUNT; k++) MUST(jemhooks_free(p[k]));
}

/* The range begins and ends within a page; its neighbours' bytes must stay, and its pages must never be given back. */
static void stale(void) {
    const size_t off = 100, cut = 77;
    unsigned char *room = map_aligned(RANGE, PROT_READ | PROT_WRITE);
    jemhooks_registrar *null = null_open(NULL);
    memset(room, 0xAA, RANGE);
    jemhooks_provider *provider = fixed_range(room + off, RANGE - off - cut, true, false);
    for (int again = 0; again < 2; again++) {
        jemhooks_arena *arena = arena_on(provider, &null, 1);
        size_t count;
        jemhooks_region_info *r = regions_of(arena, &count);
        CHECK("rounding",
              count == 1 && r->base == (uintptr_t)room + PAGE && r->length == RANGE - 2 * PAGE && !r->committed,
              "a range of %zu bytes became %zu regions, the first with %zu", RANGE - off - cut, count,
              (size_t)r->length);
        zeroed_blocks(arena, (char *)room + PAGE, RANGE - 2 * PAGE);
        jemhooks_key key;
        char *p = must_have(jemhooks_alloc(arena, MIB), "block");
        MUST(jemhooks_get_key(p, &key));
        MUST(jemhooks_free(p));
        MUST(jemhooks_trim(arena, NULL));
        zeroed_blocks(arena, (char *)room + PAGE, RANGE - 2 * PAGE);
        arena_end(arena);
        free(r);
    }
    size_t wrong = 0;
    for (size_t i = 0; i < PAGE; i++) wrong += room[i] != 0xAA || room[RANGE - 1 - i] != 0xAA;
    CHECK("outside", !wrong, "%zu bytes outside the rounded range changed", wrong);
    CHECK("given_back", resident_pages(room, RANGE) == RANGE / PAGE, "%zu of %zu pages of the caller's range are gone",
          RANGE / PAGE - resident_pages(room, RANGE), RANGE / PAGE);
    jemhooks_registrar_close(null);
    jemhooks_provider_close(provider);
    munmap(room, RANGE);
}

/* A range is cleared only where zeroes are asked for, and not if its owner calls it zeroed; once an arena has lived in it,
 * it is no longer taken for zeroed. */
static void zeroed(void) {
    for (int claimed = 0; claimed < 2; claimed++) {
        char *base = map_aligned(RANGE, PROT_READ | PROT_WRITE);
        jemhooks_provider *provider = fixed_range(base, RANGE, true, claimed);
        jemhooks_arena *arena = arena_on(provider, NULL, 0);
        char *p = must_have(jemhooks_alloc(arena, 16 * MIB), "block");
        size_t touched = resident_pages(base, RANGE), pages = 16 * MIB / PAGE;
        CHECK("zeroed", touched < pages / 8, "%zu of %zu pages were touched, though nobody asked for zeroes", touched, pages);
        memset(p, 0xAA, 16 * MIB);
        MUST(jemhooks_free(p));
        zeroed_blocks(arena, base, RANGE);
        arena_end(arena);
        memset(base, 0xAA, RANGE);
        arena = arena_on(provider, NULL, 0);
        zeroed_blocks(arena, base, RANGE);
        arena_end(arena);
        jemhooks_provider_close(provider);
        munmap(base, RANGE);
    }
}

/* ---- who may live where ------------------------------------------------------------------------------------------ */

/* One arena at a time; destroying it makes room for the next. */
static void tenant(void) {
    char *base = map_aligned(RANGE, PROT_READ | PROT_WRITE);
    jemhooks_provider *provider = fixed_range(base, RANGE, true, false);
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.provider = provider;
    config.policy = JEMHOOKS_NONE;
    for (int i = 0; i < 3; i++) {
        jemhooks_arena *arena = arena_of(&config), *other;
        CHECK("tenant",
              jemhooks_arena_create(&config, &other) == -EBUSY && jemhooks_last_error_kind() == JEMHOOKS_ERROR_BUSY,
              "a second arena moved into the same range");
        CHECK("tenant", jemhooks_region_of(base) && jemhooks_region_of(base) == jemhooks_region_of(base + RANGE - 1),
              "the range is no region");
        arena_end(arena);
        CHECK("tenant", !jemhooks_region_of(base), "a destroyed arena's range is still a region");
    }
    jemhooks_provider_close(provider);
    munmap(base, RANGE);
}

/* The smallest ranges: jemalloc's smallest extent is a page. */
static void tiny(void) {
    char *base = map_aligned(SLOT, PROT_READ | PROT_WRITE);
    for (size_t pages = 1; pages <= 8; pages++) {
        jemhooks_provider *provider = fixed_range(base + PAGE, pages * PAGE, true, false);
        jemhooks_arena *arena = arena_on(provider, NULL, 0);
        char *p = jemhooks_alloc(arena, 64), *q = jemhooks_alloc(arena, 2 * PAGE * pages);
        CHECK("tiny", p, "a range of %zu pages cannot hold 64 bytes: %s", pages, jemhooks_last_error());
        CHECK("tiny", !q && errno == ENOMEM, "a range of %zu pages holds twice as much", pages);
        MUST(jemhooks_free(p));
        arena_end(arena);
        jemhooks_provider_close(provider);
    }
    munmap(base, SLOT);
}

/* A range full of small free pages serves a larger block after all: they are purged for it. */
static void retry(void) {
    enum { SIZE = 1024, COUNT = 100000 };
    static void *p[COUNT];
    char *base = map_aligned(RANGE, PROT_READ | PROT_WRITE);
    jemhooks_provider *provider = fixed_range(base, RANGE, true, false);
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.provider = provider;
    config.policy = JEMHOOKS_NONE;
    config.dirty_decay_ms = config.muzzy_decay_ms = -1;
    jemhooks_arena *arena = arena_of(&config);
    size_t n = 0;
    while (n < COUNT && (p[n] = jemhooks_alloc(arena, SIZE))) n++;
    CHECK("full",
          n > RANGE / SIZE * 9 / 10 && n < COUNT && errno == ENOMEM &&
              jemhooks_last_error_kind() == JEMHOOKS_ERROR_MEMORY,
          "a range of %zu bytes held %zu blocks of %d, then errno %d", RANGE, n, SIZE, errno);
    for (size_t i = 0; i < n; i++) MUST(jemhooks_free(p[i]));
    void *q = jemhooks_alloc(arena, MIB);
    CHECK("retry", q, "a range whose blocks are all free has no room: %s", jemhooks_last_error());
    MUST(jemhooks_free(q));
    arena_end(arena);
    jemhooks_provider_close(provider);
    munmap(base, RANGE);
}

static const test_case cases[] = {
    {"zero_touch", zero_touch}, {"in_place", in_place}, {"stale", stale}, {"zeroed", zeroed},
    {"tenant", tenant},         {"tiny", tiny},         {"retry", retry}, {NULL, NULL}};

int main(int argc, char **argv) {
    take_options(argc, argv);
    return run_cases(cases);
}
