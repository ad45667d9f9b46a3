/* registrar.c - opens registrars: loadable modules, or the caller's own.
 * Concurrency: the reference count is atomic; a short lock guards which budget a registrar has. */
#include "registrar.h"
#include "../budget.h"
#include "../error.h"
#include "../fork.h"
#include "../module_file.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER; /* guards which budget a registrar has */

static void in_child(void) {
    pthread_mutex_init(&changing, NULL);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

/* All that the first version had to have. */
#define LEAST_OPS offsetof(jemhooks_registrar_ops, limits)

static const jemhooks_host host = {JEMHOOKS_MODULE_ABI, jemhooks_set_error, jemhooks_find_region};

int jemhooks_registrar_create(const jemhooks_registrar_ops *ops, void *self, jemhooks_registrar **registrar) {
    if (!ops || !registrar || ops->size < LEAST_OPS || !ops->name || !ops->register_memory || !ops->deregister_memory)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "registrar: ops needs its size (at least %zu bytes), a name, "
                       "register_memory and deregister_memory, and somewhere to put the result", LEAST_OPS);
    jemhooks_registrar *r = calloc(1, sizeof *r);
    if (!r) return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "registrar %s: no memory for the registrar itself", ops->name);
    int rc = jemhooks_budget_create(JEMHOOKS_UNLIMITED, JEMHOOKS_UNLIMITED, &r->budget);
    if (rc) {
        free(r);
        return rc;
    }
    memcpy(&r->ops, ops, ops->size < sizeof r->ops ? ops->size : sizeof r->ops);
    r->self = self;
    r->epoch = atomic_load(&jh_fork_epoch);
    atomic_init(&r->references, 1);
    *registrar = r;
    return 0;
}

void jh_registrar_keep(jemhooks_registrar *r) {
    atomic_fetch_add(&r->references, 1);
}

void jemhooks_registrar_close(jemhooks_registrar *r) {
    if (!r || atomic_fetch_sub(&r->references, 1) != 1) return;
    if (r->ops.close && !jh_frozen(r->epoch)) r->ops.close(r->self); /* the parent's stays open */
    jemhooks_budget_close(r->budget);
    free(r);
}

int jemhooks_registrar_open(const char *kind, const void *config, jemhooks_registrar **registrar) {
    if (!kind || !registrar || !*kind || strspn(kind, "abcdefghijklmnopqrstuvwxyz") != strlen(kind))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "registrar: '%s' is not a kind; kinds are lower-case words such as "
                       "null, uring and fabric", kind ? kind : "(NULL)");
    jemhooks_module_open *open_module;
    *(void **)&open_module = jh_module_symbol("registrar", kind, JEMHOOKS_MODULE_SYMBOL);
    if (!open_module) return -errno;
    const jemhooks_registrar_ops *ops = NULL;
    void *self = NULL;
    jh_detail_clear();
    int rc = open_module(&host, config, &ops, &self);
    if (rc) {
        int error_kind = rc == -EINVAL || rc == -E2BIG ? JEMHOOKS_ERROR_CONFIG : JEMHOOKS_ERROR_REGISTRATION;
        if (*jh_detail()) return jh_fail(error_kind, -rc, "%s", jh_detail());
        return jh_fail(error_kind, -rc, "opening registrar %s: %s", kind, strerror(-rc));
    }
    rc = jemhooks_registrar_create(ops, self, registrar);
    if (rc && ops && ops->close) ops->close(self);
    return rc;
}

jemhooks_budget *jh_registrar_budget(jemhooks_registrar *r) {
    pthread_mutex_lock(&changing);
    jemhooks_budget *b = r->budget;
    jemhooks_budget_keep(b);
    pthread_mutex_unlock(&changing);
    return b;
}

jemhooks_budget *jemhooks_registrar_budget(jemhooks_registrar *r) {
    return r ? r->budget : NULL;
}

int jemhooks_registrar_set_budget(jemhooks_registrar *r, jemhooks_budget *budget) {
    if (!r || !budget) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_registrar_set_budget: NULL");
    pthread_mutex_lock(&changing);
    bool in_use = atomic_load(&r->references) != 1;
    jemhooks_budget *old = r->budget;
    if (!in_use) {
        jemhooks_budget_keep(budget);
        r->budget = budget;
    }
    pthread_mutex_unlock(&changing);
    if (in_use)
        return jh_fail(JEMHOOKS_ERROR_BUSY, EBUSY, "registrar %s: an arena uses it; set its budget before making arenas",
                       r->ops.name);
    jemhooks_budget_close(old);
    return 0;
}

const char *jemhooks_registrar_name(const jemhooks_registrar *r) {
    return r ? r->ops.name : NULL;
}

void *jemhooks_registrar_self(const jemhooks_registrar *r) {
    return r ? r->self : NULL;
}

const void *jemhooks_registrar_interface(const jemhooks_registrar *r, const char *kind) {
    return r && kind && !strcmp(r->ops.name, kind) ? r->ops.interface : NULL;
}
