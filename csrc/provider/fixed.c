/* fixed.c - ranges that the caller owns, never given back and never unmapped: one region each, or divided by arenas.
 * Their pages may be registered by others, so they are not dropped; and they may hold old bytes unless their owner says
 * otherwise. Memory that the host cannot touch (device memory) is never read or written.
 * No state but what all providers have. */
#include "provider.h"
#include "../error.h"
#include "../pagemap.h"

#include <stdlib.h>

/* Rounds inwards to pages. */
static int whole_pages(const jemhooks_range *given, jemhooks_mapping *range, bool zeroed) {
    uintptr_t start = (uintptr_t)given->base, end = start + given->length;
    uintptr_t base = (start + JH_PAGE - 1) & ~(JH_PAGE - 1), top = end & ~(JH_PAGE - 1);
    if (!given->base || end < start || end >> 48)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "fixed memory: %zu bytes at %p is not a range of user memory below "
                       "2^48", given->length, given->base);
    if (base < start || top <= base)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "fixed memory: %zu bytes at %p hold no whole 4 KiB page; give a "
                       "larger range, best on 2 MiB", given->length, given->base);
    *range = (jemhooks_mapping){(void *)base, top - base, 0, zeroed};
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
    jemhooks_mapping *range = calloc(count, sizeof *range);
    if (!range) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "fixed memory: no memory for %zu ranges", count);
    for (size_t i = 0; i < count && !rc; i++) rc = whole_pages(&given[i], &range[i], c.zeroed);
    const jemhooks_provider_ops ops = {
        .size = sizeof ops, .name = "fixed", .flags = c.host_accessible ? 0 : JEMHOOKS_NOT_HOST_ACCESSIBLE};
    jemhooks_provider *p = NULL;
    if (!rc && !(rc = jh_provider_new(&ops, NULL, &p))) rc = jh_provider_add(p, range, count, c.shared);
    free(range);
    if (rc) jemhooks_provider_close(p);
    else *provider = p;
    return rc;
}
