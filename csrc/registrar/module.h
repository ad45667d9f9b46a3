/* module.h - what every loadable registrar module starts with: its configuration, read the same way by all.
 *
 * A configuration struct begins with its own size, so that callers and modules of different ages understand each other:
 * fields that the caller does not know keep their defaults, fields that the module does not know must be zero.
 * No state: may be used from any thread.                                                                             */
#ifndef JEMHOOKS_MODULE_H
#define JEMHOOKS_MODULE_H

#include <string.h>

#include "jemhooks.h"

/* The one symbol that a module exports. */
#define MODULE_EXPORT __attribute__((visibility("default")))

/* Lays the caller's config (NULL: none) over `ours`, which holds the defaults. 0, -EINVAL or -E2BIG with a text. */
static inline int module_config(const jemhooks_host *host, const char *kind, void *ours, size_t size,
                                const void *config) {
    if (!config) return 0;
    size_t theirs = *(const size_t *)config;
    if (theirs < sizeof(size_t) || theirs > 65536) {
        host->set_error("opening registrar %s: its config has size %zu; start from the INIT macro of jemhooks_%s.h",
                        kind, theirs, kind);
        return -EINVAL;
    }
    const unsigned char *bytes = config;
    for (size_t i = size; i < theirs; i++) {
        if (!bytes[i]) continue;
        host->set_error("opening registrar %s: its config has %zu bytes, this module knows %zu, and byte %zu is set; "
                        "leave newer fields zero or install a newer jemhooks", kind, theirs, size, i);
        return -E2BIG;
    }
    memcpy(ours, config, theirs < size ? theirs : size);
    return 0;
}

#endif
