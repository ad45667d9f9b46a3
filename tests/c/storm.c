/* storm.c - really pinned memory (io_uring) under load: a device writes through the pinned pages into live blocks while
 * their owners allocate, change, resize and free others and trim, so that pages are given up and regions registered and
 * deregistered all the time. What the device wrote is what the CPU must read; zeroed blocks are zero; and at rest just
 * the registered bytes are pinned. At rest the device also writes to all registered memory that no block lies in, as
 * a peer with the key might.
 *     test_storm ops=100000 seed=1 huge=0|1 limit=0
 * With limit (MiB) no more may be registered at a time, and regions are evicted all the time, with blocks in them, too: so
 * the device leases what it writes to.
 * Concurrency: two owners and a device; with a limit one more looks at what is pinned. A block is its owner's unless `state`
 * is SENT: then it is the device's, which gives it back with DONE. From barrier to barrier the owners swap tables; at each
 * the device is idle.                                                                                                */
#include "check.h"
#include "jemhooks_uring.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#define OWNERS 2
#define ARENAS 2
#define BLOCKS 800
#define PHASES 12
#define PATTERN (16 * MIB)
#define LARGEST (4 * MIB)
#define QUEUE 32
#define REGION_MAX (8 * MIB)

enum { FREE, OWNED, SENT, DONE };

typedef struct block {
    atomic_int state;
    unsigned char *p;
    size_t size, offset; /* its contents: the pattern from offset on */
    unsigned arena;
    bool keyed;
    jemhooks_key key;
} block;

static jemhooks_registrar *uring;
static jemhooks_arena *arena[ARENAS];
static block table[OWNERS][BLOCKS];
static pthread_barrier_t turn;
static int pattern_file;
static unsigned char *pattern;
static long ops, seed, huge, limit;
static struct {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    block *block[QUEUE];
    size_t head, tail;
    bool closed;
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER, .filled = PTHREAD_COND_INITIALIZER};
static atomic_ulong operations, transfers, refusals, beyond;
static atomic_bool over;

/* ---- the device -------------------------------------------------------------------------------------------------- */

static void transfer(void *p, size_t size, size_t offset, const jemhooks_key *key) {
    const jemhooks_region *r = jemhooks_region_of(p);
    if (!CHECK("span", r, "a live block is in no region")) return;
    jemhooks_uring_transfer t = {.fd = pattern_file,
                                 .slot = (uint32_t)key->lkey,
                                 .base = r->base,
                                 .address = (uintptr_t)p,
                                 .length = size,
                                 .file_offset = offset};
    int64_t moved = jemhooks_uring_read(uring, &t);
    CHECK("device", moved == (int64_t)size, "the device wrote %lld of %zu bytes: %s", (long long)moved, size,
          jemhooks_last_error());
}

static void *device(void *arg) {
    for (;;) {
        pthread_mutex_lock(&queue.lock);
        while (queue.head == queue.tail && !queue.closed) pthread_cond_wait(&queue.filled, &queue.lock);
        if (queue.head == queue.tail) break;
        block *b = queue.block[queue.head++ % QUEUE];
        pthread_mutex_unlock(&queue.lock);
        jemhooks_key key;
        int rc = limit ? jemhooks_lease(b->p, &key) : jemhooks_get_key(b->p, &key);
        if (rc && limit && jemhooks_last_error_kind() == JEMHOOKS_ERROR_PIN_LIMIT) {
            memcpy(b->p, pattern + b->offset, b->size); /* a block beyond the limit */
            atomic_fetch_add(&refusals, 1);
            atomic_store_explicit(&b->state, DONE, memory_order_release);
            continue;
        }
        CHECK("key", !rc, "no key: %s", jemhooks_last_error());
        CHECK("key", rc || !b->keyed || (key.generation == b->key.generation && key.lkey == b->key.lkey),
              "the key of a live block changed");
        if (!rc) transfer(b->p, b->size, b->offset, &key);
        if (!rc && limit) MUST(jemhooks_release(b->p));
        atomic_fetch_add(&transfers, 1);
        atomic_store_explicit(&b->state, DONE, memory_order_release);
    }
    pthread_mutex_unlock(&queue.lock);
    return arg;
}

