/* jemhooks_null.h - the registrar "null": registers nothing, counts everything, fails on demand.
 *
 * For tests and dry runs: it hands out keys that are never reused, keeps a log of the latest calls, enforces made-up
 * limits and fails at the call that it is told to.
 *
 *     jemhooks_null_config config = JEMHOOKS_NULL_CONFIG_INIT;
 *     config.max_mr = 8;
 *     jemhooks_registrar_open("null", &config, &registrar);
 *
 * All functions are thread-safe and return 0 or -errno with a text in jemhooks_last_error(); given a registrar of
 * another kind they return -EINVAL.                                                                                  */
#ifndef JEMHOOKS_NULL_H
#define JEMHOOKS_NULL_H

#include "jemhooks.h"

#ifdef __cplusplus
extern "C" {
#endif

enum jemhooks_null_op { JEMHOOKS_NULL_REGISTER = 1, JEMHOOKS_NULL_DEREGISTER = 2 };

/* Called before each operation takes effect, with no lock held, on the thread that makes the call: it may pause there,
 * and may use this registrar. */
typedef void jemhooks_null_observer(void *arg, int op, void *address, size_t length);

typedef struct jemhooks_null_config {
    size_t size;                 /* sizeof(jemhooks_null_config)                                         */
    uint64_t max_mr;             /* registrations at a time, beyond them -ENOSPC; 0: no limit            */
    uint64_t max_mr_size;        /* bytes of one registration, beyond them -EINVAL; 0: no limit          */
    uint64_t fail_at;            /* the Nth registration, counted from 1, fails; 0: none                 */
    uint64_t fail_deregister_at; /* the same for deregistrations: the memory stays registered            */
    int fail_errno;              /* what a failing registration returns, as a positive errno             */
    int fail_deregister_errno;   /* what a failing deregistration returns                                */
    int remote_offset;           /* 1: remote addresses are offsets from 0, as with many libfabric providers */
    jemhooks_null_observer *observer; /* may be NULL                                                      */
    void *observer_arg;
} jemhooks_null_config;
#define JEMHOOKS_NULL_CONFIG_INIT {sizeof(jemhooks_null_config), 0, 0, 0, 0, ENOMEM, EIO, 0, NULL, NULL}

/* One logged call. The log keeps the latest JEMHOOKS_NULL_LOG of them. */
#define JEMHOOKS_NULL_LOG 4096
typedef struct jemhooks_null_call {
    uint64_t sequence; /* counted from 1 over all calls                      */
    uint64_t address, length;
    uint64_t lkey;     /* 0 for a registration that failed                   */
    uint32_t op;       /* enum jemhooks_null_op                              */
    uint32_t access;   /* enum jemhooks_access flags; 0 for deregistrations  */
    int32_t result;    /* 0 or -errno                                        */
    int32_t unused;
} jemhooks_null_call;

typedef struct jemhooks_null_stats {
    size_t size;             /* sizeof(jemhooks_null_stats), set by the caller                              */
    uint64_t registers;      /* calls, failed ones included                                                 */
    uint64_t deregisters;
    uint64_t live, live_bytes; /* registrations at this moment, and their length                            */
    uint64_t live_peak;
    uint64_t errors;         /* registrations that overlap a live one (they succeed), deregistrations of
                                something that is not registered (-EINVAL): 0 in a correct caller           */
} jemhooks_null_stats;

typedef struct jemhooks_null_interface {
    size_t size;
    int (*stats)(void *self, jemhooks_null_stats *stats);
    int (*calls)(void *self, jemhooks_null_call *calls, size_t *count);
    int (*fail)(void *self, int op, uint64_t nth, int error);
} jemhooks_null_interface;

/* For the functions below. */
static inline const jemhooks_null_interface *jemhooks_null_interface_of(const jemhooks_registrar *registrar) {
    const jemhooks_null_interface *i = (const jemhooks_null_interface *)jemhooks_registrar_interface(registrar, "null");
    if (i && i->size >= sizeof *i) return i;
    jemhooks_set_error("a jemhooks_null function was called on a registrar of another kind, or of an older module");
    return NULL;
}

/* Fills in *stats, of which the caller has set size. */
static inline int jemhooks_null_get_stats(jemhooks_registrar *registrar, jemhooks_null_stats *stats) {
    const jemhooks_null_interface *i = jemhooks_null_interface_of(registrar);
    return i ? i->stats(jemhooks_registrar_self(registrar), stats) : -EINVAL;
}

/* Copies the latest *count logged calls, oldest first, and sets *count to how many the log holds. */
static inline int jemhooks_null_get_calls(jemhooks_registrar *registrar, jemhooks_null_call *calls, size_t *count) {
    const jemhooks_null_interface *i = jemhooks_null_interface_of(registrar);
    return i ? i->calls(jemhooks_registrar_self(registrar), calls, count) : -EINVAL;
}

/* From now on the nth next call of this op (1: the very next) fails once with the positive errno `error`; nth 0
 * disarms. -EINVAL: no such op, or error is not positive. */
static inline int jemhooks_null_fail(jemhooks_registrar *registrar, int op, uint64_t nth, int error) {
    const jemhooks_null_interface *i = jemhooks_null_interface_of(registrar);
    return i ? i->fail(jemhooks_registrar_self(registrar), op, nth, error) : -EINVAL;
}

#ifdef __cplusplus
}
#endif
#endif
