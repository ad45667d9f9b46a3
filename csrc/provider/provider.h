/* provider.h - where memory comes from: one small table of functions per kind. */
#ifndef JH_PROVIDER_H
#define JH_PROVIDER_H

#include "jemhooks.h"

#include <stdatomic.h>
#include <stdbool.h>

/* map, unmap and give_back run inside hooks: system calls at most, no malloc, no lock but the provider's own short one. */
typedef struct jh_provider_ops {
    const char *name;
    /* A range of at least *length bytes on `alignment`; sets *length to all that is usable. NULL with errno. Where there is
     * a number of regions, the next one. */
    void *(*map)(jemhooks_provider *p, size_t *length, size_t alignment);
    void (*unmap)(jemhooks_provider *p, void *base, size_t length);
    /* Did the pages go, so that they read as zero? NULL: this provider never gives pages back. */
    bool (*give_back)(jemhooks_provider *p, void *base, size_t length);
    /* An arena moves in (0 or a recorded error) and out. NULL: any number may. */
    int (*move_in)(jemhooks_provider *p);
    void (*move_out)(jemhooks_provider *p);
} jh_provider_ops;

struct jemhooks_provider {
    const jh_provider_ops *ops;
    atomic_int references;
    size_t page;          /* a region's length is a multiple of this                       */
    size_t regions;       /* all it has is so many regions, mapped with length 0; 0: any number */
    size_t whole;         /* bytes of those regions                                          */
    size_t largest;       /* of one of them                                                  */
    bool host_accessible; /* may the CPU touch the memory?                                 */
    unsigned epoch;       /* jh_fork_epoch when it was made                                 */
    bool fresh_is_zero;   /* do newly mapped pages read as zero?                           */
};

/* Starts p with one reference. */
void jh_provider_init(jemhooks_provider *p, const jh_provider_ops *ops);
void jh_provider_keep(jemhooks_provider *p);
/* The caller's config over the defaults: see jemhooks_config. -E2BIG: it sets fields this version does not know. */
int jh_config_read(void *into, size_t into_size, const void *config, const char *what);

#endif
