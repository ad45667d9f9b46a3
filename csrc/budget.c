/* budget.c - limits on registered bytes and regions, each shared by any number of arenas, and the accounts of those arenas.
 * Concurrency: one lock guards everything. Its holder may take pages.lock of one region after another and waits for nothing
 * else; hooks never take it.                                                                                        */
#include "budget.h"
#include "error.h"
#include "fork.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct jemhooks_budget {
    atomic_int references;
    unsigned epoch;        /* the charges are of this process */
    bool set;              /* by its owner */
    uint64_t pin_limit, max_regions;
    uint64_t bytes, peak, regions;
    uint64_t leaving;      /* how many of the regions */
    atomic_bool over;      /* more is charged than the limits allow; also read without the lock */
    uint64_t turn;         /* how often something was released, or had been about to be */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* a turn, or the number of visitors */
static jh_account *accounts;

static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
    accounts = NULL;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

uint64_t jh_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* ---- accounts ---------------------------------------------------------------------------------------------------- */

void jh_account_enter(jh_account *a) {
    pthread_mutex_lock(&lock);
    a->next = accounts;
    a->link = &accounts;
    if (a->next) a->next->link = &a->next;
    accounts = a;
    pthread_mutex_unlock(&lock);
}

void jh_account_leave(jh_account *a) {
    pthread_mutex_lock(&lock);
    while (a->visitors) pthread_cond_wait(&changed, &lock);
    *a->link = a->next;
    if (a->next) a->next->link = a->link;
    pthread_mutex_unlock(&lock);
}

unsigned jh_budget_times(const jh_account *a, const jemhooks_budget *b) {
    unsigned times = 0;
    for (unsigned i = 0; i < a->budgets; i++) times += a->budget[i] == b;
    return times;
}

static bool concerns(const jh_account *a, const jemhooks_budget *b) {
    return jh_budget_times(a, b);
}

/* ---- charges ----------------------------------------------------------------------------------------------------- */

/* What an ancestor registered is not this process's. */
static void settle_in(jemhooks_budget *b) {
    if (!jh_frozen(b->epoch)) return;
    b->epoch = atomic_load(&jh_fork_epoch);
    b->bytes = b->peak = b->regions = b->leaving = 0;
    atomic_store(&b->over, false);
}

static bool exceeded(const jemhooks_budget *b) {
    return b->bytes > b->pin_limit || b->regions > b->max_regions;
}

static bool has_room(const jemhooks_budget *b, uint64_t bytes) {
    return b->regions < b->max_regions && b->bytes <= b->pin_limit && bytes <= b->pin_limit - b->bytes;
}

static void add(jemhooks_budget *b, uint64_t bytes) {
    b->bytes += bytes;
    b->regions++;
}

static void take_away(jemhooks_budget *b, uint64_t bytes) {
    b->bytes -= bytes;
    b->regions--;
    atomic_store(&b->over, exceeded(b));
}

jemhooks_budget *jh_budget_charge(jh_account *a, jh_pin *pin, uint64_t bytes, uint64_t *turn) {
    jemhooks_budget *full = NULL;
    pthread_mutex_lock(&lock);
    unsigned i = 0;
    for (; i < a->budgets && !full; i++) {
        settle_in(a->budget[i]);
        if (has_room(a->budget[i], bytes)) add(a->budget[i], bytes);
        else full = a->budget[i--];
    }
    if (full) {
        unsigned times = jh_budget_times(a, full);
        *turn = bytes > full->pin_limit / times || times > full->max_regions ? JH_NEVER : full->turn;
        while (i-- > 0) take_away(a->budget[i], bytes);
    } else {
        atomic_store(&pin->unused_since, 0); /* hooks may be writing it */
        pin->bytes = bytes;
        pin->account = a;
        pin->link = &a->pins;
        pin->next = a->pins;
        if (pin->next) pin->next->link = &pin->next;
        a->pins = pin;
        for (i = 0; i < a->budgets; i++)
            if (a->budget[i]->bytes > a->budget[i]->peak) a->budget[i]->peak = a->budget[i]->bytes;
        uint64_t now = atomic_fetch_add(&a->bytes, bytes) + bytes;
        if (now > a->peak) atomic_store(&a->peak, now);
    }
    pthread_mutex_unlock(&lock);
    return full;
}

