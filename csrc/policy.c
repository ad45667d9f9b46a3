/* policy.c - when regions are registered and deregistered: at the first key, until room is needed or they have been idle
 * for too long.
 * Room is needed when a budget of the arena is full, or when the kernel refuses. Then idle regions are deregistered, the
 * longest idle first, of all the arenas that share the budget; if that is not enough, these arenas' free pages, which make
 * regions busy, are given up first.
 * Concurrency: a thread that makes room holds the claim on its own region, never waits for another claim, and waits for
 * evictions of others only while they are under way.                                                                */
#include "policy.h"
#include "error.h"
#include "events.h"
#include "fault.h"
#include "registrar/registrar.h"

#include <stdio.h>

/* ---- eviction ---------------------------------------------------------------------------------------------------- */

static jh_registration *registration_of(const jh_pin *pin) {
    return (jh_registration *)pin;
}

static bool unleased(const jh_registration *r) {
    return __atomic_load_n(&r->hot->word, __ATOMIC_RELAXED) == JEMHOOKS_REGISTERED;
}

static uint64_t age_if_idle(const jh_pin *pin) {
    const jh_registration *r = registration_of(pin);
    return unleased(r) && !jh_pages_busy(&r->pages) ? pin->unused_since : 0;
}

static uint64_t age_if_unleased(const jh_pin *pin) {
    const jh_registration *r = registration_of(pin);
    return unleased(r) && r->rails->evict == JEMHOOKS_EVICT_UNLEASED ? pin->unused_since : 0;
}

static uint64_t age_if_expired(const jh_pin *pin) {
    uint64_t since = age_if_idle(pin);
    return since && !(since & JH_UNUSED_YET) && jh_now() - since >= registration_of(pin)->rails->idle_ttl ? since : 0;
}

static bool claim_if_idle(jh_pin *pin) {
    return jh_claim_to_deregister(registration_of(pin), JH_IF_IDLE);
}

static bool claim_if_unleased(jh_pin *pin) {
    return jh_claim_to_deregister(registration_of(pin), JH_DESPITE_BLOCKS);
}

static bool claim_anyway(jh_pin *pin) {
    return jh_claim_to_deregister(registration_of(pin), JH_DESPITE_LEASES);
}

static void tell(const jh_registration *r, enum jemhooks_event_kind kind) {
    jh_event(r->hot->arena, kind, r->hot->base, r->hot->length);
}

/* Ends the registration of a claimed region, and the claim. */
static int finish(jh_registration *r, bool evicted) {
    JH_PAUSE(deregistering);
    tell(r, JEMHOOKS_ON_DEREGISTER);
    int rc = jh_drop(r, 0);
    if (r->live) {
        tell(r, JEMHOOKS_ON_REGISTER);
        jh_budget_stays(&r->pin);
    } else {
        if (evicted) atomic_fetch_add(&r->rails->evictions, 1);
        atomic_fetch_add(&r->rails->deregistrations, 1);
        jh_budget_discharge(&r->pin);
    }
    jh_settle(r); /* afterwards its arena may go */
    return rc;
}

/* Deregisters a region of budget b, or (NULL) of account a, that has been picked: 0; 1: there is none; or an error, recorded. */
static int evict(const jemhooks_budget *b, jh_account *a, uint64_t (*age)(const jh_pin *), bool (*claim)(jh_pin *)) {
    jh_pin *pin = jh_budget_pick(b, a, age, claim);
    return pin ? finish(registration_of(pin), true) : 1;
}

static int evict_from(const jemhooks_budget *b) {
    int rc = evict(b, NULL, age_if_idle, claim_if_idle);
    return rc == 1 ? evict(b, NULL, age_if_unleased, claim_if_unleased) : rc;
}

void jh_unused(jh_registration *r) {
    atomic_store(&r->pin.unused_since, jh_now());
    if (r->rails->prompt || (r->rails->in_free && jh_account_over(&r->rails->account))) atomic_store(&r->rails->look, 0);
}

/* Down to limits that were lowered, as far as this arena can. */
static void lower(jh_account *a) {
    int rc = 0;
    while (!rc && jh_account_over(a))
        if ((rc = evict(NULL, a, age_if_idle, claim_if_idle)) == 1) rc = evict(NULL, a, age_if_unleased, claim_if_unleased);
}

void jh_expire(jh_rails *rails) {
    uint64_t now = jh_now(), look = atomic_load_explicit(&rails->look, memory_order_relaxed);
    bool ages = rails->idle_ttl != UINT64_MAX;
    if (jh_inside_registrar() || now < look) return;
    if (!atomic_compare_exchange_strong(&rails->look, &look, rails->prompt || !ages ? UINT64_MAX : now + rails->idle_ttl / 8)) return;
    lower(&rails->account);
    while (ages && !evict(NULL, &rails->account, age_if_expired, claim_if_idle)) {}
}

/* ---- registration ------------------------------------------------------------------------------------------------ */

