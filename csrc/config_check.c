/* config_check.c - what an arena is made with: is it allowed, and how large may regions be under it?
 * Concurrency: for an arena that is being made, which no other thread knows yet. */
#include "config_check.h"
#include "allocator/allocator.h"
#include "error.h"
#include "fork.h"
#include "pagemap.h"
#include "registrar/registrar.h"

#define MAX_REGION ((size_t)1 << 30)
#define MAX_SHARDS 64
#define ALL_ACCESS 63u

/* May registrar i serve such an arena? 0 or an error, recorded. */
static int check_registrar(const char *name, const jemhooks_config *c, unsigned i) {
    const jemhooks_registrar *g = c->registrars[i];
    if (!g) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': registrar %u is NULL", name, i);
    bool pins = g->ops.pins == 1 || (g->ops.pins == 2 && !(c->access & JEMHOOKS_ON_DEMAND));
    if (pins && c->policy != JEMHOOKS_NONE && c->provider && c->provider->ops.flags & JEMHOOKS_NOT_PINNABLE)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EOPNOTSUPP, "arena '%s': registrar %s pins memory for long, which the kernel refuses for "
                       "this %s memory (a file that is not on tmpfs); use memfd, anonymous or devdax memory, a registrar that does not "
                       "pin%s", name, g->ops.name, c->provider->ops.name, g->ops.pins == 2 ? ", or access on_demand" : "");
    if (c->prepare && g->ops.not_in_free)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': registrar %s runs only on the threads that call this library, not on "
                       "one that prepares regions ahead; use another registrar, or prepare nothing", name, g->ops.name);
    if (c->rotate_keys && g->ops.not_in_free)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': registrar %s is not called when something is freed, so its keys would "
                       "outlive their data; use another registrar, or leave rotate_keys out", name, g->ops.name);
    return 0;
}

int jh_config_check(const char *name, const jemhooks_config *c) {
    if (c->policy < JEMHOOKS_LAZY || c->policy > JEMHOOKS_NONE)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': policy %d is not one of JEMHOOKS_LAZY, _EAGER, _NONE", name,
                       c->policy);
    if (c->access & ~ALL_ACCESS)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': access 0x%x has bits beyond 0x%x; use the JEMHOOKS_ access "
                       "flags", name, c->access, ALL_ACCESS);
    if (c->registrar_count > JEMHOOKS_MAX_RAILS || (c->registrar_count && !c->registrars))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': %u registrars at %p; give an array of at most %d", name,
                       c->registrar_count, (const void *)c->registrars, JEMHOOKS_MAX_RAILS);
    for (unsigned i = 0; i < c->registrar_count; i++) {
        int rc = check_registrar(name, c, i);
        if (rc) return rc;
    }
    if (!c->registrar_count && c->policy != JEMHOOKS_NONE)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': policy lazy or eager needs a registrar; give one, or policy "
                       "none", name);
    if (!c->shards || c->shards > MAX_SHARDS)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': %u shards is not one of 1 to %d", name, c->shards, MAX_SHARDS);
    if (c->region_min < JH_SLOT || c->region_min % JH_SLOT || c->region_max % JH_SLOT || c->region_max < c->region_min ||
        c->region_max > MAX_REGION)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': regions from %zu to %zu bytes; both must be multiples of 2 MiB, "
                       "the first not above the second, the second at most 1 GiB", name, c->region_min, c->region_max);
    if (c->idle_ttl_ms < JEMHOOKS_FOREVER || c->idle_ttl_ms > INT64_MAX / 1000000)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': idle_ttl of %lld ms; it is at least 0, or JEMHOOKS_FOREVER",
                       name, (long long)c->idle_ttl_ms);
    if (c->evict != JEMHOOKS_EVICT_IDLE && c->evict != JEMHOOKS_EVICT_UNLEASED)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': evict %d is not JEMHOOKS_EVICT_IDLE or _UNLEASED", name,
                       c->evict);
    if (c->zero_on_free && c->provider && !c->provider->host_accessible)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EOPNOTSUPP, "arena '%s': zero_on_free over memory that the host cannot touch; clear it by "
                       "device, or leave zero_on_free out", name);
    if (c->prepare != JEMHOOKS_PREPARE_NOTHING && c->prepare != JEMHOOKS_PREPARE_AHEAD)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': prepare %d is not JEMHOOKS_PREPARE_NOTHING or _AHEAD", name,
                       c->prepare);
    if (c->dirty_decay_ms < JEMHOOKS_DECAY_DEFAULT || c->muzzy_decay_ms < JEMHOOKS_DECAY_DEFAULT)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': decay times of %zd and %zd ms; 0 is at once, -1 never, "
                       "JEMHOOKS_DECAY_DEFAULT jemalloc's own", name, c->dirty_decay_ms, c->muzzy_decay_ms);
    return 0;
}

