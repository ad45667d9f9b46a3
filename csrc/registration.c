/* registration.c - how a region is registered and deregistered: its states, its keys, the calls of its registrars.
 *
 *      mapped -> registering -> registered -> deregistering -> mapped
 *
 * Concurrency: the state moves under pages.lock, published in the hot line's word together with the lease count, so
 * that a lease and a deregistration cannot both win. Registering and deregistering are a claim by one thread, which
 * then calls the registrar with no lock held; others wait for the claim's end, but never from inside a registrar: -EDEADLK.
 * "Nothing committed" and the move to deregistering are one critical section: while a block of a region lives, its
 * registered region stays so, and a key may be read without any lock.                                                */
#include "registration.h"
#include "error.h"
#include "events.h"
#include "fault.h"
#include "fork.h"
#include "pagemap.h"
#include "populate.h"
#include "registrar/registrar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STATE ((uint64_t)255)
#define LEASE ((uint64_t)256)

static _Thread_local unsigned inside; /* how many registrar calls this thread is in */
static pthread_mutex_t claims = PTHREAD_MUTEX_INITIALIZER; /* for waiting only */
static pthread_cond_t claim_ended = PTHREAD_COND_INITIALIZER;

static void in_child(void) {
    pthread_mutex_init(&claims, NULL);
    pthread_cond_init(&claim_ended, NULL);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

void jh_hot_begin(jemhooks_region *hot) {
    __atomic_store_n(&hot->generation, hot->generation + 1, __ATOMIC_RELAXED);
}

void jh_hot_end(jemhooks_region *hot) {
    __atomic_store_n(&hot->generation, hot->generation + 1, __ATOMIC_RELEASE);
}

/* Moves the state, leases untouched; with keys of `mr`, or none. pages.lock held. */
static void move(jh_registration *r, unsigned state, const jemhooks_mr *mr) {
    jh_hot_begin(r->hot);
    jh_hot_set(&r->hot->lkey, mr ? mr->lkey : 0);
    jh_hot_set(&r->hot->rkey, mr ? mr->rkey : 0);
    jh_hot_set(&r->hot->remote_base, mr ? mr->remote_base : r->hot->base);
    uint64_t word = __atomic_load_n(&r->hot->word, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(&r->hot->word, &word, (word & ~STATE) | state, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {}
    JH_PAUSE(moving);
    jh_hot_end(r->hot);
}

bool jh_inside_registrar(void) {
    return inside || jh_inside_subscriber();
}

static bool claimed(unsigned state) {
    return state == JEMHOOKS_REGISTERING || state == JEMHOOKS_DEREGISTERING;
}

int jh_settled(jh_registration *r) {
    unsigned state = jh_state(r->hot);
    if (!claimed(state)) return (int)state;
    if (jh_inside_registrar())
        return jh_fail(JEMHOOKS_ERROR_REGISTRATION, EDEADLK, "arena '%s': a registrar or subscriber asked for the region at %p, which it or "
                       "another thread is working on; inside one use only memory that is registered already",
                       r->rails->name, (void *)r->hot->base);
    pthread_mutex_lock(&claims);
    while (claimed(state = jh_state(r->hot))) pthread_cond_wait(&claim_ended, &claims);
    pthread_mutex_unlock(&claims);
    return (int)state;
}

int jh_drop(jh_registration *r, unsigned keep) {
    for (; r->live > keep; r->live--) {
        jemhooks_registrar *g = r->rails->registrar[r->live - 1];
        jh_detail_clear();
        inside++;
        int rc = JH_FAULT(deregister_lost) ? 0 : g->ops.deregister_memory(g->self, &r->mr[r->live - 1]);
        inside--;
        if (rc)
            return jh_fail(JEMHOOKS_ERROR_REGISTRATION, abs(rc), "arena '%s': %s failed to deregister %zu bytes at %p: %s; "
                           "the region stays registered and mapped", r->rails->name, g->ops.name, (size_t)r->hot->length,
                           (void *)r->hot->base, *jh_detail() ? jh_detail() : strerror(abs(rc)));
    }
    return 0;
}

/* Registrars that pin populate one page after the other. */
static void populate_large(const jh_registration *r) {
    bool wanted = false;
    if (r->hot->length < JH_LARGE || r->rails->access & JEMHOOKS_ON_DEMAND || !r->pages.provider->host_accessible) return;
    for (unsigned i = r->live; i < r->rails->count; i++) wanted |= r->rails->registrar[i]->ops.populates;
    if (wanted) jh_populate((void *)r->hot->base, r->hot->length);
}

/* Whoever may write to the region writes to its unused pages, too: there must be room for them. */
static int reserve_writable(jh_registration *r) {
    if (!(r->rails->access & JEMHOOKS_LOCAL_WRITE) || !r->pages.provider->ops.reserve) return 0;
    int rc = jh_pages_reserve(&r->pages, 0, r->pages.count); /* with the claim: nobody gives pages back */
    if (!rc) return 0;
    return jh_fail(JEMHOOKS_ERROR_REGISTRATION, -rc, "arena '%s': its %s provider has no room for all %zu bytes at %p, which a device "
                   "could write to: %s; make room, or let it only read", r->rails->name, r->pages.provider->ops.name,
                   (size_t)r->hot->length, (void *)r->hot->base, strerror(-rc));
}

int jh_take(jh_registration *r) {
    int failed = reserve_writable(r);
    if (failed) return failed;
    populate_large(r);
    for (unsigned had = r->live; r->live < r->rails->count; r->live++) {
        jemhooks_registrar *g = r->rails->registrar[r->live];
        jemhooks_mr *mr = &r->mr[r->live];
        *mr = (jemhooks_mr){.remote_base = r->hot->base};
        jh_detail_clear();
        inside++;
        int rc = g->ops.register_memory(g->self, (void *)r->hot->base, r->hot->length, r->rails->access, mr);
        inside--;
        if (!rc) continue;
        char why[512];
        snprintf(why, sizeof why, "%s", *jh_detail() ? jh_detail() : strerror(abs(rc)));
        jh_drop(r, had);
        return jh_fail(JEMHOOKS_ERROR_REGISTRATION, abs(rc), "arena '%s': %s failed to register %zu bytes at %p: %s",
                       r->rails->name, g->ops.name, (size_t)r->hot->length, (void *)r->hot->base, why);
    }
    return 0;
}

void jh_claim_over(void) {
    pthread_mutex_lock(&claims);
    pthread_cond_broadcast(&claim_ended);
    pthread_mutex_unlock(&claims);
}

void jh_seal(jh_registration *r) {
    pthread_mutex_lock(&r->pages.lock);
    move(r, JEMHOOKS_DEREGISTERING, NULL);
    pthread_mutex_unlock(&r->pages.lock);
}

void jh_settle(jh_registration *r) {
    int err = errno; /* what the caller is to report */
    pthread_mutex_lock(&r->pages.lock);
    if (!r->live) {
        jh_pages_mark_uncommitted(&r->pages);
        jh_pages_give_back(&r->pages, 0, r->pages.count);
    }
    move(r, r->live ? JEMHOOKS_REGISTERED : JEMHOOKS_MAPPED, r->live ? &r->mr[0] : NULL);
    pthread_mutex_unlock(&r->pages.lock);
    jh_claim_over();
    errno = err;
}

/* Is there nothing left to register? */
static bool complete(const jh_registration *r) {
    return jh_state(r->hot) == JEMHOOKS_REGISTERED && __atomic_load_n(&r->live, __ATOMIC_RELAXED) == r->rails->count;
}

int jh_claim_to_register(jh_registration *r) {
    for (;;) {
        int state = jh_settled(r);
        if (state < 0) return state;
        if (complete(r)) return 1;
        if (state == JEMHOOKS_UNMAPPED)
            return jh_fail(JEMHOOKS_ERROR_NOT_OURS, ENOENT, "registering: the region was unmapped meanwhile, with its arena");
        pthread_mutex_lock(&r->pages.lock);
        bool mine = !claimed(jh_state(r->hot)) && !complete(r);
        if (mine) {
            move(r, JEMHOOKS_REGISTERING, NULL);
            /* Whoever holds the remote key reaches pages that no block lies in. */
            if (r->rails->access & (JEMHOOKS_REMOTE_WRITE | JEMHOOKS_REMOTE_ATOMIC) && !JH_FAULT(mark_skipped))
                jh_pages_mark_uncommitted(&r->pages);
        }
        pthread_mutex_unlock(&r->pages.lock);
        if (mine) return 0;
    }
}

bool jh_claim_to_deregister(jh_registration *r, enum jh_despite despite) {
    bool mine = false;
    if (JH_FAULT(idle_unlocked)) { /* decide before locking, as the contract forbids */
        if (jh_state(r->hot) != JEMHOOKS_REGISTERED || jh_pages_busy(&r->pages)) return false;
        JH_PAUSE(idle);
        despite = JH_DESPITE_BLOCKS;
    }
    pthread_mutex_lock(&r->pages.lock);
    if (jh_state(r->hot) == JEMHOOKS_REGISTERED && (despite != JH_IF_IDLE || !jh_pages_busy(&r->pages))) {
        uint64_t unleased = JEMHOOKS_REGISTERED;
        mine = despite == JH_DESPITE_LEASES ||
               __atomic_compare_exchange_n(&r->hot->word, &unleased, JEMHOOKS_DEREGISTERING, false, __ATOMIC_ACQ_REL,
                                           __ATOMIC_RELAXED);
        if (mine) move(r, JEMHOOKS_DEREGISTERING, NULL);
    }
    pthread_mutex_unlock(&r->pages.lock);
    return mine;
}
