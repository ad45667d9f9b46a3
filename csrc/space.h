/* space.h - the space of an arena: all of its regions, out of which extents are carved. */
#ifndef JH_SPACE_H
#define JH_SPACE_H

#include "region.h"

/* A part of a region, [at, end) as offsets, that the allocator does not have. */
typedef struct jh_gap {
    struct jh_gap *next;          /* in its space, or in the pool of unused structs */
    jh_region *region;
    size_t at, end;
} jh_gap;

typedef struct jh_space {
    jemhooks_arena *arena;
    struct jh_heap *heap;         /* the allocator's, if it wants to find it                       */
    jemhooks_provider *provider;
    void *tenant;                 /* what the provider keeps for this arena                       */
    jh_rails rails;
    size_t region_max;            /* the growth of regions ends here; larger extents get their own */
    size_t region_limit;          /* no region is larger: what the registrars accept; SIZE_MAX: any */
    pthread_mutex_t carve;        /* short; guards growth and gaps                                 */
    size_t growth;                /* smaller extents share a region of this length; from region_min, doubling, to region_max */
    jh_gap *gaps;                 /* what can still be carved                                     */
    _Atomic(jh_region *) regions; /* grows at its head only, until the space is closed             */
    atomic_size_t region_count, mapped;
    atomic_int map_error;         /* errno of the last refusal, for the message                   */
    atomic_bool starved;          /* the provider had no room for pages: new regions are reserved whole, or refused */
    atomic_bool seeding;          /* what is allocated is not written to, and freed again          */
    bool in_chunks;               /* extents are all of one size, mostly: more and more of them shall share a region */
    bool uncached;                /* threads keep no freed blocks, which would keep regions busy  */
    struct jh_ahead *ahead;       /* the thread that prepares regions; NULL: none                 */
    size_t last;                  /* bytes of the last extent, at most region_max                 */
} jh_space;

int jh_space_open(jh_space *s);
/* Deregisters and unmaps every region; the allocator is done with all of them. A region that cannot be deregistered
 * stays mapped for good and out of the page map; the first such error is returned, recorded. */
int jh_space_close(jh_space *s);
/* Maps the regions of a provider that has a number of them. 0 or an error, recorded. */
int jh_space_map_whole(jh_space *s);
/* Deregisters idle unleased regions; their bytes are added to *released. The first error, recorded. */
int jh_space_trim(jh_space *s, size_t *released);
/* Deregisters all of them. The first error, recorded. */
int jh_space_revoke(jh_space *s);
/* Leases held in the space. */
size_t jh_space_leases(const jh_space *s);
size_t jh_space_committed(const jh_space *s);
/* Bytes of the largest piece that was never carved. */
size_t jh_space_largest_gap(jh_space *s);

/* For the thread that prepares regions: */
/* Is there no room, ready, for the next extent? *unready: a whole region that only has to be registered again, or NULL; nobody
 * carves from it until it is offered. */
bool jh_space_wants(jh_space *s, jh_gap **unready);
/* Maps a region of region_max that nobody carves from until it is offered. NULL: refused. */
jh_gap *jh_space_map(jh_space *s);
void jh_space_offer(jh_space *s, jh_gap *whole);
/* Tells it that something may be wanted; in prepare.c. */
void jh_prepare_wake(struct jh_ahead *ahead);

/* For hooks. */
/* The space's own region there, even where another arena lives in a block of it. */
jh_region *jh_space_region_at(const jh_space *s, const void *address);
/* A new extent of `size` bytes: a new region, or the rest of one. Committed if *commit, zero if *zero. NULL: refused. */
void *jh_space_carve(jh_space *s, size_t size, size_t alignment, bool *zero, bool *commit);
/* The same at exactly `address`, only where a gap begins there. */
void *jh_space_carve_at(jh_space *s, void *address, size_t size, bool *zero, bool *commit);
/* Takes back what was carved, or a part of it, of which no page is committed. */
void jh_space_uncarve(jh_space *s, void *address, size_t size);

#endif
