/* pagemap.c - the flat table that jemhooks_region_of() reads: one entry per 2 MiB of a 48-bit address space.
 * An entry is 0, a region, or (odd) a leaf of 512 entries of 4 KiB, made when regions share the 2 MiB. A leaf is never
 * taken away again: a reader may be in it. The table is mapped read-only and made writable 64 KiB at a time, where
 * regions are: so mlockall() does not populate a gigabyte of it, nor THP its neighbourhood.
 * Concurrency: readers take no lock. Writers hold `lock`, a short one: its holder may mmap or mprotect, no more.     */
#include "pagemap.h"

#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>

#define SLOTS ((uintptr_t)1 << (48 - 21))
#define LEAF 512
#define PIECE ((uintptr_t)65536 / sizeof(uintptr_t)) /* entries made writable at once: 16 GiB of address space */

jemhooks_pagemap_table jemhooks_pagemap;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t writable[SLOTS / PIECE / 64];

static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
}

int jh_pagemap_reserve(void) {
    int rc = 0;
    pthread_mutex_lock(&lock);
    if (!jemhooks_pagemap.slots) {
        void *table = mmap(NULL, SLOTS * sizeof(uintptr_t), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (table == MAP_FAILED) {
            rc = -errno;
        } else if (pthread_atfork(NULL, NULL, in_child)) {
            munmap(table, SLOTS * sizeof(uintptr_t));
            rc = -ENOMEM;
        } else {
            madvise(table, SLOTS * sizeof(uintptr_t), MADV_NOHUGEPAGE);
            jemhooks_pagemap.slot = (uintptr_t *)table;
            __atomic_store_n(&jemhooks_pagemap.slots, SLOTS, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

/* Where the entry for address a is kept. */
static uintptr_t *entry(uintptr_t a) {
    uintptr_t *slot = &jemhooks_pagemap.slot[a / JH_SLOT];
    return *slot & 1 ? (uintptr_t *)(*slot - 1) + a / JH_PAGE % LEAF : slot;
}

/* The next address that has an entry of its own. */
static uintptr_t next(uintptr_t a) {
    uintptr_t unit = jemhooks_pagemap.slot[a / JH_SLOT] & 1 ? JH_PAGE : JH_SLOT;
    return (a / unit + 1) * unit;
}

static bool make_writable(uintptr_t slot) {
    uintptr_t piece = slot / PIECE;
    if (writable[piece / 64] >> piece % 64 & 1) return true;
    if (mprotect(&jemhooks_pagemap.slot[piece * PIECE], PIECE * sizeof(uintptr_t), PROT_READ | PROT_WRITE)) return false;
    writable[piece / 64] |= (uint64_t)1 << piece % 64;
    return true;
}

/* Gives the slot of address a a leaf that says the same as the slot did. */
static bool make_leaf(uintptr_t a) {
    uintptr_t *slot = &jemhooks_pagemap.slot[a / JH_SLOT];
    if (*slot & 1) return true;
    uintptr_t *leaf = (uintptr_t *)mmap(NULL, LEAF * sizeof *leaf, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (leaf == MAP_FAILED) return false;
    for (int i = 0; i < LEAF; i++) leaf[i] = *slot;
    __atomic_store_n(slot, (uintptr_t)leaf | 1, __ATOMIC_RELEASE);
    return true;
}

static int insert(jemhooks_region *r, jemhooks_region **outer) {
    uintptr_t base = r->base, end = base + r->length;
    if (end < base || (end - 1) / JH_SLOT >= SLOTS) return -ERANGE;
    for (uintptr_t a = base; a < end; a = (a / JH_SLOT + 1) * JH_SLOT)
        if (!make_writable(a / JH_SLOT)) return -ENOMEM;
    if ((base % JH_SLOT && !make_leaf(base)) || (end % JH_SLOT && !make_leaf(end))) return -ENOMEM;

    jemhooks_region *found = (jemhooks_region *)*entry(base);
    if (found && (found->base > base || found->base + found->length < end)) return -EEXIST;
    for (uintptr_t a = base; a < end; a = next(a))
        if (*entry(a) != (uintptr_t)found) return -EEXIST;
    for (uintptr_t a = base; a < end; a = next(a)) __atomic_store_n(entry(a), (uintptr_t)r, __ATOMIC_RELEASE);
    *outer = found;
    return 0;
}

int jh_pagemap_insert(jemhooks_region *r, jemhooks_region **outer) {
    pthread_mutex_lock(&lock);
    int rc = insert(r, outer);
    pthread_mutex_unlock(&lock);
    return rc;
}

void jh_pagemap_remove(jemhooks_region *r, jemhooks_region *outer) {
    pthread_mutex_lock(&lock);
    for (uintptr_t a = r->base, end = a + r->length; a < end; a = next(a))
        if (*entry(a) == (uintptr_t)r) __atomic_store_n(entry(a), (uintptr_t)outer, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
}
