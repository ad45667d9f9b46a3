/* fixed.c - a range that the caller owns: one region, carved from its start, never given back, never unmapped.
 * Its pages may be registered by others, so they are not dropped; and they may hold old bytes unless their owner says
 * otherwise. Memory that the host cannot touch (device memory) is never read or written.
 * Concurrency: `tenant` is atomic, so that one arena at a time lives here. */
#include "provider.h"
#include "../error.h"
#include "../pagemap.h"

#include <stdlib.h>

typedef struct {
    jemhooks_provider head;
    void *base;
    atomic_bool tenant, mapped;
} fixed;

static void *map(jemhooks_provider *p, size_t *length, size_t alignment) {
    fixed *f = (fixed *)p;
    (void)alignment; /* the region carves aligned extents out of the whole */
    bool fits = *length <= p->whole;
    if (!fits || atomic_exchange(&f->mapped, true)) {
        errno = fits ? EADDRINUSE : ENOMEM;
        return NULL;
    }
    *length = p->whole;
    return f->base;
}

static void unmap(jemhooks_provider *p, void *base, size_t length) {
    (void)base, (void)length;
    p->fresh_is_zero = false;
    atomic_store(&((fixed *)p)->mapped, false);
}

static int move_in(jemhooks_provider *p) {
    if (!atomic_exchange(&((fixed *)p)->tenant, true)) return 0;
    return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "the fixed range at %p (%zu bytes) already serves an arena; destroy that "
                   "one first or give this one a range of its own", ((fixed *)p)->base, p->whole);
}

static void move_out(jemhooks_provider *p) {
    atomic_store(&((fixed *)p)->tenant, false);
}

static const jh_provider_ops ops = {"fixed", map, unmap, NULL, move_in, move_out};

int jemhooks_provider_fixed(const jemhooks_fixed_config *config, jemhooks_provider **provider) {
    jemhooks_fixed_config c = JEMHOOKS_FIXED_CONFIG_INIT;
    int rc = jh_config_read(&c, sizeof c, config, "fixed memory");
    if (rc) return rc;
    if (!provider) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "fixed memory: nowhere to put the provider (NULL)");
    uintptr_t start = (uintptr_t)c.base, end = start + c.length;
    uintptr_t base = (start + JH_PAGE - 1) & ~(JH_PAGE - 1), top = end & ~(JH_PAGE - 1);
    if (!c.base || end < start || end >> 48)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "fixed memory: %zu bytes at %p is not a range of user memory below "
                       "2^48", c.length, c.base);
    if (base < start || top <= base)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "fixed memory: %zu bytes at %p hold no whole 4 KiB page; give a "
                       "larger range, best on 2 MiB", c.length, c.base);
    fixed *f = calloc(1, sizeof *f);
    if (!f) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "fixed memory: no memory for the provider itself");
    jh_provider_init(&f->head, &ops);
    f->base = (void *)base;
    f->head.whole = top - base;
    f->head.host_accessible = c.host_accessible;
    f->head.fresh_is_zero = c.zeroed;
    *provider = &f->head;
    return 0;
}
