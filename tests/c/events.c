/* events.c - subscribers: told of everything, before pages and keys go, of the right arena, and never after they have left.
 *     test_events [case=…] steps=3000 rounds=200
 * Concurrency: `leaving` and `many` run threads, which share atomics and what a mutex guards.                        */
#include "check.h"

#include <sched.h>
#include <sys/mman.h>
#include <time.h>

/* ---- what a subscriber has seen ---------------------------------------------------------------------------------- */

enum { MOST = 4096 };
typedef struct diary {
    pthread_mutex_t lock;
    size_t count;
    jemhooks_event event[MOST]; /* the first of them */
    void (*look)(struct diary *d, const jemhooks_event *e);
    const char *block; /* for `look` */
    size_t length;
    size_t looked;
} diary;

static void note(void *self, const jemhooks_event *e) {
    diary *d = self;
    pthread_mutex_lock(&d->lock);
    if (d->count < MOST) d->event[d->count] = *e;
    d->count++;
    if (d->look) d->look(d, e);
    pthread_mutex_unlock(&d->lock);
}

static void diary_new(diary *d) {
    *d = (diary){.lock = PTHREAD_MUTEX_INITIALIZER};
}

static size_t how_many(const diary *d, unsigned kinds) {
    size_t n = 0;
    for (size_t i = 0; i < d->count && i < MOST; i++) n += (d->event[i].kind & kinds) != 0;
    return n;
}

static bool overlaps(const jemhooks_event *e, const void *p, size_t length) {
    return e->base < (uintptr_t)p + length && (uintptr_t)p < e->base + e->length;
}

static jemhooks_subscription *subscribe(jemhooks_arena *arena, unsigned kinds, diary *d) {
    jemhooks_subscription *s = NULL;
    MUST(jemhooks_subscribe(arena, kinds, note, d, &s));
    return s;
}

static jemhooks_arena *small_pages(jemhooks_registrar *registrar) {
    jemhooks_anonymous_config memory = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    jemhooks_provider *provider;
    memory.transparent_huge = 0;
    MUST(jemhooks_provider_anonymous(&memory, &provider));
    jemhooks_arena *arena = arena_on(provider, &registrar, registrar ? 1 : 0);
    jemhooks_provider_close(provider);
    return arena;
}

/* ---- one life, in order ------------------------------------------------------------------------------------------ */

static void order(void) {
    static diary d;
    diary_new(&d);
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_subscription *s = subscribe(NULL, 31, &d);
    jemhooks_arena *arena = small_pages(null);
    char *p = must_have(jemhooks_alloc(arena, 64 * KIB), "block");
    jemhooks_key key;
    MUST(jemhooks_get_key(p, &key));
    jemhooks_region_info r = region_at(arena, p);
    MUST(jemhooks_free(p));
    MUST(jemhooks_trim(arena, NULL));
    arena_end(arena);
    MUST(jemhooks_unsubscribe(s));
    static const int kinds[] = {JEMHOOKS_ON_MAP, JEMHOOKS_ON_REGISTER, JEMHOOKS_ON_DECOMMIT, JEMHOOKS_ON_DEREGISTER,
                                JEMHOOKS_ON_UNMAP};
    size_t at = 0;
    for (size_t i = 0; i < d.count && i < MOST; i++) {
        const jemhooks_event *e = &d.event[i];
        CHECK("event", e->size == sizeof *e && e->arena == arena && e->length, "an event has size %zu, length %zu", e->size,
              (size_t)e->length);
        if (e->base - r.base >= r.length) continue;
        CHECK("event", e->kind == JEMHOOKS_ON_DECOMMIT || e->length == r.length,
              "an event of kind %d has %zu bytes of a region of %zu", e->kind, (size_t)e->length, (size_t)r.length);
        if (at < 5 && e->kind == kinds[at]) at++;
    }
    CHECK("order", at == 5, "of map, register, decommit, deregister and unmap %zu came, in this order, in %zu events", at, d.count);
    CHECK("order", how_many(&d, JEMHOOKS_ON_MAP) == how_many(&d, JEMHOOKS_ON_UNMAP), "%zu regions began, %zu ended",
          how_many(&d, JEMHOOKS_ON_MAP), how_many(&d, JEMHOOKS_ON_UNMAP));
    jemhooks_registrar_close(null);
}

