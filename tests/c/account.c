/* account.c - a provider of anonymous memory that checks what the library asks of it.
 * Concurrency: its operations run on any thread; `mine.lock` guards the account. */
#include "account.h"

#include <sys/mman.h>

struct account mine;

void account_reset(void) {
    memset(&mine, 0, sizeof mine);
    pthread_mutex_init(&mine.lock, NULL);
    mine.page = PAGE;
    mine.reads_zero = true;
}

static int enter(void *self, const char *arena, void **tenant) {
    CHECK("self", self == &mine, "enter has another self");
    CHECK("tenant", !*tenant, "*tenant is not preset to NULL");
    if (mine.fail_enter) {
        jemhooks_set_error("no room for %s in the inn", arena);
        return -mine.fail_enter;
    }
    LOCKED {
        size_t i = 0;
        while (i < TENANTS - 1 && mine.tenant[i].here) i++;
        mine.tenant[i] = (tenant_entry){0, true};
        *tenant = &mine.tenant[i];
        mine.entered++;
    }
    return 0;
}

static void leave(void *self, void *tenant) {
    tenant_entry *t = tenant;
    CHECK("self", self == &mine, "leave has another self");
    LOCKED {
        CHECK("tenant", t->here, "an arena left that was not there");
        CHECK("tenant", !t->mappings, "an arena left %ld mappings behind", t->mappings);
        t->here = false;
        mine.left++;
    }
}

void account_tenant(const char *call, const void *tenant) {
    CHECK("tenant", mine.has_tenants ? tenant && ((const tenant_entry *)tenant)->here : !tenant, "%s for tenant %p", call, tenant);
}

int account_map(void *self, void *tenant, size_t alignment, jemhooks_mapping *m) {
    CHECK("self", self == &mine, "map has another self");
    CHECK("alignment", alignment >= mine.page && !(alignment & (alignment - 1)), "map on alignment %zu", alignment);
    CHECK("length", m->length && !(m->length % mine.page), "map of %zu bytes in pages of %zu", m->length, mine.page);
    int rc = 0;
    LOCKED {
        account_tenant("map", tenant);
        mine.maps++;
        if (mine.fail_map && !--mine.fail_map) rc = -ENOMEM;
        size_t room = m->length + alignment + SLOT;
        char *p = rc ? NULL : mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) rc = -errno;
        if (!rc) {
            if (alignment < SLOT) alignment = SLOT;
            char *base = (char *)(((uintptr_t)p + alignment - 1) & ~(alignment - 1));
            if (base > p) munmap(p, (size_t)(base - p));
            size_t whole = (m->length + SLOT - 1) & ~(SLOT - 1); /* no stranger may share the last 2 MiB */
            if (base + whole < p + room) munmap(base + whole, (size_t)(p + room - base - whole));
            if (mine.overlaps && mine.count) {
                munmap(base, whole);
                base = mine.live[0].base;
            }
            if (!mine.reads_zero) memset(base, 0xEE, m->length);
            *m = (jemhooks_mapping){base, m->length, mine.maps << 40, mine.reads_zero};
            mine.live[mine.count] = *m;
            mine.owner[mine.count++] = tenant;
            mine.bytes += m->length;
            if (mine.bytes > mine.bytes_peak) mine.bytes_peak = mine.bytes;
            if (tenant) ((tenant_entry *)tenant)->mappings++;
        }
    }
    return rc;
}

/* Which mapping this is; it must be one of ours, as we gave it. mine.lock held. */
static size_t find(const char *call, const jemhooks_mapping *m, bool whole) {
    for (size_t i = 0; i < mine.count; i++) {
        const jemhooks_mapping *l = &mine.live[i];
        size_t at = (size_t)((char *)m->base - (char *)l->base);
        if ((char *)m->base < (char *)l->base || at + m->length > l->length || m->offset != l->offset + at) continue;
        if (!whole || m->length == l->length) return i;
    }
    violated("mapping", "%s of %zu bytes at %p, offset %#llx, which was never mapped so", call, m->length, m->base,
             (unsigned long long)m->offset);
    return 0;
}