bool jh_budget_has_room(const jh_account *a, uint64_t bytes) {
    bool room = true;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < a->budgets && room; i++) {
        jemhooks_budget *b = a->budget[i];
        unsigned times = jh_budget_times(a, b);
        settle_in(b);
        room = has_room(b, times * bytes) && times <= b->max_regions - b->regions;
    }
    pthread_mutex_unlock(&lock);
    return room;
}

static void unlink_pin(jh_pin *pin) {
    *pin->link = pin->next;
    if (pin->next) pin->next->link = pin->link;
    atomic_fetch_sub(&pin->account->bytes, pin->bytes);
    pin->account = NULL;
}

/* A pin begins to leave, or is done with it. */
static void set_leaving(jh_pin *pin, bool leaving) {
    if (pin->leaving == leaving) return;
    pin->leaving = leaving;
    for (unsigned i = 0; i < pin->account->budgets; i++) {
        jemhooks_budget *b = pin->account->budget[i];
        b->leaving += leaving ? 1 : (uint64_t)-1;
        b->turn += !leaving;
    }
    if (!leaving) pthread_cond_broadcast(&changed);
}

void jh_budget_discharge(jh_pin *pin) {
    jh_account *a = pin->account;
    pthread_mutex_lock(&lock);
    set_leaving(pin, true);
    for (unsigned i = 0; i < a->budgets; i++) take_away(a->budget[i], pin->bytes);
    set_leaving(pin, false);
    unlink_pin(pin);
    pthread_mutex_unlock(&lock);
}

void jh_budget_strand(jh_pin *pin) {
    pthread_mutex_lock(&lock);
    set_leaving(pin, false);
    unlink_pin(pin);
    pthread_mutex_unlock(&lock);
}

bool jh_budget_claim(jh_pin *pin, bool (*claim)(jh_pin *)) {
    pthread_mutex_lock(&lock);
    bool claimed = pin->account && claim(pin);
    if (claimed) set_leaving(pin, true);
    pthread_mutex_unlock(&lock);
    return claimed;
}

void jh_budget_stays(jh_pin *pin) {
    pthread_mutex_lock(&lock);
    set_leaving(pin, false);
    pthread_mutex_unlock(&lock);
    atomic_store(&pin->unused_since, jh_now()); /* others first, the next time */
}

/* ---- making room ------------------------------------------------------------------------------------------------- */

/* The oldest of the account that is younger than *best allows, with an age beyond `after`. */
static jh_pin *oldest(jh_account *a, uint64_t (*age)(const jh_pin *), uint64_t after, jh_pin *best, uint64_t *best_age) {
    for (jh_pin *pin = a->pins; pin; pin = pin->next) {
        uint64_t t = pin->leaving ? 0 : age(pin);
        if (t <= after || (best && t >= *best_age)) continue;
        best = pin;
        *best_age = t;
    }
    return best;
}

jh_pin *jh_budget_pick(const jemhooks_budget *b, jh_account *a, uint64_t (*age)(const jh_pin *), bool (*claim)(jh_pin *)) {
    jh_pin *pin;
    uint64_t t = 0;
    pthread_mutex_lock(&lock);
    do { /* one that cannot be claimed is in use by now: go on after it */
        uint64_t after = t;
        pin = NULL;
        if (a) pin = oldest(a, age, after, NULL, &t);
        for (jh_account *each = a ? NULL : accounts; each; each = each->next)
            if (concerns(each, b)) pin = oldest(each, age, after, pin, &t);
    } while (pin && !claim(pin));
    if (pin) set_leaving(pin, true);
    pthread_mutex_unlock(&lock);
    return pin;
}

bool jh_account_over(const jh_account *a) {
    bool over = false;
    for (unsigned i = 0; i < a->budgets && !over; i++) over = atomic_load_explicit(&a->budget[i]->over, memory_order_relaxed);
    return over;
}

bool jh_budget_exceeded(jemhooks_budget *b) {
    pthread_mutex_lock(&lock);
    settle_in(b);
    bool is = exceeded(b);
    pthread_mutex_unlock(&lock);
    return is;
}

bool jh_budget_wait(jemhooks_budget *b, uint64_t turn) {
    pthread_mutex_lock(&lock);
    while (b->leaving && b->turn == turn) pthread_cond_wait(&changed, &lock);
    bool released = b->turn != turn;
    pthread_mutex_unlock(&lock);
    return released;
}