/* ---- release events come first ----------------------------------------------------------------------------------- */

static void look_at_pages(diary *d, const jemhooks_event *e) {
    if (!overlaps(e, d->block, d->length)) return;
    d->looked++;
    CHECK("before", filled(d->block, d->length, d->length, 7), "when event %d came the pages had gone already", e->kind);
}

static void before_pages_go(void) {
    static diary d;
    diary_new(&d);
    jemhooks_arena *arena = small_pages(NULL);
    jemhooks_subscription *s = subscribe(arena, JEMHOOKS_RELEASES, &d);
    char *p = must_have(jemhooks_aligned_alloc(arena, PAGE, MIB), "block");
    fill(p, MIB, 7);
    d.block = p, d.length = MIB, d.look = look_at_pages;
    MUST(jemhooks_free(p));
    MUST(jemhooks_trim(arena, NULL));
    d.look = NULL;
    CHECK("before", d.looked == 1, "the pages of one block went with %zu events", d.looked);
    CHECK("before", !resident_pages(p, MIB), "pages without a block are still there, so nothing was tested");
    arena_end(arena);
    MUST(jemhooks_unsubscribe(s));
}

static jemhooks_registrar *asked;
static void look_at_keys(diary *d, const jemhooks_event *e) {
    jemhooks_key key;
    if (e->kind != JEMHOOKS_ON_DEREGISTER || !overlaps(e, d->block, 1)) return;
    d->looked++;
    CHECK("before", null_stats(asked).deregisters == 0, "the event came after the deregistration");
    int rc = jemhooks_get_key(d->block, &key);
    CHECK("inside", rc == -EDEADLK, "a key asked for by a subscriber gave %d, not -EDEADLK", rc);
    rc = jemhooks_arena_destroy(e->arena);
    CHECK("inside", rc == -EDEADLK, "an arena destroyed by a subscriber gave %d, not -EDEADLK", rc);
    void *other = jemhooks_alloc(e->arena, 100);
    CHECK("inside", other && !jemhooks_free(other), "a subscriber could not allocate: %s", jemhooks_last_error());
}

static jemhooks_subscription *own;
static void leave_inside(void *self, const jemhooks_event *e) {
    (void)e;
    *(int *)self = jemhooks_unsubscribe(own);
}

static void before_keys_go(void) {
    static diary d;
    diary_new(&d);
    asked = null_open(NULL);
    jemhooks_arena *arena = small_pages(asked);
    char *p = must_have(jemhooks_alloc(arena, MIB), "block");
    jemhooks_key key;
    int left = 0;
    MUST(jemhooks_get_key(p, &key));
    jemhooks_subscription *s = subscribe(arena, JEMHOOKS_ON_DEREGISTER, &d);
    MUST(jemhooks_subscribe(NULL, JEMHOOKS_ON_DEREGISTER, leave_inside, &left, &own));
    d.block = p, d.look = look_at_keys;
    MUST(jemhooks_revoke(arena));
    d.look = NULL;
    CHECK("before", d.looked == 1, "a deregistration was told of %zu times", d.looked);
    CHECK("inside", left == -EDEADLK, "unsubscribing in the subscriber gave %d, not -EDEADLK", left);
    MUST(jemhooks_unsubscribe(own));
    MUST(jemhooks_unsubscribe(s));
    MUST(jemhooks_free(p));
    arena_end(arena);
    jemhooks_registrar_close(asked);
}

/* A registration that cannot be ended is told of anew: a cache may go on with it. */
static void failed_end(void) {
    static diary d;
    diary_new(&d);
    jemhooks_null_config config = JEMHOOKS_NULL_CONFIG_INIT;
    config.fail_deregister_at = 1;
    jemhooks_registrar *null = null_open(&config);
    jemhooks_arena *arena = small_pages(null);
    jemhooks_subscription *s = subscribe(arena, JEMHOOKS_ON_REGISTER | JEMHOOKS_ON_DEREGISTER, &d);
    char *p = must_have(jemhooks_alloc(arena, MIB), "block");
    jemhooks_key key;
    MUST(jemhooks_get_key(p, &key));
    CHECK("failed", jemhooks_revoke(arena) < 0, "the injected failure did not happen");
    CHECK("failed", d.count == 3 && d.event[2].kind == JEMHOOKS_ON_REGISTER, "a region that stays registered gave %zu events",
          d.count);
    MUST(jemhooks_revoke(arena));
    CHECK("failed", d.count == 4 && d.event[3].kind == JEMHOOKS_ON_DEREGISTER, "its end gave %zu events in all", d.count);
    MUST(jemhooks_free(p));
    arena_end(arena);
    MUST(jemhooks_unsubscribe(s));
    jemhooks_registrar_close(null);
}

