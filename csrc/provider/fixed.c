/* fixed.c - ranges that the caller owns: one region each, never given back, never unmapped.
 * Their pages may be registered by others, so they are not dropped; and they may hold old bytes unless their owner says
 * otherwise. Memory that the host cannot touch (device memory) is never read or written.
 * Concurrency: `tenant` is atomic, so that one arena at a time lives here; `next` is that arena's. */
#include "provider.h"
#include "../error.h"
#include "../pagemap.h"

#include <stdlib.h>

typedef struct {
    jemhooks_provider head;
    atomic_bool tenant;
    size_t next;           /* the first range that is not a region yet */
    jemhooks_range range[];
} fixed;

static void *map(jemhooks_provider *p, size_t *length, size_t alignment) {
    fixed *f = (fixed *)p;
    (void)alignment; /* the region carves aligned extents out of the whole */
    if (f->next == p->regions || *length > f->range[f->next].length) {
        errno = ENOMEM;
        return NULL;
    }
    *length = f->range[f->next].length;
    return f->range[f->next++].base;
}

static void unmap(jemhooks_provider *p, void *base, size_t length) {
    (void)base, (void)length;
    p->fresh_is_zero = false;
}

static int move_in(jemhooks_provider *p) {
    fixed *f = (fixed *)p;
    if (atomic_exchange(&f->tenant, true))
        return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "the fixed memory at %p (%zu bytes) already serves an arena; destroy that "
                       "one first or give this one memory of its own", f->range[0].base, p->whole);
    f->next = 0;
    return 0;
}

static void move_out(jemhooks_provider *p) {
    atomic_store(&((fixed *)p)->tenant, false);
}

static const jh_provider_ops ops = {"fixed", map, unmap, NULL, move_in, move_out};

/* Rounds inwards to pages. */
static int whole_pages(const jemhooks_range *given, jemhooks_range *range) {
    uintptr_t start = (uintptr_t)given->base, end = start + given->length;
    uintptr_t base = (start + JH_PAGE - 1) & ~(JH_PAGE - 1), top = end & ~(JH_PAGE - 1);
    if (!given->base || end < start || end >> 48)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "fixed memory: %zu bytes at %p is not a range of user memory below "
                       "2^48", given->length, given->base);
    if (base < start || top <= base)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "fixed memory: %zu bytes at %p hold no whole 4 KiB page; give a "
                       "larger range, best on 2 MiB", given->length, given->base);
    *range = (jemhooks_range){(void *)base, top - base};
    return 0;
}

int jemhooks_provider_fixed(const jemhooks_fixed_config *config, jemhooks_provider **provider) {
    jemhooks_fixed_config c = JEMHOOKS_FIXED_CONFIG_INIT;
    int rc = jh_config_read(&c, sizeof c, config, "fixed memory");
    if (rc) return rc;
    if (!provider) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "fixed memory: nowhere to put the provider (NULL)");
    if (!c.ranges != !c.range_count || (c.ranges && (c.base || c.length)))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "fixed memory: %zu ranges at %p, and %zu bytes at %p; give either one range "
                       "as base and length or several as ranges", c.range_count, (const void *)c.ranges, c.length, c.base);
    const jemhooks_range one = {c.base, c.length}, *given = c.ranges ? c.ranges : &one;
    size_t count = c.ranges ? c.range_count : 1;
    fixed *f = count < SIZE_MAX / sizeof one - sizeof *f ? calloc(1, sizeof *f + count * sizeof one) : NULL;
    if (!f) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "fixed memory: no memory for a provider of %zu ranges", count);
    jh_provider_init(&f->head, &ops);
    f->head.regions = count;
    f->head.host_accessible = c.host_accessible;
    f->head.fresh_is_zero = c.zeroed;
    for (size_t i = 0; i < count; i++) {
        if ((rc = whole_pages(&given[i], &f->range[i]))) {
            free(f);
            return rc;
        }
        f->head.whole += f->range[i].length;
        if (f->range[i].length > f->head.largest) f->head.largest = f->range[i].length;
    }
    *provider = &f->head;
    return 0;
}
