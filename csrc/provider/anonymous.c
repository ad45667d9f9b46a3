/* anonymous.c - private anonymous memory: ordinary, transparent huge or hugetlb pages, on one NUMA node if wanted.
 * A mapping starts on 2 MiB (or on its huge page) and takes whole 2 MiB of address space, so that no stranger's mapping
 * shares a pagemap slot with it; only the asked-for part belongs to the region, and only that can be touched: a huge page
 * across the region's end would stay in memory when the region is given back.
 * hugetlb pages are never given back: the kernel rounds such a madvise down and still says that it was done.
 * Concurrency: no state but the config; every call may run at any time. */
#include "provider.h"
#include "../error.h"
#include "../fault.h"
#include "../pagemap.h"

#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HUGE_2M ((size_t)2 << 20)
#define HUGE_1G ((size_t)1 << 30)
#define MAX_NODE 1023 /* the kernel's MAX_NUMNODES, at most */

typedef struct {
    jemhooks_provider head;
    jemhooks_anonymous_config config;
} anonymous;

static size_t rounded(size_t n, size_t unit) {
    return (n + unit - 1) / unit * unit;
}

static int prepare(const anonymous *a, void *base, size_t length) {
    if (!a->config.page_size) madvise(base, length, a->config.transparent_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    if (a->config.numa_node < 0) return 0;
    unsigned long nodes[(MAX_NODE + 1) / 64] = {0};
    nodes[a->config.numa_node / 64] = 1ul << a->config.numa_node % 64;
    return (int)syscall(SYS_mbind, base, length, MPOL_BIND, nodes, MAX_NODE + 1, 0);
}

static void *map(jemhooks_provider *p, size_t *length, size_t alignment) {
    anonymous *a = (anonymous *)p;
    size_t unit = a->config.page_size > JH_SLOT ? a->config.page_size : JH_SLOT;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (a->config.page_size) flags |= MAP_HUGETLB | (a->config.page_size == HUGE_1G ? 30 << 26 : 21 << 26); /* MAP_HUGE_SHIFT */
    size_t usable = rounded(*length, p->page), span = rounded(usable, unit);
    if (alignment < unit) alignment = unit;
    if (usable < *length || span < usable || span + alignment < span) {
        errno = ENOMEM;
        return NULL;
    }
    if (JH_FAULT(alignment_small)) alignment = 2 * JH_PAGE;
    /* Reserve with room to align, then put the real mapping on the aligned part: a hugetlb mapping cannot be trimmed
     * below its page, and one that fails must fail here, not at the first touch. */
    char *room = mmap(NULL, span + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return NULL;
    char *base = (char *)rounded((uintptr_t)room, alignment);
    if (JH_FAULT(alignment_small) && !((uintptr_t)base % JH_SLOT)) base += JH_PAGE;
    void *got = mmap(base, usable, PROT_READ | PROT_WRITE, flags | MAP_FIXED, -1, 0);
    int err = errno;
    if (got != MAP_FAILED && prepare(a, base, usable)) {
        err = errno;
        got = MAP_FAILED;
    }
    if (got == MAP_FAILED) {
        munmap(room, span + alignment);
        errno = err;
        return NULL;
    }
    if (base > room) munmap(room, (size_t)(base - room));
    munmap(base + span, (size_t)(room + alignment - base));
    *length = usable;
    return base;
}

static void unmap(jemhooks_provider *p, void *base, size_t length) {
    size_t unit = p->page > JH_SLOT ? p->page : JH_SLOT;
    munmap(base, rounded(length, unit));
}

static bool give_back(jemhooks_provider *p, void *base, size_t length) {
    (void)p;
    return !madvise(base, length, MADV_DONTNEED) || JH_FAULT(give_back_trusted);
}

static const jh_provider_ops small = {"anonymous", map, unmap, give_back, NULL, NULL};
static const jh_provider_ops huge = {"hugetlb", map, unmap, NULL, NULL, NULL};

int jemhooks_provider_anonymous(const jemhooks_anonymous_config *config, jemhooks_provider **provider) {
    jemhooks_anonymous_config c = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    int rc = jh_config_read(&c, sizeof c, config, "anonymous memory");
    if (rc) return rc;
    if (!provider) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "anonymous memory: nowhere to put the provider (NULL)");
    char path[64];
    if (c.page_size && c.page_size != HUGE_2M && c.page_size != HUGE_1G)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "anonymous memory: page_size %zu is not one of 0 (ordinary pages), "
                       "2097152 and 1073741824 bytes", c.page_size);
    snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-%zukB", c.page_size >> 10);
    if (c.page_size && access(path, F_OK))
        return jh_fail(JEMHOOKS_ERROR_PROVIDER, EOPNOTSUPP, "anonymous memory: this machine has no huge pages of %zu "
                       "bytes; use page_size 2097152 or 0", c.page_size);
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d", c.numa_node);
    if (c.numa_node < -1 || c.numa_node > MAX_NODE || (c.numa_node >= 0 && access(path, F_OK)))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "anonymous memory: there is no NUMA node %d on this machine; -1 "
                       "leaves the choice to the kernel", c.numa_node);
    anonymous *a = calloc(1, sizeof *a);
    if (!a) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "anonymous memory: no memory for the provider itself");
    jh_provider_init(&a->head, c.page_size ? &huge : &small);
    a->config = c;
    if (c.page_size) a->head.page = c.page_size;
    *provider = &a->head;
    return 0;
}