/* ---- no page goes untold ----------------------------------------------------------------------------------------- */

enum { BLOCKS = 64, PAST = 2048 };
typedef struct cached {
    char *base;
    size_t length;
    bool told[768]; /* by page, of at most 3 MiB */
} cached;
static cached past[PAST]; /* blocks that were freed: the entries of a cache that nobody tells of frees */

static void forget_pages(diary *d, const jemhooks_event *e) {
    (void)d;
    for (size_t i = 0; i < PAST; i++)
        for (size_t a = 0; past[i].base && a < past[i].length; a += PAGE)
            if (overlaps(e, past[i].base + a, PAGE)) past[i].told[a / PAGE] = true;
}

static void check_untold(void) {
    for (size_t i = 0; i < PAST; i++) {
        unsigned char in_memory[768];
        if (!past[i].base || mincore(past[i].base, past[i].length, in_memory)) continue;
        for (size_t n = 0; n < past[i].length / PAGE; n++)
            CHECK("untold", (in_memory[n] & 1) || past[i].told[n], "page %zu of %zu went without an event", n, past[i].length / PAGE);
    }
}

static void complete(void) {
    static diary d;
    diary_new(&d);
    d.look = forget_pages;
    memset(past, 0, sizeof past);
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_arena *arena = small_pages(null);
    jemhooks_subscription *s = subscribe(arena, JEMHOOKS_RELEASES, &d);
    static struct { char *p; size_t size; } block[BLOCKS];
    dice random = {(uint64_t)option("seed", 1)};
    size_t next = 0;
    for (long step = 0; step < option("steps", 3000); step++) {
        size_t i = roll_below(&random, BLOCKS);
        if (!block[i].p) {
            block[i].size = (1 + roll_below(&random, roll_below(&random, 8) ? 16 : 768)) * PAGE;
            block[i].p = must_have(jemhooks_aligned_alloc(arena, PAGE, block[i].size), "block");
            fill(block[i].p, block[i].size, step + 1);
            jemhooks_key key;
            if (!roll_below(&random, 4)) MUST(jemhooks_get_key(block[i].p, &key));
        } else {
            past[next++ % PAST] = (cached){.base = block[i].p, .length = block[i].size};
            MUST(jemhooks_free(block[i].p));
            block[i].p = NULL;
        }
        if (!roll_below(&random, 32)) MUST(jemhooks_trim(arena, NULL));
        if (!roll_below(&random, 64)) MUST(jemhooks_revoke(arena));
        if (!roll_below(&random, 16)) check_untold();
    }
    figure("events", (double)d.count);
    for (size_t i = 0; i < BLOCKS; i++) {
        if (block[i].p) MUST(jemhooks_free(block[i].p));
        block[i].p = NULL;
    }
    arena_end(arena);
    MUST(jemhooks_unsubscribe(s));
    jemhooks_registrar_close(null);
}

/* ---- subscribers come and go ------------------------------------------------------------------------------------- */

static atomic_int tellings, still_subscribed, stop;

static void count_telling(void *self, const jemhooks_event *e) {
    (void)e;
    atomic_fetch_add(&tellings, 1);
    CHECK("leaving", atomic_load(&still_subscribed) || self, "told after it had unsubscribed");
}

static void *churn(void *arg) {
    jemhooks_arena *arena = arg;
    while (!atomic_load(&stop)) {
        char *p = must_have(jemhooks_alloc(arena, 256 * KIB), "block");
        jemhooks_key key;
        MUST(jemhooks_get_key(p, &key));
        MUST(jemhooks_free(p));
        MUST(jemhooks_trim(arena, NULL));
    }
    return NULL;
}

