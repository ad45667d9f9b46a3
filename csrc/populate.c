/* populate.c - makes the pages of a range resident: the kernel clears each one, which is most of what a first registration
 * takes, and can be done by several threads at once.
 * Concurrency: none of its own; its threads have all signals blocked and end with the call.                         */
#include "populate.h"
#include "pagemap.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels leave it to the registrar */
#endif
enum { MOST_THREADS = 8 };

typedef struct slice {
    char *base;
    size_t length;
} slice;

/* In steps, since whoever maps memory meanwhile waits for the one under way. */
static void *populate(void *arg) {
    const slice *s = arg;
    for (size_t at = 0; at < s->length; at += JH_SLOT)
        if (madvise(s->base + at, s->length - at < JH_SLOT ? s->length - at : JH_SLOT, MADV_POPULATE_WRITE)) break;
    return NULL;
}

static size_t processors(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? 1 : (size_t)CPU_COUNT(&set);
}

void jh_populate(void *base, size_t length) {
    pthread_t thread[MOST_THREADS];
    slice slices[MOST_THREADS];
    size_t n = length / (JH_LARGE / 2), cpus = processors(), started = 1;
    if (n > cpus) n = cpus;
    if (n > MOST_THREADS) n = MOST_THREADS;
    if (!n) n = 1;
    size_t part = (length / n + JH_SLOT - 1) / JH_SLOT * JH_SLOT;
    for (size_t i = 0; i < n; i++) {
        size_t at = i * part < length ? i * part : length;
        slices[i] = (slice){(char *)base + at, length - at < part ? length - at : part};
    }
    sigset_t every, before;
    sigfillset(&every);
    if (n > 1) pthread_sigmask(SIG_SETMASK, &every, &before);
    while (started < n && !pthread_create(&thread[started], NULL, populate, &slices[started])) started++;
    if (n > 1) pthread_sigmask(SIG_SETMASK, &before, NULL);
    populate(&slices[0]);
    for (size_t i = started; i < n; i++) populate(&slices[i]);
    for (size_t i = 1; i < started; i++) pthread_join(thread[i], NULL);
}
