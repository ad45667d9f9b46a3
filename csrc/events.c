/* events.c - who wants to know what happens to regions, and telling them.
 * Concurrency: a short lock guards the list; it is not held while subscribers run. One that is told stays in the list until
 * it has returned, so whoever unsubscribes waits for that, and for nothing else. A subscriber may cause further events. */
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
    unsigned kinds;        /* 0: it is leaving                 */
    unsigned running;      /* threads that tell it something   */
    jemhooks_subscriber *tell;
    void *self;
    unsigned epoch;
};

unsigned jh_events_wanted;
static pthread_mutex_t list = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t returned = PTHREAD_COND_INITIALIZER;
static jemhooks_subscription *subscriptions;
static _Thread_local unsigned inside; /* never touched in a hook: its first use may allocate */
static char nobody;
static jemhooks_arena *const gone = (jemhooks_arena *)&nobody;

/* Those of the parent are about the parent's libraries. */
static void in_child(void) {
    pthread_mutex_init(&list, NULL);
    pthread_cond_init(&returned, NULL);
    subscriptions = NULL;
    jh_events_wanted = 0;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

/* With the list locked. */
static void count_wanted(void) {
    unsigned wanted = 0;
    for (const jemhooks_subscription *s = subscriptions; s; s = s->next) wanted |= s->kinds;
    __atomic_store_n(&jh_events_wanted, wanted, __ATOMIC_RELAXED);
}

void jh_event_send(jemhooks_arena *arena, enum jemhooks_event_kind kind, uint64_t base, uint64_t length) {
    jemhooks_event event = {sizeof event, kind, base, length, arena};
    unsigned epoch = atomic_load(&jh_fork_epoch);
    bool hook = kind & IN_HOOKS;
    pthread_mutex_lock(&list);
    for (jemhooks_subscription *s = subscriptions; s; s = s->next) {
        if (!(s->kinds & kind) || (s->arena && s->arena != arena)) continue;
        s->running++;
        pthread_mutex_unlock(&list);
        if (!hook) inside++;
        s->tell(s->self, &event);
        if (!hook) inside--;
        if (jh_frozen(epoch)) return; /* it has forked, and this is the child */
        pthread_mutex_lock(&list);
        if (!--s->running && !s->kinds) pthread_cond_broadcast(&returned);
    }
    pthread_mutex_unlock(&list);
}

bool jh_inside_subscriber(void) {
    return inside;
}

void jh_events_forget(const jemhooks_arena *arena) {
    pthread_mutex_lock(&list);
    for (jemhooks_subscription *s = subscriptions; s; s = s->next)
        if (s->arena == arena) s->arena = gone;
    pthread_mutex_unlock(&list);
}

int jemhooks_subscribe(jemhooks_arena *arena, unsigned kinds, jemhooks_subscriber *tell, void *self,
                       jemhooks_subscription **subscription) {
    if (!tell || !subscription || !kinds || kinds & ~ALL_EVENTS)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_subscribe: a function, somewhere to put the subscription, and kinds of "
                       "0x1 to 0x%x are needed; the kinds are 0x%x", ALL_EVENTS, kinds);
    jemhooks_subscription *s = malloc(sizeof *s);
    if (!s) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "jemhooks_subscribe: no memory for the subscription");
    *s = (jemhooks_subscription){NULL, arena, kinds, 0, tell, self, atomic_load(&jh_fork_epoch)};
    pthread_mutex_lock(&list);
    s->next = subscriptions;
    subscriptions = s;
    count_wanted();
    pthread_mutex_unlock(&list);
    *subscription = s;
    return 0;
}

int jemhooks_unsubscribe(jemhooks_subscription *subscription) {
    if (!subscription) return 0;
    if (inside)
        return jh_fail(JEMHOOKS_ERROR_BUSY, EDEADLK, "jemhooks_unsubscribe: called by a subscriber's function, while it is being told; do "
                       "it when that has returned");
    if (!jh_frozen(subscription->epoch)) {
        pthread_mutex_lock(&list);
        subscription->kinds = 0;
        while (subscription->running) pthread_cond_wait(&returned, &list);
        jemhooks_subscription **link = &subscriptions;
        while (*link != subscription) link = &(*link)->next;
        *link = subscription->next;
        count_wanted();
        pthread_mutex_unlock(&list);
    }
    free(subscription);
    return 0;
}