static void leaving(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_arena *arena = small_pages(null);
    jemhooks_subscription *other;
    pthread_t thread[2];
    int all = 1;
    atomic_store(&stop, 0);
    MUST(jemhooks_subscribe(NULL, 31, count_telling, &all, &other));
    for (int i = 0; i < 2; i++) thread[i] = start_thread(churn, arena);
    for (long round = 0; round < option("rounds", 200); round++) {
        jemhooks_subscription *s;
        atomic_store(&still_subscribed, 1);
        MUST(jemhooks_subscribe(arena, 31, count_telling, NULL, &s));
        int before = atomic_load(&tellings);
        while (atomic_load(&tellings) < before + 8) sched_yield();
        MUST(jemhooks_unsubscribe(s));
        atomic_store(&still_subscribed, 0);
        before = atomic_load(&tellings);
        while (atomic_load(&tellings) < before + 8) sched_yield();
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++) join_thread(thread[i]);
    MUST(jemhooks_unsubscribe(other));
    arena_end(arena);
    jemhooks_registrar_close(null);
}

/* ---- calls from inside ------------------------------------------------------------------------------------------- */

static void use_the_ending(void *self, const jemhooks_event *e) {
    jemhooks_key key;
    const void *p = (const void *)(uintptr_t)e->base;
    int rc = jemhooks_get_key(p, &key);
    CHECK("ending", rc == -EDEADLK, "the key of a region that is being unmapped gave %d", rc);
    rc = jemhooks_lease(p, NULL);
    CHECK("ending", rc == -EDEADLK, "a lease on a region that is being unmapped gave %d", rc);
    ++*(int *)self;
}

/* Nothing is registered that is about to be unmapped. */
static void ending(void) {
    int told = 0;
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_arena *arena = small_pages(null);
    jemhooks_subscription *s;
    MUST(jemhooks_subscribe(arena, JEMHOOKS_ON_UNMAP, use_the_ending, &told, &s));
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, MIB), "block")));
    arena_end(arena);
    MUST(jemhooks_unsubscribe(s));
    CHECK("ending", told && !null_stats(null).live, "told %d times, %zu registrations are left", told, (size_t)null_stats(null).live);
    jemhooks_budget_info budget = {.size = sizeof budget};
    MUST(jemhooks_budget_get(jemhooks_registrar_budget(null), &budget));
    CHECK("ending", !budget.registered && !budget.regions, "%zu bytes are still charged", (size_t)budget.registered);
    jemhooks_registrar_close(null);
}

static jemhooks_provider *taken;
static void use_the_library(void *self, const jemhooks_event *e) {
    (void)e;
    jemhooks_subscription *s;
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    jemhooks_arena *arena;
    int told = 0;
    MUST(jemhooks_subscribe(NULL, JEMHOOKS_ON_UNMAP, use_the_ending, &told, &s));
    *(jemhooks_subscription **)self = s;
    config.provider = taken;
    config.policy = JEMHOOKS_NONE;
    CHECK("inside", jemhooks_arena_create(&config, &arena) < 0, "two arenas live in one fixed range");
    config.provider = NULL;
    MUST(jemhooks_arena_create(&config, &arena));
    CHECK("inside", jemhooks_arena_destroy(arena) == -EDEADLK, "a subscriber destroyed an arena");
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, 100), "block")));
}

static void inside(void) {
    jemhooks_registrar *null = null_open(NULL);
    taken = fixed_range(map_aligned(SLOT, PROT_READ | PROT_WRITE), SLOT, true, true);
    jemhooks_arena *owner = arena_on(taken, NULL, 0), *arena = small_pages(null);
    jemhooks_subscription *s, *made = NULL;
    MUST(jemhooks_subscribe(arena, JEMHOOKS_ON_REGISTER, use_the_library, &made, &s));
    char *p = must_have(jemhooks_alloc(arena, MIB), "block");
    jemhooks_key key;
    MUST(jemhooks_get_key(p, &key));
    MUST(jemhooks_unsubscribe(s));
    MUST(jemhooks_unsubscribe(made));
    MUST(jemhooks_free(p));
    arena_end(arena);
    arena_end(owner);
    jemhooks_provider_close(taken);
    jemhooks_registrar_close(null);
}

static void slow(void *self, const jemhooks_event *e) {
    (void)self, (void)e;
    nanosleep(&(struct timespec){0, 300000}, NULL);
}

