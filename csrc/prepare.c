/* prepare.c - a thread of an arena that maps, populates and registers the next region before it is needed, so that no
 * allocation waits for that. It is woken by whoever carves an extent that leaves too little for the next one, and otherwise
 * now and then, to end the registrations of regions that have been idle for too long.
 * Concurrency: `work` is held while the thread works, and by whoever wants it not to; `ahead` in the space is set before
 * the space is in use and cleared when it is not any more; `all` guards the list of those that must end before the process
 * does. A forked child has no such thread.                                                                          */
#include "prepare.h"
#include "error.h"
#include "fault.h"
#include "populate.h"

#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ONE_SECOND ((uint64_t)1000000000)

struct jh_ahead {
    struct jh_ahead *next, **link;
    jh_space *space;
    void (*age)(jh_space *s);
    pthread_t thread;
    pthread_mutex_t work;
    sem_t wake;
    pthread_mutex_t turns;       /* guards the next three */
    pthread_cond_t served_more;
    uint64_t asked, served;      /* how often someone has asked for a round of work, and up to which time it was done */
    uint64_t pause;  /* ns from one look at idle regions to the next: an eighth of idle_ttl, within reason */
    atomic_bool ending;
    enum { RUNNING, JOINING, JOINED } state; /* guarded by `all` */
};

static pthread_mutex_t all = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t joined_more = PTHREAD_COND_INITIALIZER;
static struct jh_ahead *first;
static bool exiting; /* no more threads */

static void in_child(void) {
    pthread_mutex_init(&all, NULL);
    pthread_cond_init(&joined_more, NULL);
    first = NULL;
    exiting = false;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

/* One region, if one is needed and every budget has room for it. Was it made ready? */
static bool prepare(jh_space *s) {
    size_t page = s->provider->page, length = (s->region_max + page - 1) / page * page;
    bool registers = s->rails.policy != JEMHOOKS_NONE;
    jh_gap *gap;
    if (!jh_space_wants(s, &gap)) return false;
    if (gap) length = gap->region->registration.hot->length;
    bool room = !registers || jh_budget_has_room(&s->rails.account, length);
    if (!gap && room) gap = jh_space_map(s);
    if (!gap) return false;
    const jemhooks_region *hot = gap->region->registration.hot;
    if (room && s->provider->host_accessible) jh_populate((void *)hot->base, hot->length);
    JH_PAUSE(preparing);
    bool ready = room && (!registers || !jh_register_ahead(&gap->region->registration));
    jh_space_offer(s, gap); /* if it could not be registered, whoever uses it will be told why */
    return ready;
}

static void wait_for_work(struct jh_ahead *a) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + a->pause;
    until.tv_sec += (time_t)(ns / ONE_SECOND);
    until.tv_nsec = (long)(ns % ONE_SECOND);
    sem_clockwait(&a->wake, CLOCK_MONOTONIC, &until);
    while (!sem_trywait(&a->wake)) {} /* once is enough */
}

static void serve(struct jh_ahead *a, uint64_t asked) {
    pthread_mutex_lock(&a->turns);
    a->served = asked;
    pthread_cond_broadcast(&a->served_more);
    pthread_mutex_unlock(&a->turns);
}

static void *run(void *arg) {
    struct jh_ahead *a = arg;
    while (!atomic_load(&a->ending)) {
        pthread_mutex_lock(&a->turns);
        uint64_t asked = a->asked;
        pthread_mutex_unlock(&a->turns);
        pthread_mutex_lock(&a->work);
        if (!atomic_load(&a->ending)) {
            if (prepare(a->space)) jh_prepare_wake(a); /* and perhaps another one */
            a->age(a->space);
            jh_expire(&a->space->rails);
        }
        pthread_mutex_unlock(&a->work);
        serve(a, asked);
        wait_for_work(a);
    }
    serve(a, UINT64_MAX);
    return NULL;
}

