/* fork.h - which arenas belong to this process. */
#ifndef JH_FORK_H
#define JH_FORK_H

#include <stdatomic.h>
#include <stdbool.h>

/* How many forks lie between this process and the one that loaded the library. */
extern atomic_uint jh_fork_epoch;

/* Was this made by an ancestor? Hooks may ask. */
static inline bool jh_frozen(unsigned epoch) {
    return epoch != atomic_load_explicit(&jh_fork_epoch, memory_order_relaxed);
}

#endif
