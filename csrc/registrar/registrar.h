/* registrar.h - a registrar: the functions of a loadable module or of the caller, and a reference count. */
#ifndef JH_REGISTRAR_H
#define JH_REGISTRAR_H

#include "jemhooks.h"

#include <stdatomic.h>

struct jemhooks_registrar {
    const jemhooks_registrar_ops *ops;
    void *self;
    atomic_int references;
};

void jh_registrar_keep(jemhooks_registrar *r);

#endif
