/* contract.c - the hook contract under a random load: two threads and two arenas with the registrar "null", every kind
 * of allocation, threads that free each other's blocks, trims in between. It sees only the public interface: contents,
 * zeroes, one region for each block, keys that stay valid, and the exact account of pages.
 * Regions lie side by side (placement.c), as chance would have it now and then.
 *     test_contract [case=…] ops=400000 seed=1 policy=lazy|eager decay=-2 (or -1, 0) mlockall=0|1 region_max=64 (MiB)
 * Concurrency: a table of blocks belongs to one thread from one barrier to the next; at each the two swap tables, and
 * while both wait there one of them checks what must hold at rest.                                                  */
#include "check.h"
#include "placement.h"

#include <sys/mman.h>

#define WORKERS 2
#define ARENAS 2
#define BLOCKS 2000
#define PHASES 16
#define LARGEST (12 * MIB)
#define LONGEST_ALIGNMENT_SHIFT 21

typedef struct block {
    unsigned char *p; /* NULL: none */
    size_t size;
    uint64_t tag;
    bool keyed;
    jemhooks_key key;
} block;

static jemhooks_registrar *null;
static jemhooks_arena *arena[ARENAS];
static block table[WORKERS][BLOCKS];
static pthread_barrier_t turn;
static long ops, seed, decay;
static size_t region_max;
static bool eager, locked, side_by_side;
static atomic_ulong calls, keys;

/* ---- one block --------------------------------------------------------------------------------------------------- */

static unsigned arena_index(const block *b) {
    return (unsigned)((b - &table[0][0]) % ARENAS);
}

static size_t random_size(dice *d) {
    if (!roll_below(d, 400)) return 1 + roll_below(d, LARGEST);
    size_t size = (size_t)1 << roll_below(d, 17);
    return size + roll_below(d, size);
}

/* What holds of every live block at any time. */
static void inspect(const block *b) {
    const jemhooks_region *r = jemhooks_region_of(b->p);
    const jemhooks_arena *owner = r ? __atomic_load_n(&r->arena, __ATOMIC_ACQUIRE) : NULL;
    jemhooks_key k;
    CHECK("content", filled(b->p, b->size, b->size, b->tag), "a live block of %zu bytes lost its contents", b->size);
    CHECK("span", r && r == jemhooks_region_of(b->p + b->size - 1),
          "a block of %zu bytes at %p does not lie in one region", b->size, (void *)b->p);
    CHECK("span", owner == arena[arena_index(b)], "a block of %zu bytes at %p is in another arena's region", b->size,
          (void *)b->p);
    if (!b->keyed) return;
    int rc = jemhooks_lookup(b->p, &k);
    CHECK("key", !rc && k.generation == b->key.generation && k.lkey == b->key.lkey && k.addr == b->key.addr,
          "the key of a live block changed (look-up gave %d)", rc);
}

static void get_key(block *b) {
    b->keyed = CHECK("key", !jemhooks_get_key(b->p, &b->key), "no key: %s", jemhooks_last_error());
    if (!b->keyed) return;
    CHECK("key", b->key.addr == (uintptr_t)b->p && b->key.length >= b->size && b->key.rkey == b->key.lkey + 1,
          "the key at %p is for %#zx and %zu bytes", (void *)b->p, (size_t)b->key.addr, (size_t)b->key.length);
    atomic_fetch_add(&keys, 1);
}

static void own(block *b, void *p, size_t size, dice *d) {
    if (!CHECK("alloc", p, "no memory for %zu bytes: %s", size, jemhooks_last_error())) return;
    size_t usable = jemhooks_usable_size(p);
    CHECK("usable", usable >= size, "a block of %zu bytes has only %zu usable", size, usable);
    *b = (block){.p = p, .size = size, .tag = roll(d)};
    fill(p, size, b->tag);
    if (eager || !roll_below(d, 8)) get_key(b);
    inspect(b);
}

