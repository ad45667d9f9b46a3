/* growth.c - no fork while jemalloc enters new memory into its tree of addresses.
 * The lock of that tree is one that jemalloc's own fork handlers forget, in all of 5.x: a fork while another thread has it
 * leaves it locked in the child, which hangs as soon as it grows. Mostly jemalloc holds a lock around it that fork does wait
 * for. It does not with opt.retain off, nor when it asks anew after a refusal; then the thread holds `gate` from the hook
 * to the end of the allocation. Thread caches lie in jemalloc's own arenas, whose hooks are not ours: it is held around their making
 * and their end.
 * Concurrency: forks take `gate` for writing, before all of jemalloc's locks; so a hook waits for it only where jemalloc
 * holds none.                                                                                                        */
#include "jemalloc.h"

#include "../../fault.h"

#include <pthread.h>

#define OPEN PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP /* a fork does not wait for those who come after it */

_Thread_local jh_growth jh_this_growth;
static pthread_rwlock_t gate = OPEN;

static void before_fork(void) {
    pthread_rwlock_wrlock(&gate);
}

static void in_parent(void) {
    pthread_rwlock_unlock(&gate);
}

static void in_child(void) {
    gate = (pthread_rwlock_t)OPEN;
}

void jh_growth_start(void) {
    pthread_atfork(before_fork, in_parent, in_child);
}

void jh_growth_begins(void) {
    if (JH_FAULT(fork_in_growth)) return;
    if (jh_this_growth != JH_GROWTH_REFUSED && (jh_this_growth != JH_GROWTH_POSSIBLE || jh_jemalloc.retain)) return;
    /* The thread that forks has the gate already, should another library's handler allocate. */
    if (!pthread_rwlock_rdlock(&gate)) jh_this_growth = JH_GROWTH_HELD;
}

void jh_growth_hold(void) {
    if (!pthread_rwlock_rdlock(&gate)) jh_this_growth = JH_GROWTH_HELD;
}

void jh_growth_refused(void) {
    if (jh_this_growth == JH_GROWTH_POSSIBLE) jh_this_growth = JH_GROWTH_REFUSED;
}

void jh_growth_ends(void) {
    pthread_rwlock_unlock(&gate);
}
