/* fabric.h - what the two halves of the registrar "fabric" share: libfabric's objects and memory regions (fabric.c),
 * and the transfers (fabric_endpoint.c).                                                                             */
#ifndef JEMHOOKS_REGISTRAR_FABRIC_H
#define JEMHOOKS_REGISTRAR_FABRIC_H

#include <stdbool.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "jemhooks_fabric.h"

typedef struct endpoint endpoint;

/* All but next_key is written while opening and never changes. */
typedef struct fabric_registrar {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    int wait_fd;               /* readable when cq wants to be read; -1: there is none              */
    struct fid_ep *ep;         /* made here, for FI_MR_ENDPOINT needs it to register memory         */
    endpoint *endpoint;        /* the transfers on it                                               */
    uint32_t max_outstanding;
    pid_t owner;               /* the process that opened it: a forked child shares its connections */
    uint64_t last_key;         /* the largest key that we may choose                                */
    _Atomic uint64_t next_key;
} fabric_registrar;

extern const jemhooks_host *fabric_host;

/* The errno, negated, for a libfabric error of either sign. */
int fabric_errno(int64_t error);

/* Could it be an address of this provider? */
bool fabric_is_address(const fabric_registrar *f, const char *address, size_t length);

/* The table of transfers. Closed after ep, which ends those under way. 0 or -errno with a text. */
int endpoint_open(fabric_registrar *f, unsigned max_outstanding);
void endpoint_close(endpoint *e);
uint32_t endpoint_outstanding(endpoint *e);

/* Its part of jemhooks_fabric_interface; self is the registrar. */
int endpoint_connect(void *self, const void *address, size_t length, uint64_t *peer);
int endpoint_put(void *self, uint64_t peer, const void *local, uint64_t lkey, size_t length, uint64_t remote,
                 uint64_t rkey, uint64_t *ticket);
int endpoint_get(void *self, uint64_t peer, void *local, uint64_t lkey, size_t length, uint64_t remote, uint64_t rkey,
                 uint64_t *ticket);
int endpoint_wait(void *self, uint64_t ticket, int timeout_ms);
int endpoint_forget(void *self, uint64_t ticket);
int endpoint_progress(void *self, int timeout_ms);

#endif
