/* ledger.h - which regions of this process others may map: a table in shared memory that they read. */
#ifndef JH_LEDGER_H
#define JH_LEDGER_H

#include "include/jemhooks.h"

#include <stdatomic.h>
#include <stdbool.h>

#define JH_LEDGER_MAGIC 0x314c686du /* "mhL1" */
#define JH_LEDGER_ENTRIES 65536u

/* One exported region; 64 bytes. An entry whose serial changes while it is read was another's. */
typedef struct jh_ledger_entry {
    _Atomic uint64_t serial;     /* never used twice; 0: no region                    */
    uint64_t device, inode;      /* of the file                                       */
    uint64_t offset, length;     /* of the region in it                               */
    uint64_t page;               /* the mapping's alignment                           */
    int32_t fd;                  /* the file's, in the exporter                       */
    uint32_t sealed;             /* 1: a memfd, which must show that it cannot shrink */
    uint64_t unused;
} jh_ledger_entry;

/* What it says of a region: all but its serial, by which one knows whether that is one region's, and `unused`. */
static inline void jh_ledger_copy(jh_ledger_entry *to, const jh_ledger_entry *from) {
    to->device = from->device;
    to->inode = from->inode;
    to->offset = from->offset;
    to->length = from->length;
    to->page = from->page;
    to->fd = from->fd;
    to->sealed = from->sealed;
}

typedef struct jh_ledger {
    struct {
        uint32_t magic, version;
        uint64_t id;             /* the process, for good: random */
        uint64_t unused[6];
    } head;                      /* in place of entry 0 */
    jh_ledger_entry entry[JH_LEDGER_ENTRIES - 1];
} jh_ledger;

typedef struct jh_ledger_owner {
    int fd;      /* to be passed on */
    uint64_t id;
} jh_ledger_owner;

/* This process's own, made at the first call. 0 or -errno, recorded. */
int jh_ledger_own(jh_ledger_owner *owner);
/* Enters a region; its slot and serial. 0 or -errno, recorded. */
int jh_ledger_enter(const jh_ledger_entry *entry, unsigned *slot, uint64_t *serial);
uint64_t jh_ledger_serial(unsigned slot);
/* The region is about to end. */
void jh_ledger_leave(unsigned slot);
size_t jh_ledger_count(void);

/* Another process's: maps it for reading, if it is one, and has this id. NULL: it is not, with errno. */
const jh_ledger *jh_ledger_map(int fd, uint64_t id);
void jh_ledger_unmap(const jh_ledger *ledger);
/* Does its process live? */
bool jh_ledger_alive(int fd);

#endif
