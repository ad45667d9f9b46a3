/* provider.c - what all providers share: reference counts and the reading of size-first config structs.
 * Concurrency: the count is atomic; a provider is freed by whoever drops the last reference. */
#include "provider.h"
#include "../error.h"
#include "../fork.h"

#include <stdlib.h>
#include <string.h>

void jh_provider_init(jemhooks_provider *p, const jh_provider_ops *ops) {
    p->ops = ops;
    atomic_init(&p->references, 1);
    p->epoch = atomic_load(&jh_fork_epoch);
    p->page = 4096;
    p->host_accessible = p->fresh_is_zero = true;
}

void jh_provider_keep(jemhooks_provider *p) {
    atomic_fetch_add(&p->references, 1);
}

void jemhooks_provider_close(jemhooks_provider *p) {
    if (p && atomic_fetch_sub(&p->references, 1) == 1) free(p);
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
