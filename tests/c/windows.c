/* windows.c - the moments at which a registration is neither there nor gone, with really pinned memory (io_uring).
 * An arena has two rails, the registrar "uring" and one of ours, which is called at the very moment: after the memory
 * is pinned but before the region counts as registered, and the like. What other threads might do just then happens
 * there, every time: blocks are freed, allocated, cleared. Afterwards the device writes, and the CPU must see it.
 *     test_windows [case=…]
 * Concurrency: one thread; `waiting` adds one that asks for a key meanwhile.                                        */
#include "check.h"
#include "jemhooks_uring.h"

#include <sys/mman.h>
#include <unistd.h>

#define PATTERN (16 * MIB)

static jemhooks_registrar *uring, *ours;
static jemhooks_provider *small_pages;
static int pattern_file;
static unsigned char *pattern;
static int (*at_register)(void), (*at_deregister)(void);
static unsigned uring_rail; /* which of the arena's rails pins */

static int our_register(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    (void)self, (void)address, (void)length, (void)access;
    mr->lkey = mr->rkey = 7;
    return at_register ? at_register() : 0;
}

static int our_deregister(void *self, jemhooks_mr *mr) {
    (void)self, (void)mr;
    return at_deregister ? at_deregister() : 0;
}

static void set_up(void) {
    static const jemhooks_registrar_ops ops = {
        .size = sizeof ops, .name = "ours", .register_memory = our_register, .deregister_memory = our_deregister};
    jemhooks_anonymous_config config = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    config.transparent_huge = 0;
    MUST(jemhooks_provider_anonymous(&config, &small_pages));
    MUST(jemhooks_registrar_open("uring", NULL, &uring));
    MUST(jemhooks_registrar_create(&ops, NULL, &ours));
    pattern_file = memfd_create("pattern", 0);
    must(ftruncate(pattern_file, PATTERN), "a pattern file", __FILE__, __LINE__);
    pattern = must_have(mmap(NULL, PATTERN, PROT_READ | PROT_WRITE, MAP_SHARED, pattern_file, 0), "pattern");
    fill(pattern, PATTERN, 1);
    for (size_t i = 0; i < PATTERN; i++) pattern[i] |= 1; /* never zero */
}

/* The device writes the pattern to [p, p + size). */
static void device_write(void *p, size_t size, const jemhooks_key *key) {
    const jemhooks_region *r = must_have(jemhooks_region_of(p), "region");
    jemhooks_uring_transfer t = {
        .fd = pattern_file, .slot = (uint32_t)key->lkey, .base = r->base, .address = (uintptr_t)p, .length = size};
    int64_t moved = jemhooks_uring_read(uring, &t);
    CHECK("device", moved == (int64_t)size, "the device wrote %lld of %zu bytes: %s", (long long)moved, size,
          jemhooks_last_error());
}

/* The device writes through its pinned pages; the CPU must see that. */
static void check_device(void *p, size_t size) {
    jemhooks_key key;
    MUST(jemhooks_get_rail_key(p, uring_rail, &key));
    device_write(p, size, &key);
    CHECK("stale", !memcmp(p, pattern, size), "the CPU does not see what the device wrote to %zu bytes", size);
}

static size_t resident_beside_records(const jemhooks_region *r) {
    size_t pages = 0;
    uintptr_t at = r->base;
    for (size_t n; (n = beside_records(&at, r->base + r->length)); at += n) pages += resident_pages((void *)at, n);
    return pages;
}

static jemhooks_arena *arena;
static char *kept, *freed, *made, *cleared;

/* ---- registering ------------------------------------------------------------------------------------------------- */

/* The region is pinned, its state "registering": pages that a block gives up now must not be dropped. */
static int free_while_registering(void) {
    MUST(jemhooks_free(freed));
    made = must_have(jemhooks_alloc(arena, 256 * KIB), "block");
    cleared = must_have(jemhooks_calloc(arena, 1, 256 * KIB), "zeroed block");
    CHECK("zero", all_zero(cleared, 256 * KIB), "a block zeroed while its region was being registered is not zero");
    return 0;
}

static void registering(void) {
    arena = arena_on(small_pages, (jemhooks_registrar *[]){uring, ours}, 2);
    kept = must_have(jemhooks_alloc(arena, 256 * KIB), "block");
    freed = must_have(jemhooks_alloc(arena, MIB), "block");
    memset(kept, 1, 256 * KIB);
    memset(freed, 2, MIB);
    at_register = free_while_registering;
    jemhooks_key key;
    MUST(jemhooks_get_key(kept, &key));
    at_register = NULL;
    CHECK("setup",
          jemhooks_region_of(made) == jemhooks_region_of(kept) &&
              jemhooks_region_of(cleared) == jemhooks_region_of(kept),
          "the blocks are not in the region that was being registered");
    check_device(made, 256 * KIB);
    check_device(cleared, 256 * KIB);
    check_device(kept, 256 * KIB);
    check_pinned("with one region registered", stats_of(arena).registered);
    MUST(jemhooks_free(kept));
    MUST(jemhooks_free(made));
    MUST(jemhooks_free(cleared));
    MUST(jemhooks_trim(arena, NULL));
    check_idle(arena, true);
    check_pinned("after a trim", 0);
    arena_end(arena);
}

