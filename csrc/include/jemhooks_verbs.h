/* jemhooks_verbs.h - the registrar "verbs": memory regions of a protection domain of ibverbs.
 *
 * It registers, and leaves transfers to the caller's own queue pairs, which must be of the same protection domain: that of
 * jemhooks_verbs_get_info(), or one that the caller opened and passes. Remote addresses are plain addresses.
 * What rdma-core is told of forks and huge pages (ibv_fork_init(), RDMAV_FORK_SAFE, RDMAV_HUGEPAGES_SAFE) holds: its
 * madvise(MADV_DONTFORK), where the kernel needs it, always covers whole regions. Access flags that the device lacks are
 * refused; relaxed ordering is a wish, which libibverbs drops where the kernel does not know it.
 *
 * All functions are thread-safe. Errors are -errno with a text in jemhooks_last_error(); given a registrar of another kind
 * they return -EINVAL. A forked child must not use a registrar of its parent.                                         */
#ifndef JEMHOOKS_VERBS_H
#define JEMHOOKS_VERBS_H

#include "jemhooks.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ibv_context;
struct ibv_pd;

typedef struct jemhooks_verbs_config {
    size_t size;        /* sizeof(jemhooks_verbs_config)                                                       */
    const char *device; /* "mlx5_0", "rxe0", as ibv_devices lists them; NULL or "": the first with an active port */
    struct ibv_pd *pd;  /* the caller's, which must outlive the registrar and every arena that uses it, and be of
                           `device` if that is given; NULL: one of its own                                     */
} jemhooks_verbs_config;
#define JEMHOOKS_VERBS_CONFIG_INIT {sizeof(jemhooks_verbs_config), NULL, NULL}

/* What ibv_is_fork_initialized() says; UNNEEDED: this kernel copies pinned pages at fork. */
enum jemhooks_verbs_fork { JEMHOOKS_VERBS_FORK_DISABLED, JEMHOOKS_VERBS_FORK_ENABLED, JEMHOOKS_VERBS_FORK_UNNEEDED };

typedef struct jemhooks_verbs_info {
    size_t size;                 /* sizeof(jemhooks_verbs_info), set by the caller                              */
    struct ibv_context *context; /* for queue pairs; destroy those before the registrar is closed              */
    struct ibv_pd *pd;
    uint64_t max_mr_size;        /* bytes of one registration                                                  */
    uint64_t max_mr;             /* registrations at a time                                                    */
    char device[64];
    int32_t atomics;             /* 1: JEMHOOKS_REMOTE_ATOMIC is possible                                       */
    int32_t on_demand;           /* 1: JEMHOOKS_ON_DEMAND is                                                    */
    int32_t fork;                /* enum jemhooks_verbs_fork                                                   */
    uint32_t ports;              /* numbered from 1                                                            */
} jemhooks_verbs_info;

typedef struct jemhooks_verbs_interface {
    size_t size;
    int (*info)(void *self, jemhooks_verbs_info *info);
} jemhooks_verbs_interface;

/* Fills in *info, of which the caller has set size. */
static inline int jemhooks_verbs_get_info(jemhooks_registrar *registrar, jemhooks_verbs_info *info) {
    const jemhooks_verbs_interface *i =
        (const jemhooks_verbs_interface *)jemhooks_registrar_interface(registrar, "verbs");
    if (i && i->size >= sizeof *i) return i->info(jemhooks_registrar_self(registrar), info);
    jemhooks_set_error("jemhooks_verbs_get_info() was called on a registrar of another kind, or of an older module");
    return -EINVAL;
}

#ifdef __cplusplus
}
#endif
#endif