static bool send(block *b) {
    pthread_mutex_lock(&queue.lock);
    bool room = queue.tail - queue.head < QUEUE;
    if (room) {
        atomic_store(&b->state, SENT);
        queue.block[queue.tail++ % QUEUE] = b;
        pthread_cond_signal(&queue.filled);
    }
    pthread_mutex_unlock(&queue.lock);
    return room;
}

/* ---- an owner ---------------------------------------------------------------------------------------------------- */

static size_t random_size(dice *d) {
    size_t x = roll_below(d, 17), y = roll_below(d, 17), size = (size_t)64 << (x < y ? x : y);
    size += roll_below(d, size);
    return size < LARGEST ? size : LARGEST;
}

static void take_back(block *b) {
    if (atomic_load_explicit(&b->state, memory_order_acquire) != DONE) return;
    CHECK("stale", !memcmp(b->p, pattern + b->offset, b->size),
          "the CPU does not see what the device wrote to %zu bytes", b->size);
    memcpy(b->p, pattern + b->offset, b->size);
    atomic_store(&b->state, OWNED);
}

static void own(block *b, void *p, size_t size, size_t offset) {
    b->p = p;
    b->size = size;
    b->offset = offset;
    b->keyed = false;
    memcpy(p, pattern + offset, size);
    atomic_store(&b->state, OWNED);
    CHECK("span", jemhooks_region_of(p) && jemhooks_region_of(p) == jemhooks_region_of(b->p + size - 1),
          "a block of %zu bytes does not lie in one region", size);
}

static void make(block *b, dice *d) {
    size_t size = random_size(d), kind = roll_below(d, 8);
    void *p;
    if (kind < 4) p = jemhooks_calloc(arena[b->arena], size, 1);
    else if (kind < 7) p = jemhooks_alloc(arena[b->arena], size);
    else p = jemhooks_aligned_calloc(arena[b->arena], (size_t)4096 << roll_below(d, 10), 1, size);
    if (!CHECK("alloc", p, "no memory for %zu bytes: %s", size, jemhooks_last_error())) return;
    if (kind < 4 || kind == 7) CHECK("zero", all_zero(p, size), "a zeroed block of %zu bytes is not zero", size);
    own(b, p, size, roll_below(d, PATTERN - LARGEST));
    if (limit || roll_below(d, 4)) return;
    b->keyed = CHECK("key", !jemhooks_get_key(b->p, &b->key), "no key: %s", jemhooks_last_error());
}

static void resize(block *b, dice *d) {
    size_t size = random_size(d), keep = size < b->size ? size : b->size;
    unsigned char *p = jemhooks_realloc(arena[b->arena], b->p, size);
    if (!CHECK("alloc", p, "no memory for %zu bytes: %s", size, jemhooks_last_error())) return;
    CHECK("content", !memcmp(p, pattern + b->offset, keep), "realloc from %zu to %zu bytes lost contents", b->size,
          size);
    own(b, p, size, b->offset);
}

static void drop(block *b) {
    CHECK("content", !memcmp(b->p, pattern + b->offset, b->size), "a live block of %zu bytes lost its contents",
          b->size);
    CHECK("free", !jemhooks_free(b->p), "%s", jemhooks_last_error());
    atomic_store(&b->state, FREE);
}

/* Frees what there is in one arena, so that its regions become idle. */
static void leave(block *blocks, unsigned index) {
    for (block *b = blocks; b < blocks + BLOCKS; b++) {
        while (atomic_load_explicit(&b->state, memory_order_acquire) == SENT) sched_yield();
        take_back(b);
        if (b->arena == index && atomic_load(&b->state) == OWNED) drop(b);
    }
    CHECK("trim", !jemhooks_trim(arena[index], NULL), "%s", jemhooks_last_error());
}

