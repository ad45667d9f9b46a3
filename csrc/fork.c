/* fork.c - counts forks, so that everything made before one is frozen in the child.
 * The child shares the parent's registrations (the verbs fd, the io_uring ring) and shared pages, so nothing of an
 * earlier arena may be touched there. Each file with a global lock re-initialises it in a child handler of its own. None
 * takes it before the fork (but see allocator/jemalloc/growth.c), because jemalloc's own prepare handler, which runs later,
 * waits for hooks that may be waiting for it.
 * Concurrency: one atomic, changed only in a fresh child, which has a single thread. */
#include "fork.h"

#include <pthread.h>

atomic_uint jh_fork_epoch;

static void in_child(void) {
    atomic_fetch_add(&jh_fork_epoch, 1);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}
