/* budget.h - what may be registered at a time: limits that arenas share, and the registered regions they are about. */
#ifndef JH_BUDGET_H
#define JH_BUDGET_H

#include "jemhooks.h"

#include <stdatomic.h>
#include <stdbool.h>

/* A registered region as its budgets see it; linked, and charged, from before its registration until after its end. */
typedef struct jh_pin {
    struct jh_pin *next, **link;
    struct jh_account *account; /* NULL: not linked */
    uint64_t bytes;
    bool leaving;               /* someone is about to discharge it */
    atomic_ullong unused_since; /* jh_now() when it last became idle, or the like */
} jh_pin;

#define JH_UNUSED_YET ((uint64_t)1 << 63) /* set: registered ahead of its first use then, and the last to be evicted */

/* An arena as its budgets see it. */
typedef struct jh_account {
    struct jh_account *next, **link;                 /* of all that others may evict from */
    jemhooks_budget *budget[1 + JEMHOOKS_MAX_RAILS]; /* its own and its registrars'; twice if one is two rails */
    unsigned budgets;
    jh_pin *pins;
    atomic_ullong bytes, peak; /* of its pins                            */
    unsigned visitors;         /* threads in `reclaim`                   */
    const char *name;          /* the arena's                            */
    void (*reclaim)(struct jh_account *); /* gives free memory up; called with no lock held */
} jh_account;

/* ns of CLOCK_MONOTONIC. Hooks may ask. */
uint64_t jh_now(void);

/* Opens the account to evictions for the sake of others, and ends that; the latter waits for those in `reclaim`. */
void jh_account_enter(jh_account *a);
void jh_account_leave(jh_account *a);

/* Limits for a budget whose owner has set none. */
void jh_budget_suggest(jemhooks_budget *b, uint64_t pin_limit, uint64_t max_regions);
/* New limits, set by the owner. Nothing is evicted. */
void jh_budget_limit(jemhooks_budget *b, uint64_t pin_limit, uint64_t max_regions);

/* How often the budget is among the account's. */
unsigned jh_budget_times(const jh_account *a, const jemhooks_budget *b);
/* Charges every budget of the account for a registration of `bytes`, or none of them: then the first that is full, with
 * the state of its releases in *turn, or JH_NEVER: it could not take as much if it were empty. NULL: charged. */
#define JH_NEVER UINT64_MAX
jemhooks_budget *jh_budget_charge(jh_account *a, jh_pin *pin, uint64_t bytes, uint64_t *turn);
/* Is there room for a region of `bytes` in every budget of the account, with nothing evicted? */
bool jh_budget_has_room(const jh_account *a, uint64_t bytes);
/* Its registration has ended; or it never will, and the memory stays pinned without an arena. */
void jh_budget_discharge(jh_pin *pin);
void jh_budget_strand(jh_pin *pin);
/* Claims the pin, if it is charged: it is leaving then. */
bool jh_budget_claim(jh_pin *pin, bool (*claim)(jh_pin *));
/* It stays, after all. */
void jh_budget_stays(jh_pin *pin);
/* Of the pins of budget b (NULL: of account a), whose `age` is not 0, the oldest that `claim` accepts; it is leaving then.
 * Both run under the budgets' lock. NULL: there is none. */
jh_pin *jh_budget_pick(const jemhooks_budget *b, jh_account *a, uint64_t (*age)(const jh_pin *), bool (*claim)(jh_pin *));
/* Is more charged to some budget of the account than it allows, since it was lowered? Hooks may ask. */
bool jh_account_over(const jh_account *a);
/* Is more charged than the limits allow, as after one was lowered? */
bool jh_budget_exceeded(jemhooks_budget *b);
/* Waits, while pins of b are leaving, for a release after *turn. False: there was none. */
bool jh_budget_wait(jemhooks_budget *b, uint64_t turn);
/* Has all arenas of the budget give their free memory up. */
void jh_budget_reclaim(jemhooks_budget *b);
/* The limits in words; returns as snprintf() does. */
int jh_budget_limits(const jemhooks_budget *b, char *text, size_t size);
/* The limits and who holds how much of them, the largest holders first. */
void jh_budget_explain(jemhooks_budget *b, char *text, size_t size);

#endif
