/* ranges.c - free ranges of memory: best fit, lowest address among equals, joined with their neighbours, in O(log n) (and a step
 * for each range that is long enough but wrongly aligned).
 * Two treaps over the same structs, one by address and one by length. Structs come from pages of their own, never from malloc,
 * since hooks carve; each range that is taken has one set aside, so that bringing it back cannot fail.
 * Concurrency: none of its own; the provider's lock guards it.                                                       */
#include "ranges.h"
#include "../pagemap.h"

#include <sys/mman.h>

#define SLAB ((size_t)16 << 10)

enum { BY_ADDRESS, BY_LENGTH };

struct jh_range {
    jemhooks_mapping m;
    jh_range *child[2][2]; /* in each treap: what comes before, what comes after */
    uint64_t priority;
};

typedef struct slab {
    struct slab *next;
    jh_range range[];
} slab;

/* ---- treaps ----------------------------------------------------------------------------------------------------- */

static bool before(int order, const jh_range *a, const jh_range *b) {
    if (order == BY_LENGTH && a->m.length != b->m.length) return a->m.length < b->m.length;
    return a->m.base < b->m.base;
}

/* Parts a treap into what comes before x and what does not. */
static void part(int order, jh_range *t, const jh_range *x, jh_range **low, jh_range **high) {
    while (t) {
        bool left = before(order, t, x);
        *(left ? low : high) = t;
        if (left) low = &t->child[order][1];
        else high = &t->child[order][0];
        t = t->child[order][left];
    }
    *low = *high = NULL;
}

static jh_range *join(int order, jh_range *low, jh_range *high) {
    jh_range *root, **at = &root;
    while (low && high) {
        bool right = low->priority < high->priority;
        *at = right ? high : low;
        at = &(*at)->child[order][!right];
        if (right) high = *at;
        else low = *at;
    }
    *at = low ? low : high;
    return root;
}

static void insert(jh_ranges *r, int order, jh_range *x) {
    jh_range **at = &r->root[order];
    while (*at && (*at)->priority >= x->priority) at = &(*at)->child[order][before(order, *at, x)];
    jh_range *below = *at;
    *at = x;
    part(order, below, x, &x->child[order][0], &x->child[order][1]);
}

static void erase(jh_ranges *r, int order, jh_range *x) {
    jh_range **at = &r->root[order];
    while (*at != x) at = &(*at)->child[order][before(order, *at, x)];
    *at = join(order, x->child[order][0], x->child[order][1]);
}

/* ---- structs ---------------------------------------------------------------------------------------------------- */

/* Sees to it that there are n spare structs beyond those of the ranges that are out. */
static bool provide(jh_ranges *r, size_t n) {
    if (r->spares >= r->taken + n) return true;
    slab *s = mmap(NULL, SLAB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) return false;
    s->next = r->slabs;
    r->slabs = s;
    for (size_t i = 0; i < (SLAB - sizeof *s) / sizeof s->range[0]; i++) {
        s->range[i].child[BY_ADDRESS][0] = r->spare;
        r->spare = &s->range[i];
        r->spares++;
    }
    return true;
}

static void add(jh_ranges *r, const jemhooks_mapping *m) {
    jh_range *x = r->spare;
    r->spare = x->child[BY_ADDRESS][0];
    r->spares--;
    x->m = *m;
    uint64_t h = (uint64_t)(uintptr_t)m->base * 0x9e3779b97f4a7c15u; /* 2^64 over the golden ratio: scatters addresses */
    x->priority = (h ^ h >> 29) * 0xbf58476d1ce4e5b9u;
    insert(r, BY_ADDRESS, x);
    insert(r, BY_LENGTH, x);
    r->bytes += m->length;
}

static void drop(jh_ranges *r, jh_range *x) {
    erase(r, BY_ADDRESS, x);
    erase(r, BY_LENGTH, x);
    r->bytes -= x->m.length;
    x->child[BY_ADDRESS][0] = r->spare;
    r->spare = x;
    r->spares++;
}

/* ---- ranges ----------------------------------------------------------------------------------------------------- */

