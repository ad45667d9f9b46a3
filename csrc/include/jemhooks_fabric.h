/* jemhooks_fabric.h - the registrar "fabric": libfabric memory regions, and one-sided transfers between processes.
 *
 * Opening it makes a libfabric domain with one endpoint. Memory that it registers can be read and written by peers:
 *
 *     target                                    initiator
 *     jemhooks_fabric_address(reg, buf, &len)   jemhooks_fabric_connect(reg, buf, len, &peer)
 *     jemhooks_get_key(p, &key)   addr, rkey:   jemhooks_fabric_put(reg, peer, local, lkey, n, addr, rkey, &ticket)
 *     jemhooks_fabric_progress(reg, ms)         jemhooks_fabric_wait(reg, ticket, ms)
 *
 * Remote addresses and keys: take key.addr, which is an offset where the provider counts from the start of a region
 * (tcp, sockets, net) and the address itself elsewhere. Keys are enforced by tcp, net, sockets and verbs; not by shm
 * and udp. Keys are never given out twice.
 * Progress: where info.manual_progress is 1 (tcp), a target serves its peers only while one of its threads is inside
 * jemhooks_fabric_progress() or jemhooks_fabric_wait().
 * Threads: all functions may be called from any thread at any time, but not in a forked child of the opener.
 * Errors: -errno with a text in jemhooks_last_error(); given a registrar of another kind all return -EINVAL.         */
#ifndef JEMHOOKS_FABRIC_H
#define JEMHOOKS_FABRIC_H

#include "jemhooks.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct jemhooks_fabric_config {
    size_t size;              /* sizeof(jemhooks_fabric_config)                                                       */
    const char *provider;     /* "tcp", "sockets", "net", "verbs;ofi_rxm", ... as fi_info names them; NULL: any       */
    const char *node;         /* this host's own name or address, on which peers reach it; NULL or "": the provider's
                                 choice, which shm needs                                                              */
    const char *service;      /* own port; NULL or "": any                                                            */
    const char *domain;       /* one of the provider's interfaces, e.g. "mlx5_0"; NULL or "": any                     */
    unsigned max_outstanding; /* tickets at a time, 1 to 65536                                                        */
} jemhooks_fabric_config;
#define JEMHOOKS_FABRIC_CONFIG_INIT {sizeof(jemhooks_fabric_config), NULL, "127.0.0.1", NULL, NULL, 256}

typedef struct jemhooks_fabric_info {
    size_t size;           /* sizeof(jemhooks_fabric_info), set by the caller                              */
    char provider[64];     /* what libfabric chose, e.g. "tcp;ofi_rxm"                                     */
    char domain[64];
    uint64_t mr_mode;      /* FI_MR_* bits of the domain                                                   */
    uint64_t max_msg_size; /* bytes of one transfer; longer ones are cut by this library                   */
    uint64_t mr_key_size;  /* bytes                                                                        */
    uint64_t max_mr;       /* memory regions at a time; 0: not known                                       */
    uint32_t version;      /* of the library: major << 16 | minor                                          */
    int32_t manual_progress;   /* 1: a target must call jemhooks_fabric_progress()                         */
    int32_t virtual_addresses; /* 1: remote addresses are the target's own, 0: offsets into the region     */
    int32_t packed_keys;       /* 1: peers need jemhooks_fabric_map_key() on the packed key                */
    uint32_t max_outstanding, outstanding; /* tickets: how many there can be, how many are now            */
} jemhooks_fabric_info;

typedef struct jemhooks_fabric_interface {
    size_t size;
    int (*info)(void *self, jemhooks_fabric_info *info);
    int (*address)(void *self, void *buffer, size_t *length);
    int (*connect)(void *self, const void *address, size_t length, uint64_t *peer);
    int (*map_key)(void *self, const void *packed, size_t length, uint64_t *rkey);
    int (*unmap_key)(void *self, uint64_t rkey);
    int (*put)(void *self, uint64_t peer, const void *local, uint64_t lkey, size_t length, uint64_t remote,
               uint64_t rkey, uint64_t *ticket);
    int (*get)(void *self, uint64_t peer, void *local, uint64_t lkey, size_t length, uint64_t remote, uint64_t rkey,
               uint64_t *ticket);
    int (*wait)(void *self, uint64_t ticket, int timeout_ms);
    int (*forget)(void *self, uint64_t ticket);
    int (*progress)(void *self, int timeout_ms);
} jemhooks_fabric_interface;

/* For the functions below. */
static inline const jemhooks_fabric_interface *jemhooks_fabric_interface_of(const jemhooks_registrar *registrar) {
    const jemhooks_fabric_interface *i =
        (const jemhooks_fabric_interface *)jemhooks_registrar_interface(registrar, "fabric");
    if (i && i->size >= sizeof *i) return i;
    jemhooks_set_error("a jemhooks_fabric function was called on a registrar of another kind, or of an older module");
    return NULL;
}