static void account_unmap(void *self, void *tenant, const jemhooks_mapping *m) {
    CHECK("self", self == &mine, "unmap has another self");
    LOCKED {
        account_tenant("unmap", tenant);
        size_t i = find("unmap", m, true);
        CHECK("tenant", mine.owner[i] == tenant, "unmap for another tenant");
        mine.unmaps++;
        mine.bytes -= m->length;
        if (!mine.overlaps) munmap(m->base, (m->length + SLOT - 1) & ~(SLOT - 1));
        if (tenant) ((tenant_entry *)tenant)->mappings--;
        mine.live[i] = mine.live[--mine.count];
        mine.owner[i] = mine.owner[mine.count];
    }
}

int account_give_back(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length) {
    CHECK("self", self == &mine, "give_back has another self");
    LOCKED {
        account_tenant("give_back", tenant);
        find("give_back", m, false);
        mine.gives++;
        CHECK("length", length && at + length <= m->length && !(at % PAGE) && !(length % PAGE), "give_back of %zu bytes at %zu of %zu",
              length, at, m->length);
    }
    if (mine.fail_give_back) return -mine.fail_give_back;
    return madvise((char *)m->base + at, length, MADV_DONTNEED) ? -errno : 0;
}

void account_end(void *self) {
    CHECK("self", self == &mine, "close has another self");
    mine.closed++;
}

jemhooks_provider_ops account_ops(void) {
    mine.has_tenants = true;
    return (jemhooks_provider_ops){.size = sizeof(jemhooks_provider_ops), .name = "mine", .enter = enter, .leave = leave, .map = account_map,
                                   .unmap = account_unmap, .give_back = account_give_back, .close = account_end};
}

jemhooks_provider *account_provider(const jemhooks_provider_ops *ops) {
    jemhooks_provider *provider;
    MUST(jemhooks_provider_create(ops, &mine, &provider));
    return provider;
}

void account_close(jemhooks_provider *provider, bool kept) {
    CHECK("closed", !mine.closed, "closed while its owner has it");
    jemhooks_provider_close(provider);
    CHECK("closed", mine.closed == 1, "closed %zu times", mine.closed);
    CHECK("tenant", mine.entered == mine.left, "%zu arenas came and %zu left", mine.entered, mine.left);
    if (!kept) CHECK("leak", !mine.count && !mine.bytes && mine.maps, "%zu mappings of %zu are left", mine.count, mine.maps);
}

void account_work(jemhooks_arena *arena, long ops, uint64_t seed) {
    enum { COUNT = 60 };
    struct {
        char *p;
        size_t size;
    } b[COUNT] = {{NULL, 0}};
    dice d = {seed};
    for (long i = 0; i < ops; i++) {
        size_t k = roll_below(&d, COUNT), size = (size_t)1 << roll_below(&d, 20);
        size += roll_below(&d, size);
        if (b[k].p) {
            CHECK("content", filled(b[k].p, b[k].size, b[k].size, k + seed), "a block of %zu bytes changed", b[k].size);
            MUST(jemhooks_free(b[k].p));
            b[k].p = NULL;
            continue;
        }
        bool zero = roll_below(&d, 2);
        b[k].p = must_have(zero ? jemhooks_calloc(arena, 1, size) : jemhooks_alloc(arena, size), "block");
        b[k].size = size;
        if (zero) CHECK("zero", all_zero(b[k].p, size), "a zeroed block of %zu bytes holds old bytes", size);
        fill(b[k].p, size, k + seed);
        if (!roll_below(&d, 300)) MUST(jemhooks_trim(arena, NULL));
    }
    for (size_t k = 0; k < COUNT; k++) MUST(jemhooks_free(b[k].p));
    CHECK("abandoned", !stats_of(arena).abandoned, "jemalloc lost %zu bytes", (size_t)stats_of(arena).abandoned);
}
