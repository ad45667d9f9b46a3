/* chunks.c - the chunk hooks of jemalloc 4, called as jemalloc 4 calls them, on a machine that has another jemalloc. A model of its arenas
 * asks the hooks for memory, commits, decommits, purges, splits and merges it, in these orders and ranges:
 *   chunk taken up          chunk.c chunk_recycle(), chunk_alloc_wrapper(): from those put aside (split; committed whole, if they are
 *                           not) or from alloc; arena.c arena_chunk_alloc_internal_hard(): then its first pages are committed
 *   run taken, run free     arena.c arena_run_split_large_helper(), arena_run_dalloc(), arena_run_coalesce()
 *   chunk empty             arena.c arena_chunk_dalloc(): it is the spare, and the last spare is put aside; arena_chunk_discard():
 *                           the first pages are decommitted, if the first run is
 *   chunk put aside         chunk.c chunk_record(): merged with its neighbours of the same kind
 *   purge                   arena.c arena_stash_dirty(): a chunk put aside is taken up once more; arena_purge_stashed(): runs are
 *                           decommitted, else purged; arena_unstash_purged(), chunk.c chunk_dalloc_wrapper(): dalloc
 *   large blocks            huge.c huge_palloc(), huge_dalloc(), huge_ralloc_no_move_shrink() (purge is told a size that is too large),
 *                           arena.c arena_chunk_ralloc_huge_expand()
 * Until 4.2 a chunk that was put aside counts as committed when it is taken up; from 4.3 on only if it was (option recommits).
 *     test_chunks [case=…] ops=30000 seed=1
 * Concurrency: one thread for each of two arenas over one space; jemalloc 4 holds a lock of the arena during most of these calls, which
 * the hooks never wait for, so that they may run on several threads at once is what matters.                        */
#include "check.h"
#include "placement.h"

#include "allocator/jemalloc/jemalloc.h"

#define CHUNK (2 * MIB)
#define PAGES (CHUNK / PAGE)
#define RECORDS 13 /* pages */
#define CHUNKS 512
#define BLOCKS 300

enum state { DECOMMITTED, CLEAN, DIRTY, USED };
enum kind { NONE, RUNS, HUGE, ASIDE };

typedef struct chunk {
    enum kind kind;
    char *base;
    size_t size;     /* bytes */
    bool committed;  /* ASIDE */
    uint8_t page[PAGES];
} chunk;

typedef struct block {
    chunk *in;       /* NULL: none */
    size_t first, size;
    uint64_t tag;
} block;

typedef struct model {
    unsigned index;
    jh_shard shard;
    bool recommits;
    dice d;
    chunk chunks[CHUNKS], stashed[CHUNKS];
    chunk *spare;
    block blocks[BLOCKS];
    uint64_t tags;
} model;

static const jh_chunk_hooks *const hooks = &jh_chunk_hooks_4;
static jemhooks_arena *arena;
static jemhooks_registrar *registrar; /* of our own: a program linked statically finds no modules here */

/* Whatever jemalloc does not hold a peer may write to, once the region is registered. */
static void scribble(char *p, size_t size) {
    const jemhooks_region *r = must_have(jemhooks_region_of(p), "region");
    if ((__atomic_load_n(&r->word, __ATOMIC_ACQUIRE) & 255) == JEMHOOKS_REGISTERED) memset(p, 0x5a, size);
}

static chunk *new_chunk(model *m, enum kind kind, char *base, size_t size, bool committed) {
    chunk *c = m->chunks;
    while (c < m->chunks + CHUNKS && c->kind != NONE) c++;
    if (c == m->chunks + CHUNKS) violated("setup", "the model has too few chunks"), exit(1);
    *c = (chunk){kind, base, size, committed, {0}};
    return c;
}

/* ---- chunks put aside, and taken up again -------------------------------------------------------------------------- */

static chunk *aside_at(model *m, const char *base, bool begins) {
    for (chunk *c = m->chunks; c < m->chunks + CHUNKS; c++)
        if (c->kind == ASIDE && (begins ? c->base : c->base + c->size) == base) return c;
    return NULL;
}

