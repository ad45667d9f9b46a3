/* registration.h - a region's registration: state, keys, leases. */
#ifndef JH_REGISTRATION_H
#define JH_REGISTRATION_H

#include "budget.h"
#include "jemhooks.h"
#include "pages.h"

/* The registrars of an arena, its rules of registration, and what was done by them. */
typedef struct jh_rails {
    jh_account account;
    jemhooks_registrar *registrar[JEMHOOKS_MAX_RAILS];
    unsigned count;
    unsigned access;      /* enum jemhooks_access                       */
    int policy;           /* enum jemhooks_policy                       */
    int evict;            /* enum jemhooks_evict                        */
    uint64_t idle_ttl;    /* ns that a region may be idle; UINT64_MAX: any time */
    bool in_free;         /* no registrar minds being called from a free                              */
    bool prompt;          /* then, with an idle_ttl of 0: idle regions go at once                     */
    _Atomic uint64_t look; /* jh_now() when it may pay to look for regions to deregister again; 0: now */
    atomic_bool quiet;    /* nothing is to be registered ahead of its use, after a trim or revoke, until something is used */
    unsigned epoch;       /* jh_fork_epoch when the arena was made      */
    const char *name;     /* the arena's, for error texts               */
    atomic_ullong registrations, deregistrations, failures, hits, evictions, retries;
    atomic_ullong time_registering, durations[JEMHOOKS_DURATIONS];
} jh_rails;

typedef struct jh_registration {
    jh_pin pin;           /* first: one is found from the other */
    jemhooks_region *hot; /* what users and look-ups see        */
    jh_pages pages;
    jh_rails *rails;
    jemhooks_mr mr[JEMHOOKS_MAX_RAILS];
    unsigned live;        /* how many rails, from the first, hold a registration; all or none, unless one failed to end */
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

/* Claims the region for registering, waiting for other claims: 0; 1: it is registered; or an error, recorded. */
int jh_claim_to_register(jh_registration *r);
/* Waits until the region is in no one's claim; its state then. -EDEADLK, recorded: this thread is inside a registrar, whose
 * own claim the other one may be waiting for. */
int jh_settled(jh_registration *r);
enum jh_despite { JH_IF_IDLE, JH_DESPITE_BLOCKS, JH_DESPITE_LEASES };
/* Claims it for deregistering, without waiting, if it is registered, and idle and unleased (JH_IF_IDLE), or unleased, or
 * anyway. */
bool jh_claim_to_deregister(jh_registration *r, enum jh_despite despite);

/* With the claim, and no lock: */
/* Registers with every rail that is not live, or with none of them (but for one that cannot be undone). Records an error. */
int jh_take(jh_registration *r);
/* Deregisters the rails above `keep`, the last first; stops at the first that fails and returns its error, recorded. */
int jh_drop(jh_registration *r, unsigned keep);
/* Ends the claim: registered as far as any rail is, else mapped, with the pages given back that a pin, even one that
 * failed half-way, has populated. */
void jh_settle(jh_registration *r);

/* Claims an unregistered region for good, since it is about to be unmapped. */
void jh_seal(jh_registration *r);
/* To those who wait for claims: one has ended. */
void jh_claim_over(void);

/* Is this thread in a registrar's or a subscriber's function? */
bool jh_inside_registrar(void);

#endif
