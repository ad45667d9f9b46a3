/* provider.c - what all providers share: references, the memory that arenas divide among them, tenants, and the reading of
 * size-first config structs.
 * Concurrency: counts are atomic; a provider is freed by whoever drops the last reference. `lock` is short, and hooks take it. */
#include "provider.h"
#include "../error.h"
#include "../fault.h"
#include "../fork.h"
#include "../pagemap.h"

#include <stdlib.h>
#include <string.h>

#define MOST_ADDRESS ((uintptr_t)1 << 48) /* the page map ends there */

/* All that the first version had to have. */
#define LEAST_OPS offsetof(jemhooks_provider_ops, unmap)

int jemhooks_provider_create(const jemhooks_provider_ops *ops, void *self, jemhooks_provider **provider) {
    if (!ops || !provider || ops->size < LEAST_OPS || !ops->name || !ops->map)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "provider: ops needs its size (at least %zu bytes), a name and map, and somewhere to "
                       "put the result", LEAST_OPS);
    return jh_provider_new(ops, self, provider);
}

int jh_provider_new(const jemhooks_provider_ops *ops, void *self, jemhooks_provider **provider) {
    jemhooks_provider_ops mine = {.page = JH_PAGE};
    int rc = jh_config_read(&mine, sizeof mine, ops, ops->name);
    if (rc) return rc;
    if (!mine.page) mine.page = JH_PAGE;
    if (mine.page < JH_PAGE || mine.page & (mine.page - 1))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "provider %s: a page of %zu bytes is not a power of two of at least 4096",
                       mine.name, mine.page);
    jemhooks_provider *p = calloc(1, sizeof *p);
    if (!p) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "provider %s: no memory for the provider itself", mine.name);
    p->ops = mine;
    p->self = self;
    atomic_init(&p->references, 1);
    p->epoch = atomic_load(&jh_fork_epoch);
    p->page = mine.page;
    p->host_accessible = !(mine.flags & JEMHOOKS_NOT_HOST_ACCESSIBLE);
    p->ranges.solid = mine.flags & JEMHOOKS_NOT_DIVISIBLE;
    pthread_mutex_init(&p->lock, NULL);
    *provider = p;
    return 0;
}

int jh_provider_add(jemhooks_provider *p, const jemhooks_mapping *ranges, size_t count, bool divided) {
    int rc = 0;
    if (!divided) {
        p->region = calloc(count, sizeof *p->region);
        if (!p->region) rc = -ENOMEM;
    }
    for (size_t i = 0; i < count && !rc; i++) {
        if (divided) rc = jh_ranges_put(&p->ranges, &ranges[i]);
        else p->region[p->regions++] = ranges[i];
        p->whole += ranges[i].length;
        if (ranges[i].length > p->largest) p->largest = ranges[i].length;
    }
    if (rc == -EEXIST) return jh_fail(JEMHOOKS_ERROR_CONFIG, EEXIST, "provider %s: two of its %zu ranges overlap", p->ops.name, count);
    return rc ? jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "provider %s: no memory for %zu ranges", p->ops.name, count) : 0;
}

void jh_provider_keep(jemhooks_provider *p) {
    atomic_fetch_add(&p->references, 1);
}

void jemhooks_provider_close(jemhooks_provider *p) {
    if (!p || atomic_fetch_sub(&p->references, 1) != 1) return;
    if (p->ops.close && !jh_frozen(p->epoch)) p->ops.close(p->self); /* the parent's stays open */
    jh_ranges_fini(&p->ranges);
    pthread_mutex_destroy(&p->lock);
    free(p->region);
    free(p);
}

int jh_provider_enter(jemhooks_provider *p, const char *arena, void **tenant) {
    *tenant = NULL;
    if (p->regions && atomic_exchange(&p->occupied, true))
        return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "arena '%s': the %s memory at %p (%zu bytes) already serves an arena; destroy that "
                       "one first, share the memory, or give this one memory of its own", arena, p->ops.name, p->region[0].base, p->whole);
    jh_detail_clear();
    int rc = p->ops.enter ? p->ops.enter(p->self, arena, tenant) : 0;
    if (!rc) return 0;
    atomic_store(&p->occupied, false);
    return jh_fail(JEMHOOKS_ERROR_PROVIDER, abs(rc), "arena '%s': provider %s: %s", arena, p->ops.name,
                   *jh_detail() ? jh_detail() : strerror(abs(rc)));
}