/* Does b go on where a ends, in memory and in its file? */
static bool adjoin(const jemhooks_mapping *a, const jemhooks_mapping *b) {
    return (char *)a->base + a->length == (char *)b->base && a->offset + a->length == b->offset;
}

/* The last range before m, or the first after it. */
static jh_range *neighbour(const jh_ranges *r, const jemhooks_mapping *m, bool after) {
    jh_range *found = NULL;
    for (jh_range *t = r->root[BY_ADDRESS]; t;) {
        bool is_after = t->m.base > m->base;
        if (is_after == after) found = t;
        t = t->child[BY_ADDRESS][!is_after];
    }
    return found;
}

int jh_ranges_put(jh_ranges *r, const jemhooks_mapping *m) {
    jemhooks_mapping whole = *m;
    if (r->taken) r->taken--;
    if (!provide(r, 1)) return -ENOMEM;
    jh_range *low = neighbour(r, m, false), *high = neighbour(r, m, true);
    if ((low && (char *)low->m.base + low->m.length > (char *)m->base) || (high && high->m.base < (void *)((char *)m->base + m->length)))
        return -EEXIST;
    if (low && !r->solid && adjoin(&low->m, &whole)) {
        whole = (jemhooks_mapping){low->m.base, low->m.length + whole.length, low->m.offset, low->m.zero && whole.zero};
        drop(r, low);
    }
    if (high && !r->solid && adjoin(&whole, &high->m)) {
        whole.length += high->m.length;
        whole.zero = whole.zero && high->m.zero;
        drop(r, high);
    }
    add(r, &whole);
    return 0;
}

static char *aligned(const jemhooks_mapping *m, size_t alignment) {
    return (char *)(((uintptr_t)m->base + alignment - 1) & ~(alignment - 1));
}

static bool fits(const jemhooks_mapping *m, size_t length, size_t alignment) {
    size_t skip = (size_t)(aligned(m, alignment) - (char *)m->base);
    return skip <= m->length && length <= m->length - skip;
}

/* The first range by length that it can be carved from. */
static jh_range *best(jh_range *t, size_t length, size_t alignment) {
    while (t && t->m.length < length) t = t->child[BY_LENGTH][1];
    if (!t) return NULL;
    jh_range *shorter = best(t->child[BY_LENGTH][0], length, alignment);
    if (shorter) return shorter;
    return fits(&t->m, length, alignment) ? t : best(t->child[BY_LENGTH][1], length, alignment);
}

int jh_ranges_take(jh_ranges *r, size_t length, size_t alignment, jemhooks_mapping *m) {
    jh_range *x = best(r->root[BY_LENGTH], length, alignment);
    if (!x || !provide(r, 2)) return -ENOMEM;
    jemhooks_mapping from = x->m;
    drop(r, x);
    char *base = r->solid ? from.base : aligned(&from, alignment), *end = (char *)from.base + from.length;
    if (r->solid) length = from.length;
    size_t skip = (size_t)(base - (char *)from.base);
    if (skip) add(r, &(jemhooks_mapping){from.base, skip, from.offset, from.zero});
    if (base + length < end)
        add(r, &(jemhooks_mapping){base + length, (size_t)(end - base) - length, from.offset + skip + length, from.zero});
    *m = (jemhooks_mapping){base, length, from.offset + skip, from.zero};
    r->taken++;
    return 0;
}

static jh_range *range_at(const jh_ranges *r, const void *base) {
    jh_range *t = r->root[BY_ADDRESS];
    while (t && t->m.base != base) t = t->child[BY_ADDRESS][(const void *)t->m.base < base];
    return t;
}

int jh_ranges_take_at(jh_ranges *r, const void *base, jemhooks_mapping *m) {
    jh_range *x = range_at(r, base);
    if (!x) return -ENOENT;
    *m = x->m;
    drop(r, x);
    r->taken++;
    return 0;
}

size_t jh_ranges_length(const jh_ranges *r, const void *base) {
    const jh_range *x = range_at(r, base);
    return x ? x->m.length : 0;
}

void jh_ranges_fini(jh_ranges *r) {
    for (slab *s = r->slabs, *next; s; s = next) {
        next = s->next;
        munmap(s, SLAB);
    }
    *r = (jh_ranges){.solid = r->solid};
}
