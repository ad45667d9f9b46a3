/* anonymous.c - private anonymous memory: ordinary, transparent huge or hugetlb pages, on one NUMA node if wanted.
 * hugetlb pages are never given back: the kernel rounds such a madvise down and still says that it was done.
 * Concurrency: no state but the config; every call may run at any time. */
#include "place.h"
#include "provider.h"
#include "../error.h"
#include "../fault.h"

#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_NODE 1023 /* the kernel's MAX_NUMNODES, at most */

typedef jemhooks_anonymous_config anonymous;

static int prepare(const anonymous *a, void *base, size_t length) {
    if (!a->page_size) madvise(base, length, a->transparent_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    if (a->numa_node < 0) return 0;
    unsigned long nodes[(MAX_NODE + 1) / 64] = {0};
    nodes[a->numa_node / 64] = 1ul << a->numa_node % 64;
    return (int)syscall(SYS_mbind, base, length, MPOL_BIND, nodes, MAX_NODE + 1, 0);
}

static int map(void *self, void *tenant, size_t alignment, jemhooks_mapping *m) {
    const anonymous *a = self;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (a->page_size) flags |= MAP_HUGETLB | (int)jh_huge_flags(a->page_size);
    (void)tenant;
    void *base = jh_place(m->length, alignment, flags, -1, 0);
    if (!base) return -errno;
    if (prepare(a, base, m->length)) {
        int err = errno;
        jh_displace(base, m->length);
        return -err;
    }
    *m = (jemhooks_mapping){base, m->length, 0, true};
    return 0;
}

static void unmap(void *self, void *tenant, const jemhooks_mapping *m) {
    (void)self, (void)tenant;
    jh_displace(m->base, m->length);
}

static int give_back(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length) {
    (void)self, (void)tenant;
    return madvise((char *)m->base + at, length, MADV_DONTNEED) && !JH_FAULT(give_back_trusted) ? -errno : 0;
}

int jemhooks_provider_anonymous(const jemhooks_anonymous_config *config, jemhooks_provider **provider) {
    jemhooks_anonymous_config c = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    int rc = jh_config_read(&c, sizeof c, config, "anonymous memory");
    if (rc) return rc;
    if (!provider) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "anonymous memory: nowhere to put the provider (NULL)");
    if ((rc = jh_check_huge("anonymous memory", c.page_size))) return rc;
    char path[64];
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d", c.numa_node);
    if (c.numa_node < -1 || c.numa_node > MAX_NODE || (c.numa_node >= 0 && access(path, F_OK)))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "anonymous memory: there is no NUMA node %d on this machine; -1 "
                       "leaves the choice to the kernel", c.numa_node);
    const jemhooks_provider_ops ops = {
        .size = sizeof ops,
        .name = c.page_size ? "hugetlb" : "anonymous",
        .page = c.page_size,
        .map = map,
        .unmap = unmap,
        .give_back = c.page_size ? NULL : give_back,
        .close = free,
    };
    anonymous *a = malloc(sizeof *a);
    if (!a) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "anonymous memory: no memory for the provider itself");
    *a = c;
    rc = jh_provider_new(&ops, a, provider);
    if (rc) free(a);
    return rc;
}
