/* jemhooks_ucx.h - the registrar "ucx": memory handles of a UCP context.
 *
 * It maps memory with ucp_mem_map() and packs remote keys; transfers are the caller's, on workers of the same context: that
 * of jemhooks_ucx_get_info(), or one that the caller made and passes. A region's packed key is jemhooks_packed_key(), for the
 * peer's ucp_ep_rkey_unpack() (which takes no length: send it along, and check it); its lkey is its ucp_mem_h, for
 * ucp_request_param_t.memh; its rkey is 0. Remote addresses are plain addresses.
 * UCX's tcp and shared-memory transports do not enforce keys: a peer with any key writes where it likes.
 *
 * A context that is passed in
 *   - must outlive the registrations: call jemhooks_revoke() on each arena and jemhooks_ucx_detach() before ucp_cleanup(),
 *     which crashes otherwise;
 *   - should be made with mt_workers_shared = 1. If it is not, UCX has no lock around registrations (1.18; 1.13 has one):
 *     then nobody else may use the context while this library registers or deregisters;
 *   - should have RCACHE_ENABLE=n. If it has not, UCX keeps its registration after ours has ended, and is told to drop it,
 *     which it does at its next registration.
 *
 * All functions are thread-safe. Errors are -errno with a text in jemhooks_last_error(); given a registrar of another kind
 * they return -EINVAL. A forked child must not use a registrar of its parent.                                         */
#ifndef JEMHOOKS_UCX_H
#define JEMHOOKS_UCX_H

#include "jemhooks.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ucp_context;

typedef struct jemhooks_ucx_config {
    size_t size;                 /* sizeof(jemhooks_ucx_config)                                                */
    struct ucp_context *context; /* a ucp_context_h of the caller's; NULL: one of its own, with the feature RMA,
                                    shared by threads, without UCX's registration cache and signal handlers, and
                                    otherwise as the environment (UCX_TLS, …) says                             */
} jemhooks_ucx_config;
#define JEMHOOKS_UCX_CONFIG_INIT {sizeof(jemhooks_ucx_config), NULL}

typedef struct jemhooks_ucx_info {
    size_t size;                 /* sizeof(jemhooks_ucx_info), set by the caller          */
    struct ucp_context *context; /* NULL once detached                                    */
    char version[32];            /* of the library that is loaded, such as "1.13.1"       */
    int32_t own;                 /* 1: the registrar made the context                     */
    int32_t shared;              /* 1: its threads may register at the same time          */
} jemhooks_ucx_info;

typedef struct jemhooks_ucx_interface {
    size_t size;
    int (*info)(void *self, jemhooks_ucx_info *info);
    int (*detach)(void *self);
} jemhooks_ucx_interface;

static inline const jemhooks_ucx_interface *jemhooks_ucx_interface_of(jemhooks_registrar *registrar, const char *call) {
    const jemhooks_ucx_interface *i = (const jemhooks_ucx_interface *)jemhooks_registrar_interface(registrar, "ucx");
    if (i && i->size >= sizeof *i) return i;
    jemhooks_set_error("%s() was called on a registrar of another kind, or of an older module", call);
    return NULL;
}

/* Fills in *info, of which the caller has set size. */
static inline int jemhooks_ucx_get_info(jemhooks_registrar *registrar, jemhooks_ucx_info *info) {
    const jemhooks_ucx_interface *i = jemhooks_ucx_interface_of(registrar, "jemhooks_ucx_get_info");
    return i ? i->info(jemhooks_registrar_self(registrar), info) : -EINVAL;
}

/* The context is about to end: nothing is registered with it any more, and asking for a key fails with -ESHUTDOWN. -EBUSY:
 * regions are still registered; -EINVAL: the context is the registrar's own. */
static inline int jemhooks_ucx_detach(jemhooks_registrar *registrar) {
    const jemhooks_ucx_interface *i = jemhooks_ucx_interface_of(registrar, "jemhooks_ucx_detach");
    return i ? i->detach(jemhooks_registrar_self(registrar)) : -EINVAL;
}

#ifdef __cplusplus
}
#endif
#endif