static void make(block *b, dice *d) {
    jemhooks_arena *a = arena[arena_index(b)];
    size_t size = random_size(d), alignment = (size_t)1 << (12 + roll_below(d, LONGEST_ALIGNMENT_SHIFT - 11));
    size_t kind = roll_below(d, 16);
    void *p;
    if (kind < 7) p = jemhooks_alloc(a, size);
    else if (kind < 14) p = jemhooks_calloc(a, 1, size);
    else if (kind < 15) p = jemhooks_aligned_alloc(a, alignment, size);
    else p = jemhooks_aligned_calloc(a, alignment, 1, size);
    if (p && kind >= 14) CHECK("alignment", !((uintptr_t)p % alignment), "%p is not on %zu bytes", p, alignment);
    if (p && kind >= 7 && kind != 14) CHECK("zero", all_zero(p, size), "a zeroed block of %zu bytes is not zero", size);
    own(b, p, size, d);
}

static void resize(block *b, dice *d) {
    size_t size = random_size(d);
    unsigned char *p = jemhooks_realloc(arena[arena_index(b)], b->p, size);
    if (!CHECK("alloc", p, "no memory for realloc to %zu bytes: %s", size, jemhooks_last_error())) return;
    size_t keep = size < b->size ? size : b->size;
    CHECK("content", filled(p, b->size, keep, b->tag), "realloc from %zu to %zu bytes lost contents", b->size, size);
    own(b, p, size, d);
}

static void drop(block *b, dice *d) {
    inspect(b);
    int rc = roll_below(d, 2) ? jemhooks_free(b->p) : jemhooks_free_sized(b->p, b->size);
    CHECK("free", !rc, "free of %zu bytes gave %d: %s", b->size, rc, jemhooks_last_error());
    b->p = NULL;
}

/* ---- the random load --------------------------------------------------------------------------------------------- */

static size_t check_all(void) {
    size_t registered = 0;
    for (int i = 0; i < ARENAS; i++) check_arena(arena[i], region_max, LARGEST + LARGEST / 4 + SLOT, &registered);
    jemhooks_null_stats n = null_stats(null);
    CHECK("errors", !n.errors, "the registrar saw %zu double or unknown registrations", (size_t)n.errors);
    CHECK("errors", n.live == registered, "the registrar holds %zu registrations, the arenas %zu", (size_t)n.live,
          registered);
    return registered;
}

/* Leaving an arena for a phase, so that its regions become idle. */
static void desert(block *blocks, int left, dice *d) {
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].p && (int)arena_index(&blocks[i]) == left) drop(&blocks[i], d);
}

static void *work(void *arg) {
    long me = (long)(intptr_t)arg;
    dice d = {(uint64_t)seed * 1000003 + (uint64_t)me};
    for (int phase = 0; phase < PHASES; phase++) {
        block *blocks = table[(me + phase) % WORKERS];
        int left = phase % 4 == 2 ? phase / 4 % ARENAS : -1;
        if (left >= 0) desert(blocks, left, &d);
        for (long i = 0; i < ops / WORKERS / PHASES + 1; i++) {
            block *b = &blocks[roll_below(&d, BLOCKS)];
            atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
            if (!roll_below(&d, 4000))
                CHECK("trim", !jemhooks_trim(arena[roll_below(&d, ARENAS)], NULL), "%s", jemhooks_last_error());
            if (!b->p) {
                if ((int)arena_index(b) != left) make(b, &d);
                continue;
            }
            inspect(b);
            if (roll_below(&d, 4)) drop(b, &d);
            else resize(b, &d);
        }
        pthread_barrier_wait(&turn);
        if (!me) check_all();
        pthread_barrier_wait(&turn);
    }
    return NULL;
}

static void create_arenas(void) {
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.registrars = &null;
    config.registrar_count = 1;
    config.policy = eager ? JEMHOOKS_EAGER : JEMHOOKS_LAZY;
    config.region_max = region_max;
    config.dirty_decay_ms = config.muzzy_decay_ms = decay;
    for (int i = 0; i < ARENAS; i++) {
        arena[i] = arena_of(&config);
        jemhooks_stats s = stats_of(arena[i]);
        CHECK("metadata", !s.regions && !s.committed, "a new arena has %zu regions with %zu bytes in use",
              (size_t)s.regions, (size_t)s.committed);
    }
}