static int fail(void) {
    return -EMFILE;
}

/* The second rail fails after the first has pinned everything: nothing stays pinned, nor the pages that pinning made.
 */
static void failing(void) {
    arena = arena_on(small_pages, (jemhooks_registrar *[]){uring, ours}, 2);
    kept = must_have(jemhooks_alloc(arena, 32 * MIB), "block");
    memset(kept, 1, MIB);
    freed = must_have(jemhooks_alloc(arena, MIB), "block");
    memset(freed, 2, MIB);
    const jemhooks_region *r = jemhooks_region_of(kept);
    MUST(jemhooks_free(freed));
    at_register = fail;
    jemhooks_key key;
    CHECK("fails", jemhooks_get_key(kept, &key) == -EMFILE, "a failing rail did not fail");
    at_register = NULL;
    check_pinned("after a failed registration", 0);
    CHECK("content", kept[0] == 1 && kept[MIB - 1] == 1, "a failed registration changed a block");
    CHECK("resident", resident_beside_records(r) <= stats_of(arena).committed / PAGE,
          "a failed registration left pages in memory that no block uses");
    check_device(kept, 64 * KIB);
    MUST(jemhooks_free(kept));
    arena_end(arena);
    check_pinned("after destroy", 0);
}

/* ---- deregistering ----------------------------------------------------------------------------------------------- */

/* The region is "deregistering", its pages may still be pinned: blocks made in it now must survive what follows. */
static int make_while_deregistering(void) {
    made = must_have(jemhooks_alloc(arena, 256 * KIB), "block");
    memset(made, 3, 256 * KIB);
    cleared = must_have(jemhooks_calloc(arena, 1, 256 * KIB), "zeroed block");
    CHECK("zero", all_zero(cleared, 256 * KIB), "a block zeroed while its region was being deregistered is not zero");
    memset(cleared, 4, 256 * KIB);
    freed = must_have(jemhooks_alloc(arena, 128 * KIB), "block");
    memset(freed, 5, 128 * KIB);
    MUST(jemhooks_free(freed));
    return 0;
}

static bool is_all(const char *p, char byte, size_t size) {
    return p[0] == byte && !memcmp(p, p + 1, size - 1);
}

static void deregistering(void) {
    for (int pinned_meanwhile = 0; pinned_meanwhile < 2; pinned_meanwhile++) {
        /* the last rail is the first to go */
        uring_rail = !pinned_meanwhile;
        arena =
            arena_on(small_pages, (jemhooks_registrar *[]){uring_rail ? ours : uring, uring_rail ? uring : ours}, 2);
        kept = must_have(jemhooks_alloc(arena, MIB), "block");
        memset(kept, 1, MIB);
        check_device(kept, MIB);
        const jemhooks_region *r = jemhooks_region_of(kept);
        MUST(jemhooks_free(kept));
        at_deregister = make_while_deregistering;
        MUST(jemhooks_trim(arena, NULL));
        at_deregister = NULL;
        CHECK("setup", jemhooks_region_of(made) == r && jemhooks_region_of(cleared) == r,
              "the blocks are not in the region that was being deregistered");
        CHECK("content", is_all(made, 3, 256 * KIB) && is_all(cleared, 4, 256 * KIB),
              "deregistering took a live block's pages");
        CHECK("resident", resident_beside_records(r) <= stats_of(arena).committed / PAGE,
              "deregistering left pages in memory that no block uses");
        char *again = must_have(jemhooks_calloc(arena, 1, 512 * KIB), "zeroed block");
        CHECK("zero", all_zero(again, 512 * KIB), "a zeroed block is not zero after a deregistration");
        check_device(made, 256 * KIB);
        check_device(cleared, 256 * KIB);
        MUST(jemhooks_free(again));
        MUST(jemhooks_free(made));
        MUST(jemhooks_free(cleared));
        arena_end(arena);
        check_pinned("after destroy", 0);
    }
    uring_rail = 0;
}

/* A deregistration that fails: the region stays registered, and the device must still reach what the CPU sees. */
static void undying(void) {
    arena = arena_on(small_pages, (jemhooks_registrar *[]){uring, ours}, 2);
    kept = must_have(jemhooks_alloc(arena, MIB), "block");
    memset(kept, 1, MIB);
    check_device(kept, MIB);
    MUST(jemhooks_free(kept));
    at_deregister = fail;
    CHECK("fails", jemhooks_trim(arena, NULL) == -EMFILE, "a failing deregistration did not fail");
    at_deregister = NULL;
    kept = must_have(jemhooks_calloc(arena, 1, MIB), "zeroed block");
    CHECK("zero", all_zero(kept, MIB), "a zeroed block is not zero after a failed deregistration");
    check_device(kept, MIB);
    MUST(jemhooks_free(kept));
    MUST(jemhooks_trim(arena, NULL));
    check_idle(arena, true);
    arena_end(arena);
    check_pinned("after destroy", 0);
}

