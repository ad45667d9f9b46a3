/* registrar.h - a registrar: the functions of a loadable module or of the caller, and a reference count. */
#ifndef JH_REGISTRAR_H
#define JH_REGISTRAR_H

#include "jemhooks.h"

#include <stdatomic.h>

struct jemhooks_registrar {
    jemhooks_registrar_ops ops; /* a copy, with what an older caller does not know left NULL */
    void *self;
    jemhooks_budget *budget;    /* of all arenas that use it */
    atomic_int references;
    unsigned epoch;             /* jh_fork_epoch when it was made: a child must not use its parent's */
};

void jh_registrar_keep(jemhooks_registrar *r);
/* A reference to its budget, which stays what it is while the registrar is kept. */
jemhooks_budget *jh_registrar_budget(jemhooks_registrar *r);

#endif
