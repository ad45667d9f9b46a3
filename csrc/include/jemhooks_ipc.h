/* jemhooks_ipc.h - memory of one process in another: blocks of arenas whose provider shares (memfd, file, devdax).
 *
 * The exporter makes a handle of 64 plain bytes, to be sent by any means. The importer maps the block's region once, for all its
 * blocks, and sees the same bytes; it may register the mapping with registrars of its own, by a fixed provider. A handle names a
 * region by exporter and serial number: once the exporter's arena or the exporter is gone it is refused, whatever process or
 * region has come into its place. It does not keep the block allocated: that is up to the two.
 * Open blocks can be read as long as they are open. When the exporter dies they keep their bytes; when it frees a block, what is
 * there becomes zero or another block's; when its arena ends, a named file or device may go to another arena.
 * Threads: every function may be called from any thread. A forked child has nothing open; its parent's blocks can be read.   */
#ifndef JEMHOOKS_IPC_H
#define JEMHOOKS_IPC_H

#include "jemhooks.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct jemhooks_ipc_handle {
    unsigned char bytes[64];
} jemhooks_ipc_handle;

enum jemhooks_ipc_flags {
    JEMHOOKS_IPC_READ_ONLY = 1 /* export: whoever opens it may only read; open: the same, for this block. No protection from a process
                                  that means harm: it has the descriptor */
};

/* A handle of `length` bytes (0: all usable ones) at p, in a live block. -ENOENT: not ours; -EOPNOTSUPP: its provider does not
 * share; -EINVAL: it reaches beyond its region; -ENOSPC: 65,535 regions are exported. */
JEMHOOKS_API int jemhooks_ipc_export(const void *p, size_t length, unsigned flags, jemhooks_ipc_handle *handle);

/* An open block. */
typedef struct jemhooks_ipc_block {
    void *base;
    size_t length;
    int writable;
    void *region;  /* the whole region, as it is mapped here: what to register     */
    size_t region_length;
    void *mapping; /* the library's own                                            */
} jemhooks_ipc_block;

/* Opens a block; the descriptors are taken from the exporter by pidfd_getfd() or through /proc, which needs the same user.
 * -EINVAL: not a whole, unchanged handle of this version, or of another host; -ESTALE: what it names is gone; -ESRCH: its exporter
 * is; -EPERM: not allowed to take descriptors: have them sent; -EMFILE. */
JEMHOOKS_API int jemhooks_ipc_open(const jemhooks_ipc_handle *handle, unsigned flags, jemhooks_ipc_block *block);
/* Once for each open. The mapping goes when no block of its region is open, or stays for the next, as long as it is among the last
 * few (see below) and its region lives. NULL base: nothing. */
JEMHOOKS_API void jemhooks_ipc_close(jemhooks_ipc_block *block);
/* 1: the region it is of is still there; 0: not, or not known in a forked child. */
JEMHOOKS_API int jemhooks_ipc_alive(const jemhooks_ipc_block *block);

/* The same over a connected Unix socket, where descriptors may not be taken: they go along. One send for one receive; stream
 * sockets must be at the border of a message. timeout_ms -1: for ever. -ETIMEDOUT; -EINTR: a signal came before
 * anything had gone; -EPIPE: the peer has closed; -EPROTO: something else was received. */
JEMHOOKS_API int jemhooks_ipc_send(int socket, const void *p, size_t length, unsigned flags, int timeout_ms);
JEMHOOKS_API int jemhooks_ipc_receive(int socket, unsigned flags, int timeout_ms, jemhooks_ipc_block *block);

typedef struct jemhooks_ipc_stats {
    size_t size;               /* sizeof(jemhooks_ipc_stats), set by the caller     */
    uint64_t exported;         /* regions of this process that handles were made of */
    uint64_t exporters;        /* processes of which something is mapped            */
    uint64_t opened, cached;   /* mappings with open blocks; without                */
    uint64_t hits, misses;     /* opens that found their region mapped, or not      */
    uint64_t cache_limit;
} jemhooks_ipc_stats;
JEMHOOKS_API int jemhooks_ipc_get_stats(jemhooks_ipc_stats *stats);
/* How many mappings without open blocks are kept; 64 at first. 0: none. */
JEMHOOKS_API void jemhooks_ipc_set_cache(size_t mappings);

#ifdef __cplusplus
}
#endif
#endif
