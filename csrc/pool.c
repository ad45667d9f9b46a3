/* pool.c - the structs of regions and gaps, which hooks take and return: never from malloc, and never given back, so that a
 * look-up may always read a region's.
 * Concurrency: one short lock guards everything; its holder may map memory.                                         */
#include "pool.h"

#include <sys/mman.h>

/* Structs come from slabs: first the public halves, 128 bytes each and close together, since look-ups read nothing else;
 * then the private halves in the same order. Either half is found from the other's address. */
#define SLAB ((size_t)1 << 20)
#define GAPS ((size_t)16 << 10) /* bytes of gap structs made at once */
#define PER_SLAB (SLAB / (sizeof(jemhooks_region) + sizeof(jh_region)))

typedef struct slab {
    jemhooks_region hot[PER_SLAB];
    jh_region region[PER_SLAB];
} slab;

static pthread_mutex_t pool = PTHREAD_MUTEX_INITIALIZER;
static jh_region *unused;       /* returned ones                                               */
static jh_gap *unused_gaps;
static slab *newest;
static size_t taken = PER_SLAB; /* of the newest slab                                          */

/* Half-made lists of the parent's other threads are left behind; the parent's structs stay readable. */
static void in_child(void) {
    pthread_mutex_init(&pool, NULL);
    unused = NULL;
    unused_gaps = NULL;
    taken = PER_SLAB;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

jh_region *jh_pool_region_of(const jemhooks_region *hot) {
    slab *s = (slab *)((uintptr_t)hot & ~(SLAB - 1));
    return &s->region[hot - s->hot];
}

static bool grow_pool(void) {
    char *room = mmap(NULL, 2 * SLAB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return false;
    char *base = (char *)(((uintptr_t)room + SLAB - 1) & ~(SLAB - 1));
    if (base > room) munmap(room, (size_t)(base - room));
    munmap(base + SLAB, (size_t)(room + SLAB - base));
    newest = (slab *)base;
    taken = 0;
    return true;
}

jh_region *jh_pool_take_region(void) {
    jh_region *r = NULL;
    pthread_mutex_lock(&pool);
    if (unused) {
        r = unused;
        unused = r->next;
    } else if (taken < PER_SLAB || grow_pool()) {
        r = &newest->region[taken];
        r->registration.hot = &newest->hot[taken++];
    }
    pthread_mutex_unlock(&pool);
    return r;
}

void jh_pool_return_region(jh_region *r) {
    pthread_mutex_lock(&pool);
    r->next = unused;
    unused = r;
    pthread_mutex_unlock(&pool);
}

jh_gap *jh_pool_take_gap(void) {
    pthread_mutex_lock(&pool);
    if (!unused_gaps) {
        jh_gap *more = (jh_gap *)mmap(NULL, GAPS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (size_t i = 0; more != MAP_FAILED && i < GAPS / sizeof *more; i++) {
            more[i].next = unused_gaps;
            unused_gaps = &more[i];
        }
    }
    jh_gap *g = unused_gaps;
    if (g) unused_gaps = g->next;
    pthread_mutex_unlock(&pool);
    return g;
}

void jh_pool_return_gap(jh_gap *g) {
    pthread_mutex_lock(&pool);
    g->next = unused_gaps;
    unused_gaps = g;
    pthread_mutex_unlock(&pool);
}