static void trim_all(void) {
    for (int i = 0; i < ARENAS; i++) CHECK("trim", !jemhooks_trim(arena[i], NULL), "%s", jemhooks_last_error());
}

static void random_load(void) {
    pthread_t worker[WORKERS];
    create_arenas();
    pthread_barrier_init(&turn, NULL, WORKERS);
    for (long i = 0; i < WORKERS; i++) worker[i] = start_thread(work, (void *)(intptr_t)i);
    for (int i = 0; i < WORKERS; i++) join_thread(worker[i]);
    size_t registered = check_all();
    dice d = {1};
    for (int w = 0; w < WORKERS; w++)
        for (int i = 0; i < BLOCKS; i++)
            if (table[w][i].p) drop(&table[w][i], &d);
    trim_all();
    for (int i = 0; i < ARENAS; i++) check_idle(arena[i], !locked);
    check_all();
    jemhooks_stats s = stats_of(arena[0]);
    figure("ops", (double)atomic_load(&calls));
    figure("keys", (double)atomic_load(&keys));
    figure("regions", (double)s.regions);
    figure("mapped_mib", (double)(s.mapped >> 20));
    figure("registered_at_end", (double)registered);
    figure("registrations", (double)s.registrations);
    for (int i = 0; i < ARENAS; i++) arena_end(arena[i]);
    jemhooks_null_stats n = null_stats(null);
    CHECK("errors", !n.live && !n.errors, "after destroy %zu registrations are left, %zu errors", (size_t)n.live,
          (size_t)n.errors);
}

/* ---- what a load leaves behind ----------------------------------------------------------------------------------- */

/* The same work again and again needs no more address space, once the arenas have grown to it. */
static void flat(void) {
    enum { ROUNDS = 12 };
    long each = option("cycle_ops", 6000);
    size_t mapped[ROUNDS];
    create_arenas();
    for (long round = 0; round < ROUNDS; round++) {
        dice d = {(uint64_t)seed};
        for (long i = 0; i < each; i++) {
            block *b = &table[0][roll_below(&d, BLOCKS)];
            if (!b->p) make(b, &d);
            else drop(b, &d);
        }
        for (int i = 0; i < BLOCKS; i++)
            if (table[0][i].p) drop(&table[0][i], &d);
        trim_all();
        mapped[round] = stats_of(arena[0]).mapped + stats_of(arena[1]).mapped;
    }
    size_t half = mapped[ROUNDS / 2 - 1], all = mapped[ROUNDS - 1];
    CHECK("flat", all <= half + half / 8, "the same work took %zu bytes of address space in %d rounds and %zu in %d",
          half, ROUNDS / 2, all, ROUNDS);
    figure("flat_mib", (double)(all >> 20));
    check_all();
    for (int i = 0; i < ARENAS; i++) arena_end(arena[i]);
}

/* Many small extents: few regions, none above region_max; then one block above it. */
static void growth(void) {
    enum { COUNT = 2560 };
    static void *p[COUNT];
    const size_t most = 8 * MIB, each = 64 * KIB, large = 20 * MIB;
    size_t saved = region_max, registered = 0;
    region_max = most;
    create_arenas();
    for (int i = 0; i < COUNT; i++) p[i] = must_have(jemhooks_alloc(arena[0], each), "block");
    check_arena(arena[0], most, 0, &registered);
    jemhooks_stats s = stats_of(arena[0]);
    CHECK("regions", s.regions <= 2 * COUNT * each / most + 8, "%zu regions for %zu MiB, with region_max 8 MiB",
          (size_t)s.regions, COUNT * each / MIB);
    CHECK("waste", s.mapped <= COUNT * each * 5 / 4 + 2 * most, "%zu bytes mapped for %zu", (size_t)s.mapped,
          COUNT * each);
    char *big = must_have(jemhooks_alloc(arena[0], large), "block above region_max");
    CHECK("span", jemhooks_region_of(big) == jemhooks_region_of(big + large - 1),
          "a block above region_max is not in one region");
    check_arena(arena[0], most, large + large / 4, &registered);
    MUST(jemhooks_free(big));
    for (int i = 0; i < COUNT; i++) MUST(jemhooks_free(p[i]));
    figure("growth_regions", (double)s.regions);
    trim_all();
    check_idle(arena[0], !locked);
    for (int i = 0; i < ARENAS; i++) arena_end(arena[i]);
    region_max = saved;
}