static void put_aside(model *m, char *base, size_t size, bool committed) {
    chunk *next = aside_at(m, base + size, true), *prev = aside_at(m, base, false);
    chunk *c = new_chunk(m, ASIDE, base, size, committed);
    if (next && next->committed == committed && !hooks->merge(base, size, next->base, next->size, false, m->index)) {
        c->size += next->size;
        next->kind = NONE;
    }
    if (prev && prev->committed == committed && !hooks->merge(prev->base, prev->size, base, size, false, m->index)) {
        prev->size += c->size;
        c->kind = NONE;
    }
    const jemhooks_region *r = jemhooks_region_of(base);
    for (c = m->chunks; c < m->chunks + CHUNKS; c++)
        if (c->kind == ASIDE)
            CHECK("span", jemhooks_region_of(c->base) == jemhooks_region_of(c->base + c->size - 1),
                  "chunks of two regions were joined, one of them that at %#zx", (size_t)r->base);
}

/* From those put aside: at `at`, or the smallest. NULL: there is none. */
static char *recycle(model *m, char *at, size_t size, bool *commit) {
    chunk *best = NULL;
    for (chunk *c = m->chunks; c < m->chunks + CHUNKS; c++)
        if (c->kind == ASIDE && c->size >= size && (at ? c->base == at : !best || c->size < best->size)) best = c;
    if (!best) return NULL;
    char *p = best->base;
    bool committed = best->committed;
    if (best->size > size) {
        CHECK("split", !hooks->split(p, best->size, size, best->size - size, false, m->index), "a chunk may not be split");
        best->base += size;
        best->size -= size;
    } else {
        best->kind = NONE;
    }
    if (committed) *commit = true;
    else CHECK("commit", !hooks->commit(p, size, 0, size, m->index), "a chunk cannot be committed");
    if (!m->recommits) *commit = true;
    return p;
}

static char *take_chunk(model *m, size_t size, bool *zero, bool *commit) {
    bool order = *zero;
    char *p = recycle(m, NULL, size, commit);
    if (p && order) memset(p, 0, size);
    if (p) return p;
    p = must_have(hooks->alloc(NULL, size, CHUNK, zero, commit, m->index), "chunk");
    CHECK("span", jemhooks_region_of(p) == jemhooks_region_of(p + size - 1), "a chunk lies in two regions");
    CHECK("alignment", !((uintptr_t)p % CHUNK), "a chunk lies at %p", (void *)p);
    if (*commit && *zero) CHECK("zero", all_zero(p, size), "a chunk said to be zero is not");
    return p;
}

/* ---- runs -------------------------------------------------------------------------------------------------------- */

static chunk *new_runs(model *m) {
    bool zero = false, commit = false;
    chunk *c = m->spare;
    m->spare = NULL;
    if (c) return c;
    size_t held = atomic_load(&m->shard.chunks);
    char *p = take_chunk(m, CHUNK, &zero, &commit);
    bool asked = atomic_load(&m->shard.chunks) != held;
    if (asked && !commit) CHECK("commit", !hooks->commit(p, CHUNK, 0, RECORDS * PAGE, m->index), "the records cannot be committed");
    fill(p, RECORDS * PAGE, (uintptr_t)p);
    c = new_chunk(m, RUNS, p, CHUNK, commit);
    memset(c->page + RECORDS, commit ? CLEAN : DECOMMITTED, PAGES - RECORDS);
    return c;
}

/* A free run of n pages that are all alike; PAGES: none. */
static size_t find_run(const chunk *c, size_t n) {
    for (size_t a = RECORDS, b; a < PAGES; a = b) {
        for (b = a; b < PAGES && c->page[b] == c->page[a]; b++) {}
        if (c->page[a] != USED && b - a >= n) return a;
    }
    return PAGES;
}