/* Charges the budgets, making room where they are full. Records an error. */
static int admit(jh_registration *r) {
    jh_account *a = &r->rails->account;
    jemhooks_budget *full;
    uint64_t turn;
    for (bool reclaimed = false; (full = jh_budget_charge(a, &r->pin, r->hot->length, &turn));) {
        int rc = turn == JH_NEVER ? 1 : evict_from(full);
        if (rc < 0) return rc;
        if (!rc || (turn != JH_NEVER && !jh_inside_registrar() && jh_budget_wait(full, turn))) continue;
        if (reclaimed || turn == JH_NEVER) {
            char why[384];
            jh_budget_explain(full, why, sizeof why);
            return jh_fail(JEMHOOKS_ERROR_PIN_LIMIT, ENOBUFS, "arena '%s': no room to register %zu bytes: %s; free blocks or "
                           "release leases, or raise pin_limit or max_regions", r->rails->name, (size_t)r->hot->length, why);
        }
        reclaimed = true;
        jh_budget_reclaim(full);
    }
    return 0;
}

/* Errors that fewer registrations might cure. */
static bool curable(int rc) {
    switch (-rc) {
    case ENOMEM: case EAGAIN: case ENOSPC: case ENOBUFS: case EMFILE: case EDQUOT: return true;
    default: return false;
    }
}

/* Deregisters idle regions of the same registrars, as many bytes as this one needs. Was there any? */
static bool make_room(jh_registration *r) {
    uint64_t freed = 0;
    for (int round = 0; round < 2 && !freed; round++) {
        for (unsigned i = 0; i < r->rails->count; i++) {
            jemhooks_budget *b = r->rails->account.budget[1 + i];
            if (round) jh_budget_reclaim(b);
            while (freed < r->hot->length) {
                jh_pin *pin = jh_budget_pick(b, NULL, age_if_idle, claim_if_idle);
                if (!pin) break;
                uint64_t bytes = pin->bytes;
                if (finish(registration_of(pin), true)) return freed; /* it would be picked again */
                freed += bytes;
            }
        }
    }
    return freed;
}

static void count_time(jh_rails *rails, uint64_t ns) {
    uint64_t us = ns / 1000;
    unsigned i = us ? 64 - (unsigned)__builtin_clzll(us) : 0;
    atomic_fetch_add(&rails->time_registering, ns);
    atomic_fetch_add(&rails->durations[i < JEMHOOKS_DURATIONS ? i : JEMHOOKS_DURATIONS - 1], 1);
}

/* Registers the claimed region, with a second try if room could be made. */
static int take(jh_registration *r) {
    uint64_t start = jh_now();
    int rc = jh_take(r);
    if (curable(rc) && !r->live) {
        char why[768];
        snprintf(why, sizeof why, "%s", jemhooks_last_error());
        if (!make_room(r)) return jh_fail(JEMHOOKS_ERROR_REGISTRATION, -rc, "%s", why);
        atomic_fetch_add(&r->rails->retries, 1);
        start = jh_now();
        rc = jh_take(r);
    }
    if (!rc) count_time(r->rails, jh_now() - start);
    return rc;
}

int jh_register(jh_registration *r) {
    jh_expire(r->rails);
    int rc = jh_claim_to_register(r);
    if (rc) return rc > 0 ? 0 : rc;
    atomic_store(&r->rails->quiet, false);
    JH_PAUSE(registering);
    unsigned had = r->live;
    if (had || !(rc = admit(r))) {
        rc = take(r);
        if (!r->live) jh_budget_discharge(&r->pin);
        else if (!had) atomic_fetch_add(&r->rails->registrations, 1);
        if (r->live && !had) tell(r, JEMHOOKS_ON_REGISTER);
        atomic_store(&r->pin.unused_since, jh_now());
    }
    jh_settle(r);
    if (rc) atomic_fetch_add(&r->rails->failures, 1);
    return rc;
}

int jh_register_ahead(jh_registration *r) {
    uint64_t turn;
    int rc = jh_claim_to_register(r);
    if (rc) return rc > 0 ? 0 : rc;
    if (jh_budget_charge(&r->rails->account, &r->pin, r->hot->length, &turn)) {
        jh_settle(r);
        return 1;
    }
    uint64_t start = jh_now();
    rc = jh_take(r);
    if (!r->live) {
        jh_budget_discharge(&r->pin);
    } else {
        atomic_fetch_add(&r->rails->registrations, 1);
        atomic_store(&r->pin.unused_since, JH_UNUSED_YET | jh_now());
        tell(r, JEMHOOKS_ON_REGISTER);
    }
    if (rc) atomic_fetch_add(&r->rails->failures, 1);
    else count_time(r->rails, jh_now() - start);
    jh_settle(r);
    return rc;
}

int jh_deregister(jh_registration *r, enum jh_despite despite) {
    static bool (*const claim[])(jh_pin *) = {claim_if_idle, claim_if_unleased, claim_anyway};
    do {
        int state = jh_settled(r);
        if (state < 0) return state;
        if (state != JEMHOOKS_REGISTERED) return 1;
        if (jh_budget_claim(&r->pin, claim[despite])) return finish(r, false);
    } while (despite == JH_DESPITE_LEASES); /* another thread has just claimed it */
    return 1;
}

int jemhooks_budget_set(jemhooks_budget *b, uint64_t pin_limit, uint64_t max_regions) {
    if (!b) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_budget_set: the budget is NULL");
    jh_budget_limit(b, pin_limit, max_regions);
    int rc = 0;
    for (bool reclaimed = false; !rc && jh_budget_exceeded(b);) {
        if ((rc = evict_from(b)) != 1) continue;
        if (reclaimed) break;
        rc = 0;
        reclaimed = true;
        jh_budget_reclaim(b);
    }
    return rc < 0 ? rc : 0;
}
