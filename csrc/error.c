/* error.c - the sentence and the kind of the last failure, per thread.
 * Concurrency: thread-local; never used from a hook, because the first use of thread-local storage may allocate. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local struct {
    int kind;
    char text[768];
    char detail[512];
} last;

int jh_fail(int kind, int err, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last.text, sizeof last.text, format, args);
    va_end(args);
    last.kind = kind;
    errno = err;
    return -err;
}

const char *jh_detail(void) {
    return last.detail;
}

void jh_detail_clear(void) {
    last.detail[0] = 0;
}

void jemhooks_set_error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last.detail, sizeof last.detail, format, args);
    va_end(args);
    last.kind = JEMHOOKS_ERROR_TRANSFER; /* unless a call of this library goes on to say more */
    snprintf(last.text, sizeof last.text, "%s", last.detail);
}

const char *jemhooks_last_error(void) {
    return last.text;
}

int jemhooks_last_error_kind(void) {
    return last.kind;
}