void jh_provider_leave(jemhooks_provider *p, void *tenant) {
    if (p->ops.leave) p->ops.leave(p->self, tenant);
    atomic_store(&p->occupied, false);
}

int jh_provider_map(jemhooks_provider *p, void *tenant, size_t alignment, jemhooks_mapping *m) {
    size_t length = (m->length + p->page - 1) & ~(p->page - 1);
    if (length < m->length) return -ENOMEM;
    if (alignment < p->page || JH_FAULT(alignment_small)) alignment = p->page;
    pthread_mutex_lock(&p->lock);
    int rc = jh_ranges_take(&p->ranges, length, alignment, m);
    pthread_mutex_unlock(&p->lock);
    if (!rc || !p->ops.map) return rc;
    *m = (jemhooks_mapping){.length = length};
    rc = p->ops.map(p->self, tenant, alignment, m);
    if (rc) return rc < 0 ? rc : -EIO;
    if (m->base && m->length >= length && !(m->length & (p->page - 1)) && !((uintptr_t)m->base & (alignment - 1)) &&
        (uintptr_t)m->base + m->length <= MOST_ADDRESS && (uintptr_t)m->base + m->length > (uintptr_t)m->base)
        return 0;
    if (p->ops.unmap) p->ops.unmap(p->self, tenant, m); /* not what was asked for: the caller's own provider is wrong */
    return -EPROTO;
}

void jh_provider_unmap(jemhooks_provider *p, void *tenant, jemhooks_mapping *m) {
    if (p->ops.unmap) {
        p->ops.unmap(p->self, tenant, m);
        return;
    }
    m->zero = p->ops.give_back && !p->ops.give_back(p->self, tenant, m, 0, m->length);
    pthread_mutex_lock(&p->lock);
    if (!p->regions) jh_ranges_put(&p->ranges, m);
    pthread_mutex_unlock(&p->lock);
    for (size_t i = 0; i < p->regions; i++)
        if (p->region[i].base == m->base) p->region[i].zero = m->zero;
}

int jemhooks_provider_get_info(jemhooks_provider *p, jemhooks_provider_info *info) {
    if (!p || !info || info->size < sizeof info->size)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_provider_get_info: NULL, or the size field of the info is not set");
    bool mine = !jh_frozen(p->epoch); /* else another thread of the parent may have held the lock */
    if (mine) pthread_mutex_lock(&p->lock);
    size_t free_bytes = p->ranges.bytes;
    if (mine) pthread_mutex_unlock(&p->lock);
    jemhooks_provider_info now = {
        .size = info->size,
        .name = p->ops.name,
        .page = p->page,
        .total = p->whole,
        .free = p->regions && !atomic_load(&p->occupied) ? p->whole : free_bytes,
        .host_accessible = p->host_accessible,
        .pinnable = !(p->ops.flags & JEMHOOKS_NOT_PINNABLE),
        .gives_back = p->ops.give_back != NULL,
        .unmaps = p->ops.unmap != NULL,
        .divides = !p->regions && !p->ranges.solid,
        .shares = p->ops.share != NULL,
    };
    if (info->size > sizeof now) memset((char *)info + sizeof now, 0, info->size - sizeof now);
    memcpy(info, &now, info->size < sizeof now ? info->size : sizeof now);
    return 0;
}

int jh_config_read(void *into, size_t into_size, const void *config, const char *what) {
    if (!config) return 0;
    size_t size;
    memcpy(&size, config, sizeof size);
    if (size < sizeof size || size > 65536)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: its size field is %zu; set it to sizeof the struct, or start "
                       "from the INIT macro", what, size);
    for (size_t i = into_size; i < size; i++)
        if (((const char *)config)[i])
            return jh_fail(JEMHOOKS_ERROR_CONFIG, E2BIG, "%s: byte %zu is set, but this library knows only %zu bytes of "
                           "the struct; leave later fields zero or install a newer jemhooks", what, i, into_size);
    memcpy(into, config, size < into_size ? size : into_size);
    memcpy(into, &into_size, sizeof into_size);
    return 0;
}
