/* registration.h - a region's registration: state, keys, leases. */
#ifndef JH_REGISTRATION_H
#define JH_REGISTRATION_H

#include "jemhooks.h"
#include "pages.h"

/* The registrars of an arena and what they have done for it. */
typedef struct jh_rails {
    jemhooks_registrar *registrar[JEMHOOKS_MAX_RAILS];
    unsigned count;
    unsigned access;   /* enum jemhooks_access                      */
    int policy;        /* enum jemhooks_policy                      */
    unsigned epoch;    /* jh_fork_epoch when the arena was made     */
    const char *name;  /* the arena's, for error texts              */
    atomic_ullong registered, registered_peak; /* bytes              */
    atomic_ullong registrations, deregistrations, failures;
} jh_rails;

typedef struct jh_registration {
    jemhooks_region *hot; /* what users and look-ups see */
    jh_pages pages;
    jh_rails *rails;
    jemhooks_mr mr[JEMHOOKS_MAX_RAILS];
    unsigned live;       /* how many rails, from the first, hold a registration; all or none, unless one failed to end */
} jh_registration;

/* Opening and closing a change of the hot line; in between, fields are stored with release. pages.lock held. */
void jh_hot_begin(jemhooks_region *hot);
void jh_hot_end(jemhooks_region *hot);
static inline void jh_hot_set(uint64_t *field, uint64_t value) {
    __atomic_store_n(field, value, __ATOMIC_RELEASE);
}

static inline unsigned jh_state(const jemhooks_region *hot) {
    return __atomic_load_n(&hot->word, __ATOMIC_ACQUIRE) & 255;
}

/* Registers the region unless it is. The caller holds a live block in it or a lease on it, or is alone with it.
 * Not for hooks. Records an error. */
int jh_register(jh_registration *r);
enum jh_despite { JH_IF_IDLE, JH_DESPITE_BLOCKS, JH_DESPITE_LEASES };
/* Deregisters the region if it is registered, and idle and unleased (JH_IF_IDLE), or unleased, or anyway; gives its pages back.
 * 0, or 1: it is not; or the registrar's error, recorded, and the region is still registered. Not for hooks. */
int jh_deregister(jh_registration *r, enum jh_despite despite);

#endif
