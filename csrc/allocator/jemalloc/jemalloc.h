/* jemalloc.h - the private declarations of this folder: all that knows jemalloc.
 * JEMALLOC_NO_DEMANGLE maps je_ names to whatever the library's real names are. In a process that loaded jemalloc
 * privately malloc and free are libc's, so only the non-standard names (mallocx, mallctl, …) may be called. */
#ifndef JH_JEMALLOC_H
#define JH_JEMALLOC_H

#define JEMALLOC_NO_DEMANGLE
#include <jemalloc/jemalloc.h>

#include "../allocator.h"

/* ---- ctl.c ------------------------------------------------------------------------------------------------------ */

/* Per-arena controls, looked up once by name. */
enum jh_ctl {
    JH_CTL_PURGE,
    JH_CTL_DECAY,
    JH_CTL_DESTROY,
    JH_CTL_DIRTY_DECAY,
    JH_CTL_MUZZY_DECAY,
    JH_CTL_OVERSIZE,   /* 5.3 and later */
    JH_CTL_GROW_LIMIT, /* 5.1 and later */
    JH_CTL_CHUNK_HOOKS, /* this and the next four: for 4.x */
    JH_CTL_RESET,       /* 4.2 and later */
    JH_CTL_DECAY_TIME,
    JH_CTL_DIRTY_MULT,
    JH_CTL_THREADS,
    JH_CTL_PACTIVE,
    JH_CTL_PDIRTY,
    JH_CTL_PMUZZY,
    JH_CTL_ABANDONED,
    JH_CTL_SMALL_ALLOCATED,
    JH_CTL_LARGE_ALLOCATED,
    JH_CTL_HUGE_ALLOCATED, /* 4.x */
    JH_CTL_COUNT
};

typedef struct jh_features {
    const char *version;
    const char *options;    /* the environment variable that has them                                        */
    bool retain;            /* opt.retain: jemalloc keeps address space and asks in growing steps            */
    bool zeroes;            /* it clears memory with the hooks' knowledge (5.3 and later)                    */
    bool metadata_apart;    /* an arena's metadata must not come by the hooks: they could not tell it from extents */
    bool bounds_growth;     /* retain_grow_limit exists                                                      */
    bool touches;           /* opt.junk, opt.zero or the like: jemalloc writes to what it hands out          */
    size_t chunk;           /* 4.x, which has chunks of so many bytes; 0: 5.x, which has extents             */
    size_t largest_run;     /* 4.x: blocks up to this one lie in chunks with others                          */
    bool recommits;         /* 4.x: runs in a chunk that was committed whole are committed again (4.3 and later) */
    bool decays;            /* free pages are given back after a time, which 4.x does with opt.purge:decay only */
} jh_features;
extern jh_features jh_jemalloc;

#define JH_ARENAS 4096 /* indexes of jemalloc's arenas are below it: MALLOCX_ARENA has 12 bits for them */

/* Reads the features once. 0 or an error, recorded. */
int jh_ctl_load(void);
/* mallctl on arena `index`: 0 or -errno; -ENOENT where this jemalloc lacks the control. */
int jh_ctl_arena(enum jh_ctl ctl, unsigned index, void *old, size_t *old_size, void *new, size_t new_size);
/* A numerical option, which all are size_t or ssize_t; `otherwise` where this jemalloc lacks it. */
int64_t jh_ctl_option(const char *name, int64_t otherwise);
/* A numerical statistic of arena `index`, as of the last jh_ctl_epoch(); 0 where it is lacking. */
size_t jh_ctl_stat(enum jh_ctl ctl, unsigned index);
void jh_ctl_epoch(void);

/* ---- growth.c --------------------------------------------------------------------------------------------------- */

/* Where a thread is: in no allocation of ours, in one, in one whose growth was refused, or with forks held off. */
typedef enum jh_growth { JH_GROWTH_NONE, JH_GROWTH_POSSIBLE, JH_GROWTH_REFUSED, JH_GROWTH_HELD } jh_growth;
extern _Thread_local jh_growth jh_this_growth __attribute__((tls_model("initial-exec")));

/* Once, and after jemalloc has registered its own fork handlers, which must run after these. */
void jh_growth_start(void);
/* In a hook that is asked for memory, and in one that gives none. */
void jh_growth_begins(void);
void jh_growth_refused(void);
/* Before a call that is about memory of jemalloc's own arenas; jh_growth_leave() after it. */
void jh_growth_hold(void);
void jh_growth_ends(void);

/* Around each call by which jemalloc may grow. */
static inline void jh_growth_enter(void) {
    jh_this_growth = JH_GROWTH_POSSIBLE;
}

static inline void jh_growth_leave(void) {
    if (jh_this_growth == JH_GROWTH_HELD) jh_growth_ends();
    jh_this_growth = JH_GROWTH_NONE;
}

/* ---- extent_hooks.c --------------------------------------------------------------------------------------------- */

