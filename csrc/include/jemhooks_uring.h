/* jemhooks_uring.h - the registrar "uring": memory pinned as io_uring fixed buffers; a network card without the card.
 *
 * Registered memory is pinned as a network card's would be (it counts in VmPin and against RLIMIT_MEMLOCK), and
 * jemhooks_uring_read() and jemhooks_uring_write() move data between a file and the pinned pages, whatever the address
 * range maps by then. lkey and rkey are the index of the region's first buffer. Needs Linux 5.13.
 *
 * All functions are thread-safe. Errors are -errno with a text in jemhooks_last_error(); given a registrar of another
 * kind they return -EINVAL. A forked child must not use a registrar of its parent.                                   */
#ifndef JEMHOOKS_URING_H
#define JEMHOOKS_URING_H

#include "jemhooks.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What one io_uring buffer can hold; a larger region takes several consecutive ones. */
#define JEMHOOKS_URING_BUFFER ((uint64_t)1 << 30)
#define JEMHOOKS_URING_MAX_SLOTS 16384

typedef struct jemhooks_uring_config {
    size_t size;    /* sizeof(jemhooks_uring_config)                                                            */
    unsigned slots; /* buffers, 1 to JEMHOOKS_URING_MAX_SLOTS. Not more than needed: with huge pages, the time that
                       a registration takes grows with the table (24 us with 64 slots, 266 us with 16,384)       */
} jemhooks_uring_config;
#define JEMHOOKS_URING_CONFIG_INIT {sizeof(jemhooks_uring_config), 1024}

/* A transfer between a file and registered memory. */
typedef struct jemhooks_uring_transfer {
    int fd;
    uint32_t slot;        /* lkey of the region                                                           */
    uint64_t base;        /* first byte of the region, where its first buffer begins                      */
    uint64_t address;     /* first byte to move, in the region                                            */
    uint64_t length;      /* bytes                                                                        */
    uint64_t file_offset; /* bytes; UINT64_MAX: at the file's own position                                */
} jemhooks_uring_transfer;

typedef struct jemhooks_uring_interface {
    size_t size;
    int64_t (*read)(void *self, const jemhooks_uring_transfer *transfer);
    int64_t (*write)(void *self, const jemhooks_uring_transfer *transfer);
} jemhooks_uring_interface;

/* For the functions below. */
static inline const jemhooks_uring_interface *jemhooks_uring_interface_of(const jemhooks_registrar *registrar) {
    const jemhooks_uring_interface *i =
        (const jemhooks_uring_interface *)jemhooks_registrar_interface(registrar, "uring");
    if (i && i->size >= sizeof *i) return i;
    jemhooks_set_error("a jemhooks_uring function was called on a registrar of another kind, or of an older module");
    return NULL;
}

/* Reads from the file into the pinned pages. Returns the bytes moved, fewer than length only at the end of the file or
 * if an error followed them, or -errno: -EFAULT the range is not within the buffers of that region; -EINVAL no such
 * slot; else the file's error. Transfers take turns: one on a pipe that never becomes ready holds up the others. */
static inline int64_t jemhooks_uring_read(jemhooks_registrar *registrar, const jemhooks_uring_transfer *transfer) {
    const jemhooks_uring_interface *i = jemhooks_uring_interface_of(registrar);
    return i ? i->read(jemhooks_registrar_self(registrar), transfer) : -EINVAL;
}

/* Writes the pinned pages to the file; otherwise as jemhooks_uring_read(). */
static inline int64_t jemhooks_uring_write(jemhooks_registrar *registrar, const jemhooks_uring_transfer *transfer) {
    const jemhooks_uring_interface *i = jemhooks_uring_interface_of(registrar);
    return i ? i->write(jemhooks_registrar_self(registrar), transfer) : -EINVAL;
}

#ifdef __cplusplus
}
#endif
#endif