/* What an alignment skips is not lost: smaller blocks fill it. */
static void aligned(void) {
    enum { ALIGNED = 50, SMALL = 700 };
    static void *p[ALIGNED + SMALL];
    const size_t each = 100 * KIB;
    create_arenas();
    for (int i = 0; i < ALIGNED + SMALL; i++)
        p[i] = must_have(jemhooks_aligned_alloc(arena[0], i < ALIGNED ? SLOT : 1, each), "block");
    size_t mapped = stats_of(arena[0]).mapped, most = ALIGNED * SLOT + SMALL * each / 2;
    CHECK("waste", mapped <= most || !jemalloc_at_least(5, 0), "%zu bytes mapped for %d blocks on 2 MiB and %d more, %zu bytes in all", mapped,
          ALIGNED, SMALL, (ALIGNED + SMALL) * each);
    for (int i = 0; i < ALIGNED + SMALL; i++) MUST(jemhooks_free(p[i]));
    figure("aligned_mib", (double)(mapped >> 20));
    for (int i = 0; i < ARENAS; i++) arena_end(arena[i]);
}

static int by_address(const void *a, const void *b) {
    const char *const *x = a, *const *y = b;
    return *x < *y ? -1 : *x > *y;
}

/* Blocks that fill regions, beside others that are free, grow. */
static void grow_at_neighbours(void) {
    enum { COUNT = 32 };
    char *p[COUNT];
    for (int i = 0; i < COUNT; i++) p[i] = must_have(jemhooks_alloc(arena[0], SLOT), "block");
    qsort(p, COUNT, sizeof p[0], by_address);
    for (int i = 1; i < COUNT; i += 2) MUST(jemhooks_free(p[i]));
    for (int i = 0; i < COUNT; i += 2) {
        p[i] = must_have(jemhooks_realloc(arena[0], p[i], 2 * SLOT), "grown block");
        CHECK("span", jemhooks_region_of(p[i]) == jemhooks_region_of(p[i] + 2 * SLOT - 1), "a block grew out of its region");
    }
    for (int i = 0; i < COUNT; i += 2) MUST(jemhooks_free(p[i]));
}

/* Neighbouring regions, all of their pages free, must not give a block that lies in two of them. */
static void neighbours(void) {
    enum { COUNT = 2000 };
    static void *p[COUNT];
    size_t saved = region_max, count, adjacent = 0;
    dice d = {(uint64_t)seed};
    region_max = SLOT;
    create_arenas();
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < COUNT; i++)
            p[i] = must_have(jemhooks_alloc(arena[0], 16 * KIB + roll_below(&d, 64 * KIB)), "block");
        for (int i = 0; i < COUNT; i++) MUST(jemhooks_free(p[i]));
        trim_all();
        for (int i = 0; i < 2 * BLOCKS; i++) {
            block *b = &table[0][roll_below(&d, 64) * ARENAS];
            size_t size = SLOT / 4 + roll_below(&d, 2 * SLOT);
            if (b->p) drop(b, &d);
            else own(b, jemhooks_alloc(arena[0], size), size, &d);
        }
        for (int i = 0; i < BLOCKS; i++)
            if (table[0][i].p) drop(&table[0][i], &d);
        grow_at_neighbours();
    }
    jemhooks_region_info *r = regions_of(arena[0], &count);
    for (size_t i = 1; i < count; i++) adjacent += r[i].base + r[i].length == r[i - 1].base;
    CHECK("setup", adjacent >= 20 || !side_by_side, "only %zu of %zu regions follow their neighbour", adjacent, count);
    figure("neighbours", (double)adjacent);
    free(r);
    for (int i = 0; i < ARENAS; i++) arena_end(arena[i]);
    region_max = saved;
}

