/* adapter.c - has the registration cache of another library told before our pages go: by a loadable module for each.
 * Nothing is undone before the process ends: the cache may hold our memory as long.
 * Concurrency: one lock, for starting.                                                                              */
#include "adapter.h"
#include "../error.h"
#include "../events.h"
#include "../fork.h"
#include "../module_file.h"

#include <pthread.h>
#include <string.h>

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static struct {
    const char *kind;
    const jh_adapter *adapter;
    jemhooks_subscription *subscription; /* NULL: not started in this process */
} known[] = {{.kind = "fabric"}, {.kind = "ucx"}};
enum { KNOWN = sizeof known / sizeof known[0] };

static const jemhooks_host host = {JEMHOOKS_MODULE_ABI, jemhooks_set_error, jemhooks_find_region};

static void in_child(void) {
    pthread_mutex_init(&starting, NULL);
    for (size_t i = 0; i < KNOWN; i++) known[i].subscription = NULL;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

static void tell(void *self, const jemhooks_event *event) {
    const jh_adapter *adapter = self;
    adapter->tell(event->base, event->length);
}

/* Subscribed before the library hears of us, so that no release is missed. */
static int start(size_t i) {
    if (!known[i].adapter) known[i].adapter = jh_module_symbol("adapter", known[i].kind, JH_ADAPTER_SYMBOL);
    if (!known[i].adapter) return -errno;
    int rc = jemhooks_subscribe(NULL, JEMHOOKS_RELEASES, tell, (void *)known[i].adapter, &known[i].subscription);
    if (rc) return rc;
    jh_detail_clear();
    if (!(rc = known[i].adapter->start(&host))) return 0;
    jemhooks_unsubscribe(known[i].subscription);
    known[i].subscription = NULL;
    int what = rc == -EBUSY ? JEMHOOKS_ERROR_BUSY : rc == -ELIBACC ? JEMHOOKS_ERROR_LOAD : JEMHOOKS_ERROR_CONFIG;
    return jh_fail(what, -rc, "notifying the registration cache of %s: %s", known[i].kind, *jh_detail() ? jh_detail() : strerror(-rc));
}

int jemhooks_notify_cache(const char *kind) {
    size_t i = 0;
    while (i < KNOWN && kind && strcmp(kind, known[i].kind)) i++;
    if (!kind || i == KNOWN)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_notify_cache: '%s' is not one of fabric and ucx", kind ? kind : "(NULL)");
    if (jh_inside_subscriber())
        return jh_fail(JEMHOOKS_ERROR_BUSY, EDEADLK, "jemhooks_notify_cache: called by a subscriber's function; call it elsewhere");
    pthread_mutex_lock(&starting);
    int rc = known[i].subscription ? 0 : start(i);
    pthread_mutex_unlock(&starting);
    return rc;
}