typedef struct jh_extent_hooks jh_extent_hooks;
struct jh_extent_hooks { /* extent_hooks_t of jemalloc 5, declared here so that any header version will do */
    void *(*alloc)(jh_extent_hooks *, void *new_addr, size_t size, size_t alignment, bool *zero, bool *commit, unsigned arena);
    bool (*dalloc)(jh_extent_hooks *, void *addr, size_t size, bool committed, unsigned arena);
    void (*destroy)(jh_extent_hooks *, void *addr, size_t size, bool committed, unsigned arena);
    bool (*commit)(jh_extent_hooks *, void *addr, size_t size, size_t offset, size_t length, unsigned arena);
    bool (*decommit)(jh_extent_hooks *, void *addr, size_t size, size_t offset, size_t length, unsigned arena);
    bool (*purge_lazy)(jh_extent_hooks *, void *addr, size_t size, size_t offset, size_t length, unsigned arena);
    bool (*purge_forced)(jh_extent_hooks *, void *addr, size_t size, size_t offset, size_t length, unsigned arena);
    bool (*split)(jh_extent_hooks *, void *addr, size_t size, size_t size_a, size_t size_b, bool committed, unsigned arena);
    bool (*merge)(jh_extent_hooks *, void *addr_a, size_t size_a, void *addr_b, size_t size_b, bool committed, unsigned arena);
};

/* One jemalloc arena. jemalloc keeps a pointer to `hooks`, so a shard lives as long as its arena. */
typedef struct jh_shard {
    jh_extent_hooks hooks; /* first: a hook finds its shard by it */
    jh_space *space;
    unsigned index;
    atomic_size_t bound;   /* larger extents are refused; jemalloc then asks for the exact size. SIZE_MAX if it bounds itself */
    atomic_uint aligned;   /* allocations for which over-aligned extents pass though opt.retain is off */
    atomic_size_t chunks;  /* bytes of chunks that a jemalloc 4 arena has */
} jh_shard;

extern const jh_extent_hooks jh_extent_hooks_5;

/* ---- chunk_hooks.c ---------------------------------------------------------------------------------------------- */

typedef struct jh_chunk_hooks { /* chunk_hooks_t of jemalloc 4 */
    void *(*alloc)(void *new_addr, size_t size, size_t alignment, bool *zero, bool *commit, unsigned arena);
    bool (*dalloc)(void *chunk, size_t size, bool committed, unsigned arena);
    bool (*commit)(void *chunk, size_t size, size_t offset, size_t length, unsigned arena);
    bool (*decommit)(void *chunk, size_t size, size_t offset, size_t length, unsigned arena);
    bool (*purge)(void *chunk, size_t size, size_t offset, size_t length, unsigned arena);
    bool (*split)(void *chunk, size_t size, size_t size_a, size_t size_b, bool committed, unsigned arena);
    bool (*merge)(void *chunk_a, size_t size_a, void *chunk_b, size_t size_b, bool committed, unsigned arena);
} jh_chunk_hooks;

extern const jh_chunk_hooks jh_chunk_hooks_4;
/* Whose hooks those of the jemalloc arena are from now on; NULL: nobody's, and it gets nothing. */
void jh_chunk_hooks_bind(unsigned arena, jh_shard *shard);
/* Does this thread do nothing that takes up whole chunks for a block? Then of those it commits only the records are needed. */
extern _Thread_local bool jh_this_runs __attribute__((tls_model("initial-exec")));

/* ---- shard.c ---------------------------------------------------------------------------------------------------- */

/* 0 or an error, recorded. */
int jh_shard_start(jh_shard *shard, jh_space *space, const jemhooks_config *config);
/* Makes jemalloc give up every free page it can. */
void jh_shard_purge(const jh_shard *shard);
/* When no block lives. Afterwards no hook runs any more. -EBUSY: jemalloc refuses, since threads are bound to the arena. */
int jh_shard_end(jh_shard *shard);

/* ---- tcache.c --------------------------------------------------------------------------------------------------- */

typedef struct jh_tcache jh_tcache;

struct jh_heap {
    jh_space *space;
    atomic_ullong serial;  /* names this heap in every thread's table; a new one makes all of them look again */
    unsigned slot;         /* its place in those tables          */
    unsigned shards;
    bool clears;           /* zeroes are this library's work, not jemalloc's */
    uint64_t decay;        /* ns after which free pages go, where jemalloc does not see to it; UINT64_MAX: never */
    atomic_ullong aged;    /* when they last went                */
    atomic_uint turn;      /* which shard the next thread gets   */
    jh_tcache *caches;     /* guarded by tcache.c's lock         */
    atomic_uint large;     /* allocations under way that may need an extent beyond the bound */
    jh_shard shard[];
};

/* A heap enters and leaves the threads' tables. -EAGAIN: 4,095 heaps exist. */
int jh_tcache_enter(jh_heap *heap);
void jh_tcache_leave(jh_heap *heap);
/* Ends every thread's cache of this heap; no one may be using it. */
void jh_tcache_end_all(jh_heap *heap);
/* Empties the calling thread's cache of this heap. */
void jh_tcache_flush(jh_heap *heap);

typedef struct jh_thread {
    unsigned size;
    struct jh_thread_entry {
        unsigned long long serial;
        int flags;         /* MALLOCX_ARENA | MALLOCX_TCACHE for this thread and heap */
    } *entry;
    jh_tcache *caches;     /* guarded by tcache.c's lock */
} jh_thread;
/* A pointer's worth of initial-exec storage fits wherever jemalloc's own kilobytes do, and is found without a call. */
extern _Thread_local jh_thread *jh_this_thread __attribute__((tls_model("initial-exec")));

/* The flags for a heap that the calling thread has not used yet. */
int jh_tcache_make(jh_heap *heap);

static inline int jh_tcache_flags(jh_heap *heap) {
    jh_thread *t = jh_this_thread;
    if (t && heap->slot < t->size &&
        t->entry[heap->slot].serial == atomic_load_explicit(&heap->serial, memory_order_relaxed))
        return t->entry[heap->slot].flags;
    return jh_tcache_make(heap);
}

#endif