/* A huge page holds more than its one block; when that is gone, so is the page. */
static void emptied(void) {
    jemhooks_arena *a = arena_on(NULL, NULL, 0);
    for (int i = 0; i < 20; i++) {
        char *p = must_have(jemhooks_alloc(a, 100 * KIB), "block");
        memset(p, 1, 100 * KIB);
        MUST(jemhooks_free(p));
        check_idle(a, !locked);
    }
    arena_end(a);
}

/* A free of 16 MiB must not give its pages up at once where free pages may stay for a while. */
static void oversize(void) {
    const size_t size = 16 * MIB;
    if (decay == 0 || !jemalloc_at_least(5, 3)) return;
    create_arenas();
    for (int i = 0; i < 20; i++) {
        char *p = must_have(jemhooks_alloc(arena[0], size), "block of 16 MiB");
        fill(p, size, 1);
        MUST(jemhooks_free(p));
        jemhooks_stats s = stats_of(arena[0]);
        CHECK("oversize", s.dirty >= size && s.committed >= size,
              "a free of 16 MiB left at once: %zu bytes dirty, %zu committed", (size_t)s.dirty, (size_t)s.committed);
    }
    for (int i = 0; i < ARENAS; i++) arena_end(arena[i]);
}

/* Destroying an arena that has live blocks changes nothing. */
static void busy_destroy(void) {
    dice d = {7};
    create_arenas();
    block *b = &table[0][0], *c = &table[0][2];
    make(b, &d);
    make(c, &d);
    get_key(b);
    size_t before_count, after_count;
    jemhooks_region_info *before = regions_of(arena[0], &before_count);
    int rc = jemhooks_arena_destroy(arena[0]);
    CHECK("busy", rc == -EBUSY && jemhooks_last_error_kind() == JEMHOOKS_ERROR_BUSY, "destroy with live blocks gave %d",
          rc);
    jemhooks_region_info *after = regions_of(arena[0], &after_count);
    CHECK("busy", before_count == after_count, "%zu regions before a refused destroy, %zu after", before_count,
          after_count);
    for (size_t i = 0; i < before_count && i < after_count; i++)
        CHECK("busy",
              before[i].base == after[i].base && before[i].generation == after[i].generation &&
                  before[i].state == after[i].state && before[i].lkey == after[i].lkey,
              "a refused destroy changed the region at %#zx", (size_t)before[i].base);
    inspect(b);
    resize(c, &d);
    drop(c, &d);
    inspect(b);
    CHECK("busy", jemhooks_arena_destroy(arena[0]) == -EBUSY, "destroy with one live block succeeded");
    drop(b, &d);
    for (int i = 0; i < ARENAS; i++) arena_end(arena[i]);
    free(before);
    free(after);
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"random", random_load},
                                      {"flat", flat},
                                      {"growth", growth},
                                      {"aligned", aligned},
                                      {"neighbours", neighbours},
                                      {"oversize", oversize},
                                      {"emptied", emptied},
                                      {"busy", busy_destroy},
                                      {NULL, NULL}};
    take_options(argc, argv);
    ops = option("ops", 400000);
    seed = option("seed", 1);
    decay = option("decay", JEMHOOKS_DECAY_DEFAULT);
    region_max = (size_t)option("region_max", 64) * MIB;
    eager = !strcmp(option_text("policy", "lazy"), "eager");
    locked = option("mlockall", 0);
    null = null_open(NULL);
    side_by_side = place_side_by_side();
    if (locked) must(mlockall(MCL_CURRENT | MCL_FUTURE), "mlockall (needs CAP_IPC_LOCK)", __FILE__, __LINE__);
    return run_cases(cases);
}