static void take_run(model *m, block *b, size_t n) {
    chunk *c = m->chunks;
    size_t first = PAGES;
    for (; c < m->chunks + CHUNKS; c++)
        if (c->kind == RUNS && c != m->spare && (first = find_run(c, n)) < PAGES) break;
    if (first == PAGES) first = find_run(c = new_runs(m), n);
    char *p = c->base + first * PAGE;
    if (c->page[first] == DECOMMITTED) {
        scribble(p, n * PAGE);
        CHECK("commit", !hooks->commit(c->base, CHUNK, first * PAGE, n * PAGE, m->index), "a run cannot be committed");
        CHECK("zero", all_zero(p, n * PAGE), "a run of %zu pages that was decommitted is not zero", n);
    }
    memset(c->page + first, USED, n);
    *b = (block){c, first, n * PAGE, ++m->tags};
    fill(p, b->size, b->tag);
}

/* Puts an empty chunk aside. */
static void discard(model *m, chunk *c) {
    bool committed = c->page[RECORDS] != DECOMMITTED;
    CHECK("records", filled(c->base, RECORDS * PAGE, RECORDS * PAGE, (uintptr_t)c->base), "a chunk's records are lost");
    if (!committed) hooks->decommit(c->base, CHUNK, 0, RECORDS * PAGE, m->index);
    c->kind = NONE;
    put_aside(m, c->base, CHUNK, committed);
}