static pthread_t waiter;

static void *ask_meanwhile(void *arg) {
    jemhooks_key *key = arg;
    int rc = jemhooks_get_rail_key(kept, 0, key);
    CHECK("waiting", !rc, "asking while a region was under way gave %d: %s", rc, jemhooks_last_error());
    return NULL;
}

static jemhooks_key asked;

static int start_asking(void) {
    waiter = start_thread(ask_meanwhile, &asked);
    return 0;
}

/* Whoever asks for a key while the region is under way waits for the outcome. */
static void waiting(void) {
    for (int i = 0; i < 50; i++) {
        jemhooks_key key;
        arena = arena_on(small_pages, (jemhooks_registrar *[]){uring, ours}, 2);
        kept = must_have(jemhooks_alloc(arena, MIB), "block");
        at_register = start_asking;
        MUST(jemhooks_get_key(kept, &key));
        at_register = NULL;
        join_thread(waiter);
        CHECK("waiting", asked.generation == key.generation && asked.lkey == key.lkey, "who waited got another key");
        MUST(jemhooks_free(kept));
        arena_end(arena);
    }
}

/* ---- what a peer with the key can reach ---------------------------------------------------------------------------
 */

/* The device writes to pages of a registered region in which no block lies; blocks zeroed later must be zero. */
static void beyond(void) {
    arena = arena_on(small_pages, &uring, 1);
    kept = must_have(jemhooks_alloc(arena, 4 * KIB), "block");
    freed = must_have(jemhooks_alloc(arena, 512 * KIB), "block");
    memset(freed, 1, 512 * KIB);
    jemhooks_key key;
    MUST(jemhooks_get_key(kept, &key));
    MUST(jemhooks_free(freed));
    const jemhooks_region *r = jemhooks_region_of(kept);
    memset(kept, 9, 4 * KIB);
    uintptr_t at = r->base;
    for (size_t n; (n = beside_records(&at, (uintptr_t)kept)); at += n) device_write((void *)at, n, &key);
    at = (uintptr_t)kept + 4 * KIB;
    for (size_t n; (n = beside_records(&at, r->base + r->length)); at += n) device_write((void *)at, n, &key);
    char *p[64];
    int n = 0;
    size_t inside = 0;
    while (n < 64) {
        size_t size = n % 2 ? 32 * KIB : 20 * KIB;
        p[n] = must_have(jemhooks_calloc(arena, 1, size), "zeroed block");
        CHECK("zero", all_zero(p[n], size), "a block zeroed where a peer had written before is not zero");
        inside += jemhooks_region_of(p[n]) == r;
        check_device(p[n], size);
        n++;
    }
    CHECK("setup", inside > 20, "only %zu blocks are where the peer wrote", inside);
    CHECK("content", is_all(kept, 9, 4 * KIB), "a live block changed");
    while (n) MUST(jemhooks_free(p[--n]));
    MUST(jemhooks_free(kept));
    MUST(jemhooks_trim(arena, NULL));
    check_idle(arena, true);
    arena_end(arena);
    check_pinned("after destroy", 0);
}

/* Pages dropped by the allocator's own purging, as decay lets it do, would no longer be those that the device has. */
static void purged(void) {
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.provider = small_pages;
    config.registrars = &uring;
    config.registrar_count = 1;
    config.dirty_decay_ms = 1;
    config.muzzy_decay_ms = 10000;
    arena = arena_of(&config);
    kept = must_have(jemhooks_alloc(arena, 4 * KIB), "block");
    check_device(kept, 4 * KIB);
    for (int i = 0; i < 20; i++) {
        size_t size = 64 * KIB << i % 5;
        made = must_have(jemhooks_alloc(arena, size), "block");
        memset(made, 1, size);
        check_device(made, size);
        MUST(jemhooks_free(made));
        for (int tick = 0; tick < 4000; tick++) MUST(jemhooks_free(jemhooks_alloc(arena, 20 * KIB << tick % 2)));
    }
    MUST(jemhooks_free(kept));
    arena_end(arena);
    check_pinned("after destroy", 0);
}

int main(int argc, char **argv) {
    static const test_case cases[] = {
        {"registering", registering}, {"failing", failing}, {"deregistering", deregistering},
        {"undying", undying},         {"waiting", waiting}, {"beyond", beyond},
        {"purged", purged},           {NULL, NULL}};
    take_options(argc, argv);
    set_up();
    return run_cases(cases);
}
