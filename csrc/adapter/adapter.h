/* adapter.h - what the loadable module of an adapter offers: telling one library's registration cache what we tell subscribers. */
#ifndef JH_ADAPTER_H
#define JH_ADAPTER_H

#include "jemhooks.h"

typedef struct jh_adapter {
    /* Finds the library and gets ready. 0 or -errno, with host->set_error called. Called again in a forked child. */
    int (*start)(const jemhooks_host *host);
    /* Pages or registrations in this range are about to go. Obeys the rules of hooks; may come before start() and after its
     * failure. */
    void (*tell)(uint64_t base, uint64_t length);
} jh_adapter;

/* The one symbol that it exports. */
#define JH_ADAPTER_SYMBOL "jemhooks_adapter"
extern const jh_adapter jemhooks_adapter;

#endif