/* Returns when it has ended. With `all`, which is let go meanwhile. */
static void join(struct jh_ahead *a) {
    while (a->state == JOINING) pthread_cond_wait(&joined_more, &all);
    if (a->state == JOINED) return;
    a->state = JOINING;
    pthread_mutex_unlock(&all);
    atomic_store(&a->ending, true);
    sem_post(&a->wake);
    pthread_join(a->thread, NULL);
    pthread_mutex_lock(&all);
    a->state = JOINED;
    pthread_cond_broadcast(&joined_more);
}

/* Before the destructors of what registrars use run. */
static void end_all(void) {
    pthread_mutex_lock(&all);
    exiting = true;
    for (struct jh_ahead *a = first; a;) {
        bool ended = a->state == JOINED;
        if (!ended) join(a);
        a = ended ? a->next : first; /* others may have gone meanwhile */
    }
    pthread_mutex_unlock(&all);
}

/* It has all signals blocked: the program's handlers expect the program's threads. */
static int start_thread(struct jh_ahead *a) {
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int err = pthread_create(&a->thread, NULL, run, a);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!err) pthread_setname_np(a->thread, "jemhooks-ahead");
    return err;
}

int jh_prepare_start(jh_space *s, void (*age)(jh_space *s)) {
    static atomic_bool registered;
    struct jh_ahead *a = calloc(1, sizeof *a);
    if (!a) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "arena '%s': no memory for its thread", s->rails.name);
    a->space = s;
    a->age = age;
    a->pause = s->rails.idle_ttl / 8;
    if (a->pause < ONE_SECOND / 10) a->pause = ONE_SECOND / 10;
    if (a->pause > ONE_SECOND) a->pause = ONE_SECOND;
    pthread_mutex_init(&a->work, NULL);
    pthread_mutex_init(&a->turns, NULL);
    pthread_cond_init(&a->served_more, NULL);
    sem_init(&a->wake, 0, 0);
    s->ahead = a;
    pthread_mutex_lock(&all);
    if (!atomic_exchange(&registered, true)) atexit(end_all);
    int err = exiting ? 0 : start_thread(a);
    if (exiting) a->state = JOINED, a->served = UINT64_MAX;
    if (!err) {
        a->next = first;
        a->link = &first;
        if (first) first->link = &a->next;
        first = a;
    }
    pthread_mutex_unlock(&all);
    if (!err) return 0;
    s->ahead = NULL;
    free(a);
    return jh_fail(JEMHOOKS_ERROR_MEMORY, err, "arena '%s': no thread to prepare regions: %s; raise the limit on processes (ulimit "
                   "-u), or do not prepare ahead", s->rails.name, strerror(err));
}

void jh_prepare_wake(struct jh_ahead *a) {
    sem_post(&a->wake);
}

void jh_prepare_wait(jh_space *s) {
    struct jh_ahead *a = s->ahead;
    if (!a) return;
    pthread_mutex_lock(&a->turns);
    uint64_t mine = a->served == UINT64_MAX ? 0 : ++a->asked;
    atomic_store(&s->rails.quiet, false);
    jh_prepare_wake(a);
    while (a->served < mine) pthread_cond_wait(&a->served_more, &a->turns);
    pthread_mutex_unlock(&a->turns);
}

void jh_prepare_pause(jh_space *s) {
    if (s->ahead) pthread_mutex_lock(&s->ahead->work);
}

void jh_prepare_resume(jh_space *s) {
    if (s->ahead) pthread_mutex_unlock(&s->ahead->work);
}

void jh_prepare_end(jh_space *s) {
    struct jh_ahead *a = s->ahead;
    if (!a) return;
    atomic_store(&a->ending, true); /* so that it does nothing when it goes on */
    pthread_mutex_unlock(&a->work);
    pthread_mutex_lock(&all);
    join(a);
    *a->link = a->next;
    if (a->next) a->next->link = a->link;
    pthread_mutex_unlock(&all);
    s->ahead = NULL;
    pthread_mutex_destroy(&a->work);
    pthread_mutex_destroy(&a->turns);
    pthread_cond_destroy(&a->served_more);
    sem_destroy(&a->wake);
    free(a);
}
