/* events.c - who wants to know what happens to regions, and telling them.
 * Concurrency: `list` is read by whoever tells and held while subscribers run, so that one who has unsubscribed is not called
 * any more. Hooks wait for it only while the list itself is changed. A subscriber may cause further events.          */
#include "events.h"
#include "error.h"
#include "fork.h"

#include <pthread.h>
#include <stdlib.h>

#define ALL_EVENTS 31u
#define IN_HOOKS (JEMHOOKS_ON_MAP | JEMHOOKS_ON_DECOMMIT)

struct jemhooks_subscription {
    struct jemhooks_subscription *next;
    jemhooks_arena *arena; /* NULL: all; `gone`: none any more */
    unsigned kinds;
    jemhooks_subscriber *tell;
    void *self;
    unsigned epoch;
};

unsigned jh_events_wanted;
static pthread_rwlock_t list = PTHREAD_RWLOCK_INITIALIZER; /* glibc lets readers in while a writer waits */
static jemhooks_subscription *subscriptions;
static _Thread_local unsigned inside; /* never touched in a hook: its first use may allocate */
static char nobody;
static jemhooks_arena *const gone = (jemhooks_arena *)&nobody;

/* Those of the parent are about the parent's libraries. */
static void in_child(void) {
    pthread_rwlock_init(&list, NULL);
    subscriptions = NULL;
    jh_events_wanted = 0;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

/* With the list locked for writing. */
static void count_wanted(void) {
    unsigned wanted = 0;
    for (const jemhooks_subscription *s = subscriptions; s; s = s->next) wanted |= s->kinds;
    __atomic_store_n(&jh_events_wanted, wanted, __ATOMIC_RELAXED);
}

void jh_event_send(jemhooks_arena *arena, enum jemhooks_event_kind kind, uint64_t base, uint64_t length) {
    jemhooks_event event = {sizeof event, kind, base, length, arena};
    bool hook = kind & IN_HOOKS;
    if (!hook) inside++;
    pthread_rwlock_rdlock(&list);
    for (const jemhooks_subscription *s = subscriptions; s; s = s->next)
        if (s->kinds & kind && (!s->arena || s->arena == arena)) s->tell(s->self, &event);
    pthread_rwlock_unlock(&list);
    if (!hook) inside--;
}

bool jh_inside_subscriber(void) {
    return inside;
}

void jh_events_forget(const jemhooks_arena *arena) {
    pthread_rwlock_wrlock(&list);
    for (jemhooks_subscription *s = subscriptions; s; s = s->next)
        if (s->arena == arena) s->arena = gone;
    pthread_rwlock_unlock(&list);
}

int jemhooks_subscribe(jemhooks_arena *arena, unsigned kinds, jemhooks_subscriber *tell, void *self,
                       jemhooks_subscription **subscription) {
    if (!tell || !subscription || !kinds || kinds & ~ALL_EVENTS)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_subscribe: a function, somewhere to put the subscription, and kinds of "
                       "0x1 to 0x%x are needed; the kinds are 0x%x", ALL_EVENTS, kinds);
    jemhooks_subscription *s = malloc(sizeof *s);
    if (!s) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "jemhooks_subscribe: no memory for the subscription");
    *s = (jemhooks_subscription){NULL, arena, kinds, tell, self, atomic_load(&jh_fork_epoch)};
    pthread_rwlock_wrlock(&list);
    s->next = subscriptions;
    subscriptions = s;
    count_wanted();
    pthread_rwlock_unlock(&list);
    *subscription = s;
    return 0;
}

int jemhooks_unsubscribe(jemhooks_subscription *subscription) {
    if (!subscription) return 0;
    if (inside)
        return jh_fail(JEMHOOKS_ERROR_BUSY, EDEADLK, "jemhooks_unsubscribe: called by a subscriber's function, while it is being told; do "
                       "it when that has returned");
    if (!jh_frozen(subscription->epoch)) {
        pthread_rwlock_wrlock(&list);
        jemhooks_subscription **link = &subscriptions;
        while (*link != subscription) link = &(*link)->next;
        *link = subscription->next;
        count_wanted();
        pthread_rwlock_unlock(&list);
    }
    free(subscription);
    return 0;
}
