/* provider.h - what the library keeps about a provider, around the functions of its kind. */
#ifndef JH_PROVIDER_H
#define JH_PROVIDER_H

#include "ranges.h"

#include <pthread.h>
#include <stdatomic.h>

struct jemhooks_provider {
    jemhooks_provider_ops ops;
    void *self;
    atomic_int references;
    unsigned epoch;          /* jh_fork_epoch when it was made                                        */
    size_t page;             /* a region's length is a multiple of this                               */
    bool host_accessible;    /* may the CPU touch the memory?                                         */
    /* All there is, if it cannot map more: either ranges that are a region each, for one arena at a time ... */
    size_t regions;          /* how many; 0: none of that                                             */
    jemhooks_mapping *region;
    size_t largest;          /* bytes of the largest                                                  */
    atomic_bool occupied;
    /* ... or ranges that arenas carve regions from, and where regions return to if they cannot be unmapped. */
    size_t whole;            /* bytes of all of either; 0: it maps more when asked                    */
    pthread_mutex_t lock;    /* short; guards the next one                                            */
    jh_ranges ranges;
};

/* As jemhooks_provider_create(), and map may be missing: all there is is added. */
int jh_provider_new(const jemhooks_provider_ops *ops, void *self, jemhooks_provider **provider);
void jh_provider_keep(jemhooks_provider *p);
/* Memory of a provider that is just being made: arenas divide it, or each range is a region. 0 or -errno, recorded. */
int jh_provider_add(jemhooks_provider *p, const jemhooks_mapping *ranges, size_t count, bool divided);

/* An arena moves in, and out. 0 or an error, recorded. */
int jh_provider_enter(jemhooks_provider *p, const char *arena, void **tenant);
void jh_provider_leave(jemhooks_provider *p, void *tenant);
/* For hooks: at least m->length bytes. 0 or -errno. */
int jh_provider_map(jemhooks_provider *p, void *tenant, size_t alignment, jemhooks_mapping *m);
void jh_provider_unmap(jemhooks_provider *p, void *tenant, jemhooks_mapping *m);

/* The caller's config over the defaults: see jemhooks_config. -E2BIG: it sets fields this version does not know. */
int jh_config_read(void *into, size_t into_size, const void *config, const char *what);

#endif
