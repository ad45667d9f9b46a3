/* memfd.c - memory of a memfd, which other processes can map: one for each arena. It is sealed against shrinking, so that no one
 * who has the descriptor can make touching it a crash.
 * hugetlb pages are given back whole, and reserved again before they are used: a hole has no reservation any more.
 * Concurrency: no state but the config.                                                                              */
#include "growing.h"
#include "place.h"
#include "../error.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static int enter(void *self, const char *arena, void **tenant) {
    const jemhooks_memfd_config *c = self;
    char name[80];
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    if (c->page_size) flags |= MFD_HUGETLB | jh_huge_flags(c->page_size);
    snprintf(name, sizeof name, "jemhooks:%s", arena);
    int fd = memfd_create(name, flags);
    if (fd < 0) return -errno;
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)) {
        int err = errno;
        close(fd);
        return -err;
    }
    return jh_growing_open(fd, MAP_SHARED, tenant);
}

static int give_back_huge(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length) {
    const jemhooks_memfd_config *c = self;
    if ((at | length) & (c->page_size - 1)) return -EINVAL;
    return jh_growing_give_back(self, tenant, m, at, length);
}

static int reserve_huge(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length) {
    const jemhooks_memfd_config *c = self;
    size_t first = at & ~(c->page_size - 1), end = (at + length + c->page_size - 1) & ~(c->page_size - 1);
    return jh_growing_reserve(self, tenant, m, first, end - first);
}

int jemhooks_provider_memfd(const jemhooks_memfd_config *config, jemhooks_provider **provider) {
    jemhooks_memfd_config c = JEMHOOKS_MEMFD_CONFIG_INIT;
    int rc = jh_config_read(&c, sizeof c, config, "memfd");
    if (rc) return rc;
    if (!provider) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "memfd: nowhere to put the provider (NULL)");
    if ((rc = jh_check_huge("memfd", c.page_size))) return rc;
    const jemhooks_provider_ops ops = {
        .size = sizeof ops,
        .name = c.page_size ? "memfd of huge pages" : "memfd",
        .page = c.page_size,
        .enter = enter,
        .leave = jh_growing_leave,
        .map = jh_growing_map,
        .unmap = jh_growing_unmap,
        .give_back = c.page_size ? give_back_huge : jh_growing_give_back,
        .reserve = c.page_size ? reserve_huge : NULL,
        .share = jh_growing_share,
        .close = free,
    };
    jemhooks_memfd_config *self = malloc(sizeof *self);
    if (!self) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "memfd: no memory for the provider itself");
    *self = c;
    if ((rc = jh_provider_new(&ops, self, provider))) free(self);
    return rc;
}
