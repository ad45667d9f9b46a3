/* policy.h - when regions are registered and deregistered. Only jh_unused() is for hooks. */
#ifndef JH_POLICY_H
#define JH_POLICY_H

#include "registration.h"

/* Registers the region unless it is, evicting others where a budget or the kernel demands it. The caller holds a live block
 * in it or a lease on it, or is alone with it. Records an error. */
int jh_register(jh_registration *r);
/* Registers a region that nobody uses yet, only if there is room for it: 0; 1: there is none; or an error, recorded. */
int jh_register_ahead(jh_registration *r);
/* Deregisters the region if it is registered and nothing that matters holds it there; gives its pages back. 0, or 1: it is
 * not; or the registrar's error, recorded, and the region is still registered. */
int jh_deregister(jh_registration *r, enum jh_despite despite);
/* Deregisters what has been idle for too long, or is idle beyond a lowered limit. */
void jh_expire(jh_rails *rails);
/* To be told when a registered region holds no block any more, or no lease. */
void jh_unused(jh_registration *r);
/* Is there something to deregister as soon as it is idle? To be asked after what frees memory; cheap. */
static inline bool jh_due(jh_rails *rails) {
    return !atomic_load_explicit(&rails->look, memory_order_relaxed);
}

#endif