/* Bytes that a region has at least, if it may be as small as `length`. */
static size_t least_region(const jh_space *s, size_t length) {
    size_t page = s->provider->page, alignment, piece = jh_heap_piece(&alignment);
    if (s->provider->regions) return s->provider->largest;
    if (length < piece) length = piece;
    return (length + page - 1) / page * page;
}

/* No region may take up more than an eighth of a budget, lest there be none to evict. 0 or an error, recorded. */
static int fit_budgets(jh_space *s) {
    const jh_account *account = &s->rails.account;
    size_t least = least_region(s, s->growth);
    for (unsigned i = 0; i < account->budgets; i++) {
        jemhooks_budget_info b = {.size = sizeof b};
        jemhooks_budget_get(account->budget[i], &b);
        unsigned times = jh_budget_times(account, account->budget[i]);
        if (b.pin_limit / times < least || b.max_regions < times) {
            char limits[128];
            jh_budget_limits(account->budget[i], limits, sizeof limits);
            return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "arena '%s': %s: that has no room for one region of %zu bytes on %u rails; "
                           "raise pin_limit or max_regions, or make regions smaller", s->rails.name, limits, least, times);
        }
        size_t most = b.pin_limit / times / 8 / JH_SLOT * JH_SLOT;
        if (most < s->growth) most = s->growth;
        if (most < s->region_max) s->region_max = most;
    }
    return 0;
}

int jh_space_fit(jh_space *s) {
    s->region_limit = SIZE_MAX;
    for (unsigned i = 0; i < s->rails.count && s->rails.policy != JEMHOOKS_NONE; i++) {
        const jemhooks_registrar *g = s->rails.registrar[i];
        jemhooks_limits limits = {0, 0, 0};
        if (g->ops.limits) g->ops.limits(g->self, &limits);
        jh_budget_suggest(g->budget, limits.pin_limit ? limits.pin_limit : JEMHOOKS_UNLIMITED,
                          limits.max_mr ? limits.max_mr : JEMHOOKS_UNLIMITED);
        size_t most = limits.max_mr_size / s->provider->page * s->provider->page;
        size_t least = least_region(s, 1);
        if (limits.max_mr_size && most < least)
            return jh_fail(JEMHOOKS_ERROR_CONFIG, E2BIG, "arena '%s': registrar %s registers at most %zu bytes at a time, and "
                           "regions of this %s provider have at least %zu", s->rails.name, g->ops.name, (size_t)limits.max_mr_size,
                           s->provider->ops.name, least);
        if (limits.max_mr_size && most < s->region_limit) s->region_limit = most;
    }
    if (s->region_max > s->region_limit) s->region_max = s->region_limit;
    if (s->growth > s->region_max) s->growth = s->region_max;
    return s->rails.policy == JEMHOOKS_NONE ? 0 : fit_budgets(s);
}

int jh_check_own(const jh_space *s) {
    for (unsigned i = 0; i < s->rails.count; i++)
        if (jh_frozen(s->rails.registrar[i]->epoch))
            return jh_fail(JEMHOOKS_ERROR_FORK, ECHILD, "arena '%s': registrar %s was opened before the fork; open one in this "
                           "process", s->rails.name, s->rails.registrar[i]->ops.name);
    if (jh_frozen(s->provider->epoch))
        return jh_fail(JEMHOOKS_ERROR_FORK, ECHILD, "arena '%s': its %s provider was made before the fork; make one in this "
                       "process", s->rails.name, s->provider->ops.name);
    return 0;
}

int jh_check_pieces(const jh_space *s) {
    size_t alignment, piece = jh_heap_piece(&alignment), n = s->provider->regions;
    if (!n || piece == JH_PAGE) return 0;
    for (size_t i = 0; i < n; i++) {
        uintptr_t base = (uintptr_t)s->provider->region[i].base, end = base + s->provider->region[i].length;
        uintptr_t at = (base + alignment - 1) & ~(alignment - 1);
        if (at < end && end - at >= piece) return 0;
    }
    return jh_fail(JEMHOOKS_ERROR_CONFIG, ENOSPC, "arena '%s': its %s memory has ranges of at most %zu bytes, and its allocator takes %zu "
                   "bytes at a time, on a multiple of %zu; give it a range of %zu bytes at least", s->rails.name, s->provider->ops.name,
                   s->provider->largest, piece, alignment, piece + alignment);
}