static void step(block *b, int left, dice *d) {
    take_back(b);
    int state = atomic_load(&b->state);
    size_t what = roll_below(d, 8);
    if (state == SENT) return;
    if (state == FREE) {
        if ((int)b->arena != left) make(b, d);
    } else if (what < 3) {
        b->offset = roll_below(d, PATTERN - LARGEST);
        if (!send(b)) memcpy(b->p, pattern + b->offset, b->size);
    } else if (what == 3) {
        resize(b, d);
    } else {
        drop(b);
    }
}

/* ---- at rest ----------------------------------------------------------------------------------------------------- */

static int by_address(const void *a, const void *b) {
    const block *x = *(block *const *)a, *y = *(block *const *)b;
    return x->p < y->p ? -1 : x->p > y->p;
}

/* The device writes to every byte of registered memory that lies in no block. */
static void write_beyond(void) {
    static block *live[OWNERS * BLOCKS];
    size_t n = 0, count;
    for (block *b = &table[0][0]; b < &table[0][0] + OWNERS * BLOCKS; b++)
        if (atomic_load(&b->state) != FREE) live[n++] = b;
    qsort(live, n, sizeof live[0], by_address);
    for (int i = 0; i < ARENAS; i++) {
        jemhooks_region_info *r = regions_of(arena[i], &count);
        for (size_t k = 0; k < count; k++) {
            if (r[k].state != JEMHOOKS_REGISTERED) continue;
            jemhooks_key key = {.lkey = r[k].lkey};
            uintptr_t at = r[k].base, end = at + r[k].length;
            for (size_t b = 0; b <= n; b++) {
                uintptr_t stop = b < n && (uintptr_t)live[b]->p < end ? (uintptr_t)live[b]->p : end;
                for (size_t room; at < stop && (room = beside_records(&at, stop)); at += room) {
                    transfer((void *)at, room, 0, &key);
                    atomic_fetch_add(&beyond, room);
                }
                if (stop == end) break;
                if (stop >= at) at = stop + jemhooks_usable_size(live[b]->p);
            }
        }
        free(r);
    }
}

/* With huge pages whole ones count as pinned. */
static void check_registered_pinned(void) {
    size_t registered = 0;
    for (int i = 0; i < ARENAS; i++) registered += stats_of(arena[i]).registered;
    if (!huge) check_pinned("at rest", registered);
}

static void at_rest(void) {
    size_t registered = 0;
    for (int i = 0; i < ARENAS; i++) check_arena(arena[i], REGION_MAX, LARGEST + LARGEST / 4 + SLOT, &registered);
    check_registered_pinned();
    write_beyond();
}

static void *work(void *arg) {
    long me = (long)(intptr_t)arg;
    dice d = {(uint64_t)seed * 1000003 + (uint64_t)me};
    for (int phase = 0; phase < PHASES; phase++) {
        block *blocks = table[(me + phase) % OWNERS];
        int left = -1;
        for (long i = 0; i < ops / OWNERS / PHASES + 1; i++) {
            if (!roll_below(&d, 1500)) {
                left = (int)roll_below(&d, ARENAS + 1) - 1;
                if (left >= 0) leave(blocks, (unsigned)left);
            }
            if (!roll_below(&d, 1000))
                CHECK("trim", !jemhooks_trim(arena[roll_below(&d, ARENAS)], NULL), "%s", jemhooks_last_error());
            step(&blocks[roll_below(&d, BLOCKS)], left, &d);
            atomic_fetch_add_explicit(&operations, 1, memory_order_relaxed);
        }
        for (block *b = blocks; b < blocks + BLOCKS; b++) {
            while (atomic_load_explicit(&b->state, memory_order_acquire) == SENT) sched_yield();
            take_back(b);
        }
        pthread_barrier_wait(&turn);
        if (!me) at_rest();
        pthread_barrier_wait(&turn);
    }
    return NULL;
}

