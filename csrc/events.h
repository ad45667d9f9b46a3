/* events.h - tells subscribers what happens to regions. */
#ifndef JH_EVENTS_H
#define JH_EVENTS_H

#include "jemhooks.h"

#include <stdbool.h>

/* Every kind that somebody subscribes to. */
extern unsigned jh_events_wanted;

void jh_event_send(jemhooks_arena *arena, enum jemhooks_event_kind kind, uint64_t base, uint64_t length);

/* Is this thread in a subscriber's function? Not known of those that run in hooks. */
bool jh_inside_subscriber(void);

/* Without a lock of ours. Hooks may call it for the kinds that they see. */
static inline void jh_event(jemhooks_arena *arena, enum jemhooks_event_kind kind, uint64_t base, uint64_t length) {
    if (__atomic_load_n(&jh_events_wanted, __ATOMIC_RELAXED) & kind) jh_event_send(arena, kind, base, length);
}

/* The arena ends; another one may be made at its address. */
void jh_events_forget(const jemhooks_arena *arena);

#endif