void jh_budget_reclaim(jemhooks_budget *b) {
    pthread_mutex_lock(&lock);
    jh_account *next;
    for (jh_account *a = accounts; a; a = next) {
        next = a->next;
        if (!concerns(a, b)) continue;
        a->visitors++;
        pthread_mutex_unlock(&lock);
        a->reclaim(a);
        pthread_mutex_lock(&lock);
        next = a->next; /* it is still there: it waits for its visitors before it leaves */
        a->visitors--;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- the public face --------------------------------------------------------------------------------------------- */

int jemhooks_budget_create(uint64_t pin_limit, uint64_t max_regions, jemhooks_budget **budget) {
    if (!budget) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "budget: nowhere to put it (NULL)");
    jemhooks_budget *b = calloc(1, sizeof *b);
    if (!b) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "budget: no memory for the budget itself");
    atomic_init(&b->references, 1);
    b->epoch = atomic_load(&jh_fork_epoch);
    b->set = pin_limit != JEMHOOKS_UNLIMITED || max_regions != JEMHOOKS_UNLIMITED;
    b->pin_limit = pin_limit;
    b->max_regions = max_regions;
    *budget = b;
    return 0;
}

void jemhooks_budget_keep(jemhooks_budget *b) {
    atomic_fetch_add(&b->references, 1);
}

void jemhooks_budget_close(jemhooks_budget *b) {
    if (b && atomic_fetch_sub(&b->references, 1) == 1) free(b);
}

void jh_budget_limit(jemhooks_budget *b, uint64_t pin_limit, uint64_t max_regions) {
    pthread_mutex_lock(&lock);
    b->set = true;
    b->pin_limit = pin_limit;
    b->max_regions = max_regions;
    settle_in(b);
    atomic_store(&b->over, exceeded(b));
    b->turn++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void jh_budget_suggest(jemhooks_budget *b, uint64_t pin_limit, uint64_t max_regions) {
    pthread_mutex_lock(&lock);
    if (!b->set) {
        b->pin_limit = pin_limit;
        b->max_regions = max_regions;
    }
    pthread_mutex_unlock(&lock);
}

int jemhooks_budget_get(jemhooks_budget *b, jemhooks_budget_info *info) {
    if (!b || !info || info->size < sizeof info->size)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_budget_get: NULL, or the struct's size field is not its sizeof");
    pthread_mutex_lock(&lock);
    settle_in(b);
    jemhooks_budget_info now = {info->size, b->pin_limit, b->max_regions, b->bytes, b->peak, b->regions};
    pthread_mutex_unlock(&lock);
    if (info->size > sizeof now) memset((char *)info + sizeof now, 0, info->size - sizeof now);
    memcpy(info, &now, info->size < sizeof now ? info->size : sizeof now);
    return 0;
}

int jh_budget_limits(const jemhooks_budget *b, char *text, size_t size) {
    if (b->pin_limit == JEMHOOKS_UNLIMITED)
        return snprintf(text, size, "at most %" PRIu64 " regions may be registered", b->max_regions);
    if (b->max_regions == JEMHOOKS_UNLIMITED)
        return snprintf(text, size, "at most %" PRIu64 " bytes may be registered", b->pin_limit);
    return snprintf(text, size, "at most %" PRIu64 " bytes in %" PRIu64 " regions may be registered", b->pin_limit,
                    b->max_regions);
}

void jh_budget_explain(jemhooks_budget *b, char *text, size_t size) {
    enum { MOST = 3 };
    uint64_t below = UINT64_MAX;
    pthread_mutex_lock(&lock);
    int n = jh_budget_limits(b, text, size);
    n += snprintf(text + n, size - (size_t)n, ", and %" PRIu64 " bytes in %" PRIu64 " regions are", b->bytes, b->regions);
    for (int i = 0; i < MOST && (size_t)n < size; i++) {
        const jh_account *most = NULL;
        for (const jh_account *a = accounts; a; a = a->next)
            if (concerns(a, b) && a->bytes && a->bytes < below && (!most || a->bytes > most->bytes)) most = a;
        if (!most) break;
        below = most->bytes;
        n += snprintf(text + n, size - (size_t)n, "%s%llu by arena '%s'", i ? ", " : ": ", most->bytes, most->name);
    }
    pthread_mutex_unlock(&lock);
}
