/* region.h - a region: one contiguous range of memory, from its provider until its arena ends. */
#ifndef JH_REGION_H
#define JH_REGION_H

#include "policy.h"

typedef struct jh_region {
    jh_registration registration;
    struct jh_space *space;
    struct jh_region *next;       /* in its space, newest first; or in the pool of unused structs */
    struct jh_region *outer;      /* the region in whose midst this one lies, if any              */
    atomic_uint inner;            /* how many lie in the midst of this one                        */
    atomic_uint exported;         /* its slot in the ledger; 0: no other process knows it         */
} jh_region;

/* A region of at least `length` bytes on `alignment`, or the given one, that the page map and its space know. NULL, with
 * space.map_error. Hooks may call it. */
jh_region *jh_region_open(struct jh_space *s, size_t length, size_t alignment, const jemhooks_mapping *given);
/* Unmaps it; the allocator is done with it, and nothing is registered. */
void jh_region_close(jh_region *r);
/* What cannot be deregistered instead stays mapped for good, out of the page map. */
void jh_region_strand(jh_region *r);
/* Bytes of those. */
size_t jh_stranded_bytes(void);
jh_region *jh_region_at(const void *address);

/* For hooks: the allocator takes pages into use, or gives them up. False: the provider has no room for them. */
bool jh_region_commit(jh_region *r, void *address, size_t length);
/* The same for pages in which the allocator keeps records of its own: they do not make the region busy. */
bool jh_region_commit_own(jh_region *r, void *address, size_t length);
/* Such pages are these, which are committed: they turn out to be. */
void jh_region_own(jh_region *r, void *address, size_t length);
/* Are all of these pages committed? */
bool jh_region_is_committed(jh_region *r, const void *address, size_t length);
void jh_region_decommit(jh_region *r, void *address, size_t length);
/* Of an allocator that commits all of its pages as its own: a block of so many bytes in the region begins to live, or has ended. */
void jh_region_enter(jh_region *r, size_t bytes);
void jh_region_leave(jh_region *r, size_t bytes);

#endif