/* Fills in *info, of which the caller has set size. */
static inline int jemhooks_fabric_get_info(jemhooks_registrar *registrar, jemhooks_fabric_info *info) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->info(jemhooks_registrar_self(registrar), info) : -EINVAL;
}

/* Writes this endpoint's address, which peers pass to jemhooks_fabric_connect(), and its length in bytes (*length: room
 * of the buffer on entry; 256 is always enough). -ENOSPC: too small, *length says what it takes. */
static inline int jemhooks_fabric_address(jemhooks_registrar *registrar, void *buffer, size_t *length) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->address(jemhooks_registrar_self(registrar), buffer, length) : -EINVAL;
}

/* Makes the endpoint with this address a peer. Nothing is sent yet: that it does not answer shows in the first
 * transfer. -EINVAL: not an address of this provider. */
static inline int jemhooks_fabric_connect(jemhooks_registrar *registrar, const void *address, size_t length,
                                          uint64_t *peer) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->connect(jemhooks_registrar_self(registrar), address, length, peer) : -EINVAL;
}

/* Turns a peer's packed key into an rkey for put and get, which must get no other there; only where info.packed_keys is
 * 1, else -EOPNOTSUPP. jemhooks_fabric_unmap_key() gives it back. */
static inline int jemhooks_fabric_map_key(jemhooks_registrar *registrar, const void *packed, size_t length,
                                          uint64_t *rkey) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->map_key(jemhooks_registrar_self(registrar), packed, length, rkey) : -EINVAL;
}
static inline int jemhooks_fabric_unmap_key(jemhooks_registrar *registrar, uint64_t rkey) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->unmap_key(jemhooks_registrar_self(registrar), rkey) : -EINVAL;
}

/* Starts copying `length` bytes from `local` to the peer's memory at `remote` (its key's addr), and gives a ticket for
 * jemhooks_fabric_wait(). `lkey` is that of the local memory's own registration; 0 does unless info.mr_mode has
 * FI_MR_LOCAL. The local bytes must stay as they are until the transfer ended. Transfers may overtake each other.
 * -EINVAL: no such peer, length 0, or a missing lkey; -ENOBUFS: max_outstanding tickets are held. */
static inline int jemhooks_fabric_put(jemhooks_registrar *registrar, uint64_t peer, const void *local, uint64_t lkey,
                                      size_t length, uint64_t remote, uint64_t rkey, uint64_t *ticket) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->put(jemhooks_registrar_self(registrar), peer, local, lkey, length, remote, rkey, ticket) : -EINVAL;
}

/* Starts copying from the peer's memory to `local`; otherwise as jemhooks_fabric_put(). */
static inline int jemhooks_fabric_get(jemhooks_registrar *registrar, uint64_t peer, void *local, uint64_t lkey,
                                      size_t length, uint64_t remote, uint64_t rkey, uint64_t *ticket) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->get(jemhooks_registrar_self(registrar), peer, local, lkey, length, remote, rkey, ticket) : -EINVAL;
}

/* Waits at most timeout_ms milliseconds (0: only looks) for one transfer. 0: it is done, a put's bytes are in the
 * target's memory and a get's in ours. -ETIMEDOUT: it is still under way, its memory still in use, and the ticket still
 * good: wait again, or forget it. Any other error ended the transfer: some of its bytes may have moved. The ticket is
 * then gone, as after success. -EINVAL: no such ticket, or a negative timeout (a dead target may never be noticed).
 * A wrong key or range ends in -EACCES (sockets) or -ECANCELED (tcp, net). tcp and net drop their connection to the
 * peer for it, and every other transfer under way to that peer fails with -ECANCELED or -ENOTCONN; later ones connect
 * again. After any failure, new transfers start only some 30 ms later, so that they do. */
static inline int jemhooks_fabric_wait(jemhooks_registrar *registrar, uint64_t ticket, int timeout_ms) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->wait(jemhooks_registrar_self(registrar), ticket, timeout_ms) : -EINVAL;
}

/* Gives a ticket up: nobody will wait for it. A transfer already under way goes on and uses its memory until it ends or
 * the registrar is closed; until then it counts as outstanding. -EINVAL: no such ticket. */
static inline int jemhooks_fabric_forget(jemhooks_registrar *registrar, uint64_t ticket) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->forget(jemhooks_registrar_self(registrar), ticket) : -EINVAL;
}

/* Serves peers, and moves our own transfers on, for timeout_ms milliseconds (0: once). -EINVAL: negative timeout. */
static inline int jemhooks_fabric_progress(jemhooks_registrar *registrar, int timeout_ms) {
    const jemhooks_fabric_interface *i = jemhooks_fabric_interface_of(registrar);
    return i ? i->progress(jemhooks_registrar_self(registrar), timeout_ms) : -EINVAL;
}

#ifdef __cplusplus
}
#endif
#endif
