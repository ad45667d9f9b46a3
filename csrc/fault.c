/* fault.c - the test build's switches; empty otherwise.
 * Concurrency: reads the environment only; hooks may call it. */
#include "fault.h"

#ifdef JEMHOOKS_FAULTS
#include <stdlib.h>
#include <string.h>
#include <time.h>

bool jh_fault_named(const char *variable, const char *name) {
    const char *list = getenv(variable);
    size_t n = strlen(name);
    for (; list && *list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
        if (!strncmp(list, name, n) && (list[n] == ',' || !list[n])) return true;
    return false;
}

void jh_fault_wait(void) {
    struct timespec t = {0, 200000};
    nanosleep(&t, NULL);
}
#else
typedef int jh_fault_unused;
#endif
