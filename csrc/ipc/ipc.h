/* ipc.h - what a handle says, and how its descriptors are got. */
#ifndef JH_IPC_H
#define JH_IPC_H

#include "../include/jemhooks_ipc.h"
#include "../ledger.h"

/* A handle, laid out. */
typedef struct jh_handle {
    uint32_t magic;        /* with the version                          */
    uint32_t host;         /* of this boot of this machine              */
    uint64_t ledger;       /* the exporter's                            */
    uint32_t pid, fd;      /* the exporter's; its ledger's descriptor   */
    uint32_t slot, flags;
    uint64_t serial;       /* of the region                             */
    uint64_t offset, length; /* of the block in its region              */
    uint64_t check;        /* over all of the above                     */
} jh_handle;

/* The descriptors that go with a handle; -1: to be taken from the exporter. */
typedef struct jh_descriptors {
    int ledger, memory;
} jh_descriptors;

/* As jemhooks_ipc_export(), which descriptors too: this process's own, not to be closed. */
int jh_ipc_export(const void *p, size_t length, unsigned flags, jemhooks_ipc_handle *handle, jh_descriptors *fds);
/* 0; -EINVAL, recorded: truncated, changed, or of another host. */
int jh_ipc_decode(const jemhooks_ipc_handle *handle, jh_handle *h);
/* A copy of descriptor fd of process pid. -1: recorded, with errno. */
int jh_ipc_fetch(uint32_t pid, int fd);
/* As jemhooks_ipc_open(), with descriptors that came along, which remain the caller's. */
int jh_ipc_open(const jemhooks_ipc_handle *handle, unsigned flags, jh_descriptors fds, jemhooks_ipc_block *block);

#endif