static void emptied(model *m, chunk *c) {
    if (c == m->spare || find_run(c, PAGES - RECORDS) == PAGES) return;
    chunk *last = m->spare;
    m->spare = c;
    if (last) discard(m, last);
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static char *at(const block *b) {
    return b->in->base + b->first * PAGE;
}

static void inspect(const block *b) {
    CHECK("content", filled(at(b), b->size, b->size, b->tag), "a block of %zu bytes lost its contents", b->size);
}

static void take_huge(model *m, block *b, size_t size, bool zero) {
    bool order = zero, commit = true;
    jh_this_runs = false;
    char *p = take_chunk(m, size, &zero, &commit);
    jh_this_runs = m->recommits;
    if (order) CHECK("zero", all_zero(p, size), "a large block is not zero");
    *b = (block){new_chunk(m, HUGE, p, size, true), 0, size, ++m->tags};
    fill(p, size, b->tag);
}

static void drop(model *m, block *b) {
    inspect(b);
    chunk *c = b->in;
    b->in = NULL;
    if (c->kind == HUGE) {
        c->kind = NONE;
        put_aside(m, c->base, c->size, true);
        return;
    }
    memset(c->page + b->first, DIRTY, b->size / PAGE);
    emptied(m, c);
}

/* In place, a large block to `size`. */
static void resize(model *m, block *b, size_t size) {
    chunk *c = b->in;
    char *end = c->base + c->size;
    if (size < c->size) {
        CHECK("split", !hooks->split(c->base, c->size, size, c->size - size, true, m->index), "a large block may not be split");
        CHECK("purge", hooks->purge(c->base + size, c->size, 0, c->size - size, m->index), "a purge promises zeroes");
        put_aside(m, c->base + size, c->size - size, true);
    } else {
        size_t more = size - c->size;
        bool zero = false, commit = true;
        jh_this_runs = false;
        char *p = recycle(m, end, more, &commit);
        if (!p) p = hooks->alloc(end, more, CHUNK, &zero, &commit, m->index);
        jh_this_runs = m->recommits;
        if (!p) return;
        CHECK("in_place", p == end, "asked for %p, alloc gave %p", (void *)end, (void *)p);
        if (hooks->merge(c->base, c->size, p, more, true, m->index)) {
            CHECK("merge", jemhooks_region_of(p) != jemhooks_region_of(c->base), "a block may not grow into its own region");
            CHECK("dalloc", !hooks->dalloc(p, more, true, m->index), "dalloc does not take a chunk back");
            return;
        }
    }
    inspect(b);
    c->size = b->size = size;
    fill(c->base, size, b->tag);
}

static void purge(model *m) {
    chunk *stashed = m->stashed;
    size_t n = 0;
    jh_this_runs = roll_below(&m->d, 2); /* one of ours, or anybody's */
    for (chunk *c = m->chunks; c < m->chunks + CHUNKS; c++) {
        if (c->kind != ASIDE) continue;
        if (!c->committed) CHECK("commit", !hooks->commit(c->base, c->size, 0, c->size, m->index), "a chunk cannot be committed");
        stashed[n++] = *c;
        c->kind = NONE;
    }
    for (chunk *c = m->chunks; c < m->chunks + CHUNKS; c++) {
        if (c->kind != RUNS) continue;
        for (size_t a = RECORDS, b; a < PAGES; a = b) {
            for (b = a; b < PAGES && c->page[b] == c->page[a]; b++) {}
            if (c->page[a] != DIRTY) continue;
            bool kept = hooks->decommit(c->base, CHUNK, a * PAGE, (b - a) * PAGE, m->index);
            if (kept) CHECK("purge", hooks->purge(c->base, CHUNK, a * PAGE, (b - a) * PAGE, m->index), "a purge promises zeroes");
            memset(c->page + a, kept ? CLEAN : DECOMMITTED, b - a);
        }
        emptied(m, c);
    }
    for (size_t i = 0; i < n; i++)
        CHECK("dalloc", !hooks->dalloc(stashed[i].base, stashed[i].size, stashed[i].committed, m->index),
              "dalloc does not take a chunk back");
    jh_this_runs = m->recommits;
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static model *new_model(unsigned index, bool recommits) {
    model *m = must_have(calloc(1, sizeof *m), "model");
    m->index = index;
    m->recommits = recommits;
    m->d.state = (uint64_t)option("seed", 1) + index;
    m->shard.space = (jh_space *)arena; /* its first member */
    m->shard.index = index;
    jh_chunk_hooks_bind(index, &m->shard);
    return m;
}

static void step(model *m) {
    block *b = &m->blocks[roll_below(&m->d, BLOCKS)];
    size_t size = (1 + roll_below(&m->d, 4)) * CHUNK;
    if (!roll_below(&m->d, 200)) purge(m);
    else if (b->in && b->in->kind == HUGE && roll_below(&m->d, 2)) size == b->size ? inspect(b) : resize(m, b, size);
    else if (b->in) drop(m, b);
    else if (!roll_below(&m->d, 20)) take_huge(m, b, size, roll_below(&m->d, 2));
    else take_run(m, b, 1 + roll_below(&m->d, roll_below(&m->d, 10) ? 16 : 200));
    jemhooks_key key;
    if (b->in && !roll_below(&m->d, 50)) MUST(jemhooks_get_key(at(b), &key));
}

/* Frees all that is left, and purges until that changes nothing any more. What is busy then is the spare, unless it was decommitted. */
static void empty(model *m) {
    for (block *b = m->blocks; b < m->blocks + BLOCKS; b++)
        if (b->in) drop(m, b);
    for (int i = 0; i < 3; i++) purge(m);
    for (chunk *c = m->chunks; c < m->chunks + CHUNKS; c++)
        CHECK("kept", c->kind == NONE || c == m->spare, "a chunk that no block lies in is never given back");
}

/* As arena.<i>.reset does. */
static void end(model *m) {
    empty(m);
    if (m->spare) discard(m, m->spare);
    m->spare = NULL;
    purge(m);
    CHECK("kept", !atomic_load(&m->shard.chunks), "%zu bytes of chunks were not given back", atomic_load(&m->shard.chunks));
    jh_chunk_hooks_bind(m->index, NULL);
    free(m);
}

static void *work(void *p) {
    model *m = p;
    jh_this_runs = m->recommits;
    for (long i = option("ops", 30000); i-- && !anything_violated();) step(m);
    end(m);
    jh_this_runs = false;
    return NULL;
}

static int register_memory(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    (void)self, (void)address, (void)length, (void)access;
    mr->lkey = mr->rkey = 7;
    return 0;
}

static int deregister_memory(void *self, jemhooks_mr *mr) {
    (void)self, (void)mr;
    return 0;
}

static void create(void) {
    static const jemhooks_registrar_ops ops = {
        .size = sizeof ops, .name = "ours", .register_memory = register_memory, .deregister_memory = deregister_memory};
    MUST(jemhooks_registrar_create(&ops, NULL, &registrar));
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.registrars = &registrar;
    config.registrar_count = 1;
    config.region_max = 16 * MIB;
    arena = arena_of(&config);
}

static void destroy(void) {
    CHECK("idle", !stats_of(arena).committed, "%zu bytes are still committed", (size_t)stats_of(arena).committed);
    size_t count;
    bool zero = false, commit = false;
    jemhooks_region_info *r = regions_of(arena, &count);
    for (size_t i = 0; i < count; i++) jh_space_carve((jh_space *)arena, r[i].length, CHUNK, &zero, &commit);
    size_t now = stats_of(arena).regions;
    CHECK("gaps", now == count, "of %zu regions that were all given back, %zu cannot be had in one piece", count, now - count);
    free(r);
    arena_end(arena);
    jemhooks_registrar_close(registrar);
}

/* Two arenas of one kind, each on a thread. */
static void load(bool recommits) {
    create();
    pthread_t thread[2];
    for (unsigned i = 0; i < 2; i++) thread[i] = start_thread(work, new_model(3000 + i, recommits));
    for (unsigned i = 0; i < 2; i++) join_thread(thread[i]);
    destroy();
}

static void until_4_2(void) {
    load(false);
}

static void from_4_3(void) {
    load(true);
}

/* A chunk that is empty again leaves its region idle, though jemalloc keeps it as its spare, with its records. */
static void spare(void) {
    create();
    model *m = new_model(3000, true);
    block b = {0};
    jemhooks_key key;
    jh_this_runs = true;
    take_run(m, &b, 20);
    MUST(jemhooks_get_key(at(&b), &key));
    char *p = at(&b);
    drop(m, &b);
    purge(m);
    jemhooks_region_info info = region_at(arena, p);
    CHECK("idle", m->spare && !info.committed, "%zu bytes are busy beside the records of a spare chunk", (size_t)info.committed);
    size_t released = 0;
    MUST(jemhooks_trim(arena, &released));
    CHECK("idle", released, "the region of a spare chunk is not deregistered");
    CHECK("records", filled(m->spare->base, RECORDS * PAGE, RECORDS * PAGE, (uintptr_t)m->spare->base), "a spare chunk's records are lost");
    end(m);
    destroy();
}

/* The chunk of a large block that is used for runs while it is still committed: that its records are some shows when a run goes. */
static void reused(void) {
    create();
    model *m = new_model(3000, true);
    block small = {0}, huge = {0}, run = {0};
    jh_this_runs = true;
    take_run(m, &small, 20);
    take_huge(m, &huge, CHUNK, false);
    drop(m, &huge);
    take_run(m, &run, PAGES - RECORDS);
    drop(m, &small);
    purge(m); /* whose chunk now is the spare */
    drop(m, &run);
    purge(m);
    CHECK("idle", !stats_of(arena).committed, "%zu bytes are busy beside the records of a spare chunk", (size_t)stats_of(arena).committed);
    end(m);
    destroy();
}

/* A chunk that was put aside uncommitted is taken up again: its runs are committed one by one, and it is given back when they are free. */
static void taken_up(void) {
    enum { MANY = 300 };
    create();
    model *m = new_model(3000, true);
    block b[4] = {{0}};
    jh_this_runs = true;
    for (int i = 0; i < 3; i++) take_run(m, &b[i], MANY);
    for (int i = 0; i < 3; i++) drop(m, &b[i]);
    purge(m);
    jh_this_runs = true;
    for (int i = 0; i < 2; i++) take_run(m, &b[i], MANY);
    size_t most = 2 * MANY * PAGE;
    CHECK("account", stats_of(arena).committed <= most, "%zu bytes are committed for %zu", (size_t)stats_of(arena).committed, most);
    for (int i = 0; i < 2; i++) drop(m, &b[i]);
    end(m);
    destroy();
}

static const test_case cases[] = {
    {"until_4_2", until_4_2}, {"from_4_3", from_4_3}, {"spare", spare}, {"reused", reused}, {"taken_up", taken_up},
    {NULL, NULL}};

int main(int argc, char **argv) {
    take_options(argc, argv);
    place_side_by_side();
    return run_cases(cases);
}