/* Others' events, however many and slow, keep no arena from ending and nobody from leaving. */
static void unrelated(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_arena *arena = small_pages(null);
    jemhooks_subscription *s, *other;
    pthread_t thread[6];
    atomic_store(&stop, 0);
    MUST(jemhooks_subscribe(arena, JEMHOOKS_ON_DECOMMIT, slow, NULL, &s));
    for (int i = 0; i < 6; i++) thread[i] = start_thread(churn, arena);
    for (int i = 0; i < 50; i++) {
        MUST(jemhooks_subscribe(arena, JEMHOOKS_ON_DECOMMIT, slow, NULL, &other));
        arena_end(small_pages(NULL));
        MUST(jemhooks_unsubscribe(other));
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 6; i++) join_thread(thread[i]);
    MUST(jemhooks_unsubscribe(s));
    arena_end(arena);
    jemhooks_registrar_close(null);
}

/* Of the arena it asked for only, even where another one is made at the address of that. */
static void one_arena(void) {
    static diary d;
    diary_new(&d);
    jemhooks_arena *first = small_pages(NULL), *second = small_pages(NULL);
    jemhooks_subscription *s = subscribe(first, 31, &d);
    MUST(jemhooks_free(must_have(jemhooks_alloc(second, MIB), "block")));
    CHECK("arena", !d.count, "told of another arena %zu times", d.count);
    arena_end(first);
    size_t before = d.count;
    for (int i = 0; i < 20; i++) {
        jemhooks_arena *later = small_pages(NULL);
        MUST(jemhooks_free(must_have(jemhooks_alloc(later, MIB), "block")));
        arena_end(later);
    }
    CHECK("arena", d.count == before, "told of a later arena %zu times", d.count - before);
    MUST(jemhooks_unsubscribe(s));
    arena_end(second);
}

static diary shared;
static jemhooks_subscription *inherited;

static void child(void) {
    size_t before = shared.count;
    jemhooks_arena *arena = small_pages(NULL);
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, MIB), "block")));
    CHECK("child", shared.count == before, "the parent's subscriber was told of the child's arena");
    MUST(jemhooks_unsubscribe(inherited));
    static diary d;
    diary_new(&d);
    jemhooks_subscription *s = subscribe(arena, 31, &d);
    arena_end(arena);
    CHECK("child", d.count, "a subscriber of the child was not told of anything");
    MUST(jemhooks_unsubscribe(s));
}

static void forked(void) {
    diary_new(&shared);
    inherited = subscribe(NULL, 31, &shared);
    in_child("events", child);
    jemhooks_arena *arena = small_pages(NULL);
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, MIB), "block")));
    arena_end(arena);
    CHECK("child", shared.count, "after a fork the parent's subscriber is not told of anything");
    MUST(jemhooks_unsubscribe(inherited));
}

static void bad_calls(void) {
    static diary d;
    jemhooks_subscription *s = NULL;
    CHECK("bad", jemhooks_subscribe(NULL, 0, note, &d, &s) == -EINVAL && strstr(jemhooks_last_error(), "kinds"), "no kinds: %s",
          jemhooks_last_error());
    CHECK("bad", jemhooks_subscribe(NULL, 32, note, &d, &s) == -EINVAL, "an unknown kind was taken");
    CHECK("bad", jemhooks_subscribe(NULL, 1, NULL, &d, &s) == -EINVAL, "no function was taken");
    CHECK("bad", jemhooks_subscribe(NULL, 1, note, &d, NULL) == -EINVAL, "nowhere to put it was taken");
    CHECK("bad", !s && !jemhooks_unsubscribe(NULL), "a refused subscription was made, or NULL cannot be ended");
    CHECK("bad", !*jemhooks_arena_name(NULL), "no arena has a name");
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"order", order},
                                      {"before_pages_go", before_pages_go},
                                      {"before_keys_go", before_keys_go},
                                      {"failed_end", failed_end},
                                      {"complete", complete},
                                      {"leaving", leaving},
                                      {"ending", ending},
                                      {"inside", inside},
                                      {"unrelated", unrelated},
                                      {"one_arena", one_arena},
                                      {"forked", forked},
                                      {"bad_calls", bad_calls},
                                      {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