/* What the kernel says is pinned never exceeds the limit. */
static void *watch(void *arg) {
    long most = 0;
    while (!atomic_load(&over)) {
        long pinned = status_kib("VmPin");
        if (pinned > most) most = pinned;
    }
    CHECK("limit", most <= limit * 1024, "%ld KiB were pinned, with a limit of %ld MiB", most, limit);
    CHECK("setup", most > limit * 1024 / 2, "only %ld KiB were ever pinned", most);
    return arg;
}

static void create_arenas(void) {
    jemhooks_anonymous_config pages = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    pages.transparent_huge = (int)huge;
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    MUST(jemhooks_provider_anonymous(&pages, &config.provider));
    config.registrars = &uring;
    config.registrar_count = 1;
    config.region_max = REGION_MAX;
    config.dirty_decay_ms = config.muzzy_decay_ms = 0;
    if (limit) {
        config.evict = JEMHOOKS_EVICT_UNLEASED;
        MUST(jemhooks_budget_set(jemhooks_registrar_budget(uring), (uint64_t)limit * MIB, JEMHOOKS_UNLIMITED));
    }
    arena[0] = arena_of(&config);
    config.dirty_decay_ms = 2;
    config.muzzy_decay_ms = 10000;
    arena[1] = arena_of(&config);
    jemhooks_provider_close(config.provider);
}

static void storm(void) {
    pthread_t owner[OWNERS], controller = start_thread(device, NULL), watcher = controller;
    create_arenas();
    if (limit) watcher = start_thread(watch, NULL);
    for (int t = 0; t < OWNERS; t++)
        for (unsigned i = 0; i < BLOCKS; i++) table[t][i].arena = i % ARENAS;
    pthread_barrier_init(&turn, NULL, OWNERS);
    for (long i = 0; i < OWNERS; i++) owner[i] = start_thread(work, (void *)(intptr_t)i);
    for (int i = 0; i < OWNERS; i++) join_thread(owner[i]);
    pthread_mutex_lock(&queue.lock);
    queue.closed = true;
    pthread_cond_signal(&queue.filled);
    pthread_mutex_unlock(&queue.lock);
    join_thread(controller);
    atomic_store(&over, true);
    if (limit) join_thread(watcher);
    uint64_t registrations = 0, evictions = 0;
    for (unsigned i = 0; i < ARENAS; i++) {
        leave(table[0], i);
        leave(table[1], i);
        check_idle(arena[i], true);
        registrations += stats_of(arena[i]).registrations;
        evictions += stats_of(arena[i]).evictions;
    }
    check_registered_pinned();
    for (int i = 0; i < ARENAS; i++) arena_end(arena[i]);
    figure("ops", (double)atomic_load(&operations));
    figure("transfers", (double)atomic_load(&transfers));
    figure("registrations", (double)registrations);
    if (limit) figure("evictions", (double)evictions);
    if (limit) figure("refusals", (double)atomic_load(&refusals));
    figure("mib_beyond_blocks", (double)(atomic_load(&beyond) >> 20));
    CHECK("setup", !limit || (evictions > 200 && atomic_load(&refusals) < atomic_load(&transfers) / 4),
          "too little was evicted, or too much refused, to show anything");
    CHECK("setup", registrations > 20 && atomic_load(&transfers) > 1000, "too little happened to show anything");
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"storm", storm}, {NULL, NULL}};
    take_options(argc, argv);
    ops = option("ops", 100000);
    seed = option("seed", 1);
    huge = option("huge", 0);
    limit = option("limit", 0);
    MUST(jemhooks_registrar_open("uring", NULL, &uring));
    pattern_file = memfd_create("pattern", 0);
    must(ftruncate(pattern_file, PATTERN), "a pattern file", __FILE__, __LINE__);
    pattern = must_have(mmap(NULL, PATTERN, PROT_READ | PROT_WRITE, MAP_SHARED, pattern_file, 0), "pattern");
    dice d = {(uint64_t)seed};
    for (size_t i = 0; i < PATTERN; i += 8) {
        uint64_t word = roll(&d) | 0x0101010101010101; /* no zero byte */
        memcpy(pattern + i, &word, 8);
    }
    return run_cases(cases);
}
