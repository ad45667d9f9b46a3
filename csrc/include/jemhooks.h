/* jemhooks.h - RDMA-ready memory from the jemalloc you already have.
 *
 * An *arena* hands out memory that lies in *regions*; a *registrar* registers whole regions with a network stack; any
 * pointer finds its region's keys and 64 bytes of user metadata with one table look-up.
 *
 * Results: functions return 0 or -errno, or a pointer that is NULL on failure; jemhooks_last_error() then holds, for
 * the calling thread, a sentence with the call, the value, the limit and the remedy.
 * Threads: every function may be called from any thread at any time, except that an arena must not be in use while
 * jemhooks_arena_destroy() runs on it. In a forked child every arena made before the fork is frozen: its memory can be
 * read, free() drops the pointer, everything else fails with -ECHILD, but for the inline look-ups, which still answer
 * with the parent's keys.                                               */
#ifndef JEMHOOKS_H
#define JEMHOOKS_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#if defined(JEMHOOKS_BUILD)
#define JEMHOOKS_API __attribute__((visibility("default")))
#else
#define JEMHOOKS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what went wrong ------------------------------------------------------------------------------------------- */

/* What kind of failure the last one on this thread was; the Python face has an exception for each. */
enum jemhooks_error_kind {
    JEMHOOKS_OK = 0,
    JEMHOOKS_ERROR_CONFIG,       /* a wrong argument                                */
    JEMHOOKS_ERROR_LOAD,         /* a library or module cannot be loaded            */
    JEMHOOKS_ERROR_PROVIDER,     /* the memory's provider refused                   */
    JEMHOOKS_ERROR_MEMORY,       /* an allocation cannot be served                  */
    JEMHOOKS_ERROR_REGISTRATION, /* a registrar refused                             */
    JEMHOOKS_ERROR_PIN_LIMIT,    /* a limit on pinned memory or registrations       */
    JEMHOOKS_ERROR_NOT_OURS,     /* an address that lies in no region               */
    JEMHOOKS_ERROR_FORK,         /* an arena from before a fork, used in the child  */
    JEMHOOKS_ERROR_CLOSED,       /* something closed already                        */
    JEMHOOKS_ERROR_BUSY,         /* something still in use                          */
    JEMHOOKS_ERROR_TRANSFER      /* a transfer failed                               */
};

/* The calling thread's last failure; "" and JEMHOOKS_OK before the first. Valid until the thread's next failure. */
JEMHOOKS_API const char *jemhooks_last_error(void);
JEMHOOKS_API int jemhooks_last_error_kind(void);

/* For registrars: what went wrong, which the failing call will report with the region and the arena added; what a module's
 * own functions (jemhooks_fabric_put(), …) report as it is. */
JEMHOOKS_API void jemhooks_set_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* "0.1.0"; and what was chosen when the library was configured, e.g. "allocator=jemalloc fabric=on uring=off". */
JEMHOOKS_API const char *jemhooks_version(void);
JEMHOOKS_API const char *jemhooks_build_config(void);
/* The version of the jemalloc that is loaded, e.g. "5.3.0", or "5.3.0-187-g…" of a build between releases. */
JEMHOOKS_API const char *jemhooks_allocator_version(void);
/* The file that it is in: the program, if that was linked with it statically; "" if that is not known. */
JEMHOOKS_API const char *jemhooks_allocator_file(void);
/* The environment variable that it takes its options from: "MALLOC_CONF", or "JE_MALLOC_CONF" where its functions have the prefix
 * je_; "" if that is no jemalloc. */
JEMHOOKS_API const char *jemhooks_allocator_options(void);

/* ---- regions, keys, look-up ------------------------------------------------------------------------------------ */

typedef struct jemhooks_arena jemhooks_arena;

/* A region: one contiguous range, the unit of registration. Structs are never freed, so a pointer to one may always be
 * read; only `user` is the caller's to write, while he holds a live block of the region. The first 64 bytes are all
 * that a look-up reads; they change under a sequence lock, `generation`, which is odd while they do. */
typedef struct jemhooks_region {
    uint64_t generation;
    uint64_t base;         /* first byte                                                                     */
    uint64_t length;       /* bytes; 0 once unmapped                                                         */
    uint64_t word;         /* bits 0..7: enum jemhooks_state; the rest: how many leases are held              */
    uint64_t lkey, rkey;   /* of the first registrar; meaningful while registered                             */
    uint64_t remote_base;  /* the address peers use for the first byte                                       */
    jemhooks_arena *arena;
    unsigned char user[64];
} __attribute__((aligned(64))) jemhooks_region;

enum jemhooks_state {
    JEMHOOKS_UNMAPPED = 0,
    JEMHOOKS_MAPPED,
    JEMHOOKS_REGISTERING,
    JEMHOOKS_REGISTERED,
    JEMHOOKS_DEREGISTERING
};

typedef struct jemhooks_key {
    uint64_t addr;       /* the remote address: the pointer itself for verbs, an offset for some libfabric providers */
    uint64_t length;     /* bytes from the pointer to the end of its region: all within reach of this key            */
    uint64_t lkey, rkey;
    uint64_t generation; /* of the region; the key is valid as long as the region has this generation                */
} jemhooks_key;

/* The page table of regions: one entry per 2 MiB of address space; an odd entry points to 512 entries of 4 KiB. */
typedef struct jemhooks_pagemap_table {
    uintptr_t *slot;
    uintptr_t slots; /* 0 before the first arena */
} jemhooks_pagemap_table;
JEMHOOKS_API extern jemhooks_pagemap_table jemhooks_pagemap;

/* For the two functions below: the region whose entry covers p, and that need not reach as far as p, or NULL. */
static inline jemhooks_region *jemhooks_region_near(const void *p) {
    uintptr_t a = (uintptr_t)p, i = a >> 21;
    if (i >= __atomic_load_n(&jemhooks_pagemap.slots, __ATOMIC_ACQUIRE)) return NULL;
    uintptr_t s = __atomic_load_n(&jemhooks_pagemap.slot[i], __ATOMIC_ACQUIRE);
    if (__builtin_expect(s & 1, 0)) s = __atomic_load_n((uintptr_t *)(s - 1) + (a >> 12 & 511), __ATOMIC_ACQUIRE);
    return (jemhooks_region *)s;
}

/* The region that holds address p, or NULL: any value of p is allowed. Wait-free; a few nanoseconds. */
static inline jemhooks_region *jemhooks_region_of(const void *p) {
    jemhooks_region *r = jemhooks_region_near(p);
    uintptr_t a = (uintptr_t)p;
    if (!r) return NULL;
    return a - __atomic_load_n(&r->base, __ATOMIC_RELAXED) < __atomic_load_n(&r->length, __ATOMIC_RELAXED) ? r : NULL;
}

/* The key of address p if its region is registered now: 0; -ENOENT: in no region; -EAGAIN: not registered at this
 * moment (jemhooks_get_key() registers it). On failure *key is untouched. Wait-free, sets no error text. */
static inline int jemhooks_lookup(const void *p, jemhooks_key *key) {
    jemhooks_region *r = jemhooks_region_near(p);
    if (!r) return -ENOENT;
    uint64_t g = __atomic_load_n(&r->generation, __ATOMIC_ACQUIRE);
    uint64_t base = __atomic_load_n(&r->base, __ATOMIC_ACQUIRE), length = __atomic_load_n(&r->length, __ATOMIC_ACQUIRE);
    uint64_t word = __atomic_load_n(&r->word, __ATOMIC_ACQUIRE), remote = __atomic_load_n(&r->remote_base, __ATOMIC_ACQUIRE);
    uint64_t lkey = __atomic_load_n(&r->lkey, __ATOMIC_ACQUIRE), rkey = __atomic_load_n(&r->rkey, __ATOMIC_ACQUIRE);
    uint64_t offset = (uintptr_t)p - base;
    if (__atomic_load_n(&r->generation, __ATOMIC_RELAXED) != g || g & 1) return -EAGAIN;
    if (offset >= length) return -ENOENT;
    if ((word & 255) != JEMHOOKS_REGISTERED) return -EAGAIN;
    key->addr = remote + offset;
    key->length = length - offset;
    key->lkey = lkey;
    key->rkey = rkey;
    key->generation = g;
    return 0;
}

/* The key of live address p, registering its region first where the arena's policy is lazy. 0, or: -ENOENT not ours;
 * -EOPNOTSUPP the policy is none; -ECHILD; -EDEADLK called from inside a registrar, for a region that is in work;
 * else the registrar's error. On failure *key is untouched and the region is as it was. */
JEMHOOKS_API int jemhooks_get_key(const void *p, jemhooks_key *key);
/* The same on registrar `rail` (0 is the first) of the arena; -EINVAL beyond the last. */
JEMHOOKS_API int jemhooks_get_rail_key(const void *p, unsigned rail, jemhooks_key *key);
/* n keys for n addresses. Stops at the first failure and returns it; *done (may be NULL) is how many succeeded. */
JEMHOOKS_API int jemhooks_get_keys(size_t n, const uint64_t *addresses, jemhooks_key *keys, size_t *done);
/* jemhooks_region_of() as a function, for callers without the inline. */
JEMHOOKS_API jemhooks_region *jemhooks_find_region(const void *p);
/* The packed key (FI_MR_RAW, UCX) of registrar `rail` at live address p; length 0 where the registrar has none. The
 * bytes live as long as the registration: under a lease until jemhooks_revoke(). */
JEMHOOKS_API int jemhooks_packed_key(const void *p, unsigned rail, const void **bytes, size_t *length);
/* A copy of it. *length is the buffer's, and becomes the key's; -ENOSPC: the buffer is too small, and untouched. */
JEMHOOKS_API int jemhooks_copy_packed_key(const void *p, unsigned rail, void *buffer, size_t *length);

/* A lease keeps the region of p registered until as many jemhooks_release() as leases. Registers where needed; *key may
 * be NULL. A lease keeps memory registered, not allocated. jemhooks_release() without a lease: -EALREADY. */
JEMHOOKS_API int jemhooks_lease(const void *p, jemhooks_key *key);
JEMHOOKS_API int jemhooks_release(const void *p);

/* ---- budgets --------------------------------------------------------------------------------------------------- */

/* Limits on what is registered at a time. Every arena has a budget of its own and every registrar one over all its arenas;
 * one budget may be given to several registrars. When a limit is reached, idle regions are deregistered, the longest idle
 * first; if everything is in use, a key is refused with JEMHOOKS_ERROR_PIN_LIMIT. Thread-safe. A forked child has
 * registered nothing. */
typedef struct jemhooks_budget jemhooks_budget;
#define JEMHOOKS_UNLIMITED UINT64_MAX

typedef struct jemhooks_budget_info {
    size_t size;                      /* sizeof(jemhooks_budget_info), set by the caller              */
    uint64_t pin_limit, max_regions;  /* JEMHOOKS_UNLIMITED: none                                     */
    uint64_t registered, peak;        /* bytes, with what is being registered; twice for two rails    */
    uint64_t regions;
} jemhooks_budget_info;

JEMHOOKS_API int jemhooks_budget_create(uint64_t pin_limit, uint64_t max_regions, jemhooks_budget **budget);
/* One reference more; and one less (NULL is allowed). Arenas and registrars keep their own. */
JEMHOOKS_API void jemhooks_budget_keep(jemhooks_budget *budget);
JEMHOOKS_API void jemhooks_budget_close(jemhooks_budget *budget);
/* New limits, in force at once. Idle regions beyond them are deregistered now; others stay until they are idle. The error
 * of a registrar that fails to deregister is returned; the limits are in force nevertheless. */
JEMHOOKS_API int jemhooks_budget_set(jemhooks_budget *budget, uint64_t pin_limit, uint64_t max_regions);
JEMHOOKS_API int jemhooks_budget_get(jemhooks_budget *budget, jemhooks_budget_info *info);

/* ---- events ---------------------------------------------------------------------------------------------------- */

/* What happens to regions. Release events (on_deregister, on_decommit, on_unmap) come before the registration or the pages go. */
enum jemhooks_event_kind {
    JEMHOOKS_ON_MAP = 1,        /* a region begins                                                                  */
    JEMHOOKS_ON_REGISTER = 2,   /* it has been registered, or could not be deregistered and still is                */
    JEMHOOKS_ON_DEREGISTER = 4, /* its registration is about to end; afterwards pages without blocks are given back */
    JEMHOOKS_ON_DECOMMIT = 8,   /* the allocator gives a part of a region up: no block is in it, and its pages go now,
                                   or when the region is deregistered                                               */
    JEMHOOKS_ON_UNMAP = 16      /* it ends, with its arena                                                          */
};
#define JEMHOOKS_RELEASES (JEMHOOKS_ON_DEREGISTER | JEMHOOKS_ON_DECOMMIT | JEMHOOKS_ON_UNMAP)

typedef struct jemhooks_event {
    size_t size;           /* sizeof(jemhooks_event)      */
    int kind;              /* enum jemhooks_event_kind    */
    uint64_t base, length; /* the range                   */
    jemhooks_arena *arena;
} jemhooks_event;

/* Called on the thread that causes the event, several at once; it must not fork. Told of on_map and on_decommit it runs inside
 * the allocator: it must neither allocate, nor call this library, nor wait for anyone who does. Told of the others it may do both, but a key in
 * a region that is in work fails with -EDEADLK, and so do destroying an arena and unsubscribing. */
typedef void jemhooks_subscriber(void *self, const jemhooks_event *event);
typedef struct jemhooks_subscription jemhooks_subscription;

/* kinds: a sum of enum jemhooks_event_kind; arena NULL: of all arenas. A forked child has no subscriptions. */
JEMHOOKS_API int jemhooks_subscribe(jemhooks_arena *arena, unsigned kinds, jemhooks_subscriber *tell, void *self,
                                    jemhooks_subscription **subscription);
/* When this returns 0, the function runs nowhere any more. NULL is allowed. */
JEMHOOKS_API int jemhooks_unsubscribe(jemhooks_subscription *subscription);

/* From now on, as long as the process lives, the registration caches of "ucx" or "fabric" (libfabric) are told before pages of
 * any arena go, so that they keep no stale registration of them. Call it before the library's first context or domain is made
 * (for UCX, after it is loaded), and again in a forked child. Repeating it does nothing.
 * fabric: replaces libfabric's own memory monitor for the whole process. Registrations of memory in arenas are then cached, of
 * other memory not, which is slower, and safe.
 * 0; -ELIBACC: the library is not there; -EBUSY: too late, another monitor is in use; -EINVAL: an unknown kind, or
 * FI_MR_CACHE_MONITOR=disabled. */
JEMHOOKS_API int jemhooks_notify_cache(const char *kind);

/* ---- registrars ------------------------------------------------------------------------------------------------ */

enum jemhooks_access {
    JEMHOOKS_LOCAL_WRITE = 1, /* the local side's own device may write; local reading is always allowed */
    JEMHOOKS_REMOTE_READ = 2,
    JEMHOOKS_REMOTE_WRITE = 4, /* implies JEMHOOKS_LOCAL_WRITE */
    JEMHOOKS_REMOTE_ATOMIC = 8, /* implies JEMHOOKS_LOCAL_WRITE */
    JEMHOOKS_RELAXED_ORDERING = 16,
    JEMHOOKS_ON_DEMAND = 32
};

/* One registration, filled in by a registrar. */
typedef struct jemhooks_mr {
    uint64_t lkey, rkey;
    uint64_t remote_base;  /* the address peers use for the first byte; preset to the address itself */
    void *handle;          /* the registrar's own                                                    */
    const void *packed;    /* packed key, NULL if none; must live until deregistration               */
    size_t packed_length;
} jemhooks_mr;

typedef struct jemhooks_limits {
    uint64_t max_mr_size; /* bytes of one registration; 0: no limit  */
    uint64_t max_mr;      /* registrations at a time; 0: no limit    */
    uint64_t pin_limit;   /* bytes that may be registered at a time; 0: no limit */
} jemhooks_limits;

/* What a registrar can do. Calls may come from several threads at once, for different regions, always from a thread
 * that called into this library, never from inside an allocator's hook. A registrar may allocate, and may call this
 * library, but a key in a region that it or another thread is just working on fails with -EDEADLK. On failure return -errno, having
 * called jemhooks_set_error() (loadable modules: host->set_error) with what, how much, which limit, which remedy. */
typedef struct jemhooks_registrar_ops {
    size_t size;      /* sizeof(jemhooks_registrar_ops) */
    const char *name;
    int (*register_memory)(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr);
    /* Failing means that the memory is still registered: its region is then kept, registered and mapped. */
    int (*deregister_memory)(void *self, jemhooks_mr *mr);
    void (*limits)(void *self, jemhooks_limits *limits); /* may be NULL: none                            */
    void (*close)(void *self);                           /* may be NULL; after the last registration ended */
    const void *interface;                               /* what else the module offers; may be NULL     */
    int not_in_free;  /* 1: never call it from jemhooks_free() and jemhooks_release(), which may run in finalisers: then
                         regions that may not be idle go with the next registration or trim                     */
    int populates;    /* 1: registering makes every page resident (but for JEMHOOKS_ON_DEMAND); large regions are then
                         populated before, in slices, by several threads                                         */
    int pins;         /* 1: what is registered stays pinned, and cannot be memory that is not pinnable; 2: but for
                         JEMHOOKS_ON_DEMAND                                                                      */
} jemhooks_registrar_ops;

typedef struct jemhooks_registrar jemhooks_registrar;

/* Opens the loadable registrar `kind` ("null", "uring", "fabric", "ucx", "verbs"); config is the struct of its own header
 * (jemhooks_null.h, …) or NULL for defaults. -ENOENT: not built; -ELIBACC: its library cannot be loaded. */
JEMHOOKS_API int jemhooks_registrar_open(const char *kind, const void *config, jemhooks_registrar **registrar);
/* A registrar of the caller's own. `ops` is copied, `ops->name` and `self` must outlive it. */
JEMHOOKS_API int jemhooks_registrar_create(const jemhooks_registrar_ops *ops, void *self, jemhooks_registrar **registrar);
/* Drops the caller's reference; it is closed when the last arena that uses it is gone. NULL is allowed. */
JEMHOOKS_API void jemhooks_registrar_close(jemhooks_registrar *registrar);
/* Its budget, as long as it is open and gets no other one. Until its owner sets limits they are those of the registrar itself (ops->limits). */
JEMHOOKS_API jemhooks_budget *jemhooks_registrar_budget(jemhooks_registrar *registrar);
/* Another one, which may be shared with other registrars. -EBUSY: an arena uses the registrar already. */
JEMHOOKS_API int jemhooks_registrar_set_budget(jemhooks_registrar *registrar, jemhooks_budget *budget);
JEMHOOKS_API const char *jemhooks_registrar_name(const jemhooks_registrar *registrar);
JEMHOOKS_API void *jemhooks_registrar_self(const jemhooks_registrar *registrar);
/* ops->interface if the registrar is of this kind, else NULL. */
JEMHOOKS_API const void *jemhooks_registrar_interface(const jemhooks_registrar *registrar, const char *kind);

/* What a loadable module gets from the library, so that it need not link with it (and with jemalloc). */
#define JEMHOOKS_MODULE_ABI 2
typedef struct jemhooks_host {
    unsigned abi;
    void (*set_error)(const char *format, ...) __attribute__((format(printf, 1, 2)));
    jemhooks_region *(*find_region)(const void *p);
} jemhooks_host;
/* The one symbol a module exports: makes a registrar. 0 or -errno with host->set_error called. */
typedef int jemhooks_module_open(const jemhooks_host *host, const void *config, const jemhooks_registrar_ops **ops,
                                 void **self);
#define JEMHOOKS_MODULE_SYMBOL "jemhooks_registrar_module"

/* ---- providers ------------------------------------------------------------------------------------------------- */

typedef struct jemhooks_provider jemhooks_provider; /* where memory comes from: jemhooks_provider.h, included below */

/* ---- arenas ---------------------------------------------------------------------------------------------------- */

enum jemhooks_policy {
    JEMHOOKS_LAZY = 0, /* a region is registered at the first key that is asked of it */
    JEMHOOKS_EAGER,    /* before the first block in it is handed out                  */
    JEMHOOKS_NONE      /* never                                                       */
};

enum jemhooks_evict {
    JEMHOOKS_EVICT_IDLE = 0, /* a full budget takes only regions without blocks and leases                          */
    JEMHOOKS_EVICT_UNLEASED  /* also regions with live blocks, if they are unleased: for those who lease around every
                                transfer. A key is then valid only under a lease                                    */
};

enum jemhooks_prepare {
    JEMHOOKS_PREPARE_NOTHING = 0,
    JEMHOOKS_PREPARE_AHEAD /* a thread of the arena maps, populates and registers the next region, of region_max bytes, before it
                              is needed, if its budgets have room, and deregisters those that are idle for too long. Not for registrars
                              with not_in_free; it has all signals blocked */
};

#define JEMHOOKS_MAX_RAILS 4
#define JEMHOOKS_DECAY_DEFAULT (-2)
#define JEMHOOKS_FOREVER (-1)
#define JEMHOOKS_DURATIONS 16

typedef struct jemhooks_config {
    size_t size;                     /* sizeof(jemhooks_config)                                                    */
    const char *name;                /* for error texts; copied; NULL: "arena"                                     */
    jemhooks_provider *provider;     /* NULL: anonymous memory                                                     */
    jemhooks_registrar *const *registrars;
    unsigned registrar_count;        /* 0 (only with JEMHOOKS_NONE) to JEMHOOKS_MAX_RAILS; a region is registered
                                        with all of them or with none                                              */
    unsigned access;                 /* enum jemhooks_access flags                                                 */
    int policy;                      /* enum jemhooks_policy                                                       */
    unsigned shards;                 /* jemalloc arenas to spread threads over, 1 to 64                            */
    size_t region_min, region_max;   /* bytes; regions grow from the one to the other, larger blocks get their own.
                                        Multiples of 2 MiB; region_max at most 1 GiB and the registrars' limits     */
    ssize_t dirty_decay_ms;          /* -1 never, 0 at once, JEMHOOKS_DECAY_DEFAULT: jemalloc's own setting        */
    ssize_t muzzy_decay_ms;
    void *user;                      /* the caller's own; see jemhooks_arena_user()                                */
    uint64_t pin_limit;              /* of the arena's own budget; bytes, at least region_min. Regions stay below an eighth
                                        of any pin_limit, as far as region_min allows                              */
    uint64_t max_regions;            /* at least 1                                                                 */
    int64_t idle_ttl_ms;             /* how long idle regions stay registered: JEMHOOKS_FOREVER, or from 0 on. Looked at when
                                        something is registered, and for 0 also when something is freed or released */
    int evict;                       /* enum jemhooks_evict                                                        */
    int prepare;                     /* enum jemhooks_prepare                                                      */
    int zero_on_free;                /* 1: a block's bytes are cleared when it is freed, shrunk or moved, so that a peer with
                                        the key of its region cannot read them. The host must be able to touch the memory */
    int rotate_keys;                 /* 1: a region is deregistered as soon as it is idle, so that its keys end with its
                                        data: idle_ttl_ms is 0, and decay times are, unless they are given; threads
                                        cache no freed blocks. Not for registrars with not_in_free                  */
} jemhooks_config;
#define JEMHOOKS_CONFIG_INIT                                                                                         \
    {sizeof(jemhooks_config), NULL, NULL, NULL, 0, JEMHOOKS_REMOTE_READ | JEMHOOKS_REMOTE_WRITE, JEMHOOKS_LAZY, 1,  \
     (size_t)2 << 20, (size_t)64 << 20, JEMHOOKS_DECAY_DEFAULT, JEMHOOKS_DECAY_DEFAULT, NULL, JEMHOOKS_UNLIMITED,      \
     JEMHOOKS_UNLIMITED, 10000, JEMHOOKS_EVICT_IDLE, JEMHOOKS_PREPARE_NOTHING, 0, 0}

JEMHOOKS_API int jemhooks_arena_create(const jemhooks_config *config, jemhooks_arena **arena);
/* -EBUSY, with nothing changed but emptied thread caches, while blocks are allocated or leases held. If a registrar
 * fails to deregister a region, that region stays mapped and registered for good (never a stale registration), the rest
 * is destroyed, and the registrar's error is returned (-EIO for its -EBUSY). -EDEADLK, nothing done: called from inside a
 * registrar. NULL is allowed. */
JEMHOOKS_API int jemhooks_arena_destroy(jemhooks_arena *arena);
/* The `user` of the arena's config; from any block by jemhooks_region_of(p)->arena. NULL for NULL. */
JEMHOOKS_API void *jemhooks_arena_user(const jemhooks_arena *arena);
/* Its name; "" for NULL. Subscribers may ask, in hooks too. */
JEMHOOKS_API const char *jemhooks_arena_name(const jemhooks_arena *arena);
/* The arena's own budget, as long as the arena lives. */
JEMHOOKS_API jemhooks_budget *jemhooks_arena_budget(jemhooks_arena *arena);

/* Memory. size is 1 to PTRDIFF_MAX bytes; alignment a power of two up to 1 GiB (without one: 8 bytes for sizes up to 8, else
 * 16). NULL on failure: errno and jemhooks_last_error() say why. calloc's memory is zero. */
JEMHOOKS_API void *jemhooks_alloc(jemhooks_arena *arena, size_t size);
JEMHOOKS_API void *jemhooks_calloc(jemhooks_arena *arena, size_t count, size_t size);
JEMHOOKS_API void *jemhooks_aligned_alloc(jemhooks_arena *arena, size_t alignment, size_t size);
JEMHOOKS_API void *jemhooks_aligned_calloc(jemhooks_arena *arena, size_t alignment, size_t count, size_t size);
/* p NULL: allocates. On failure p is untouched; shrinking never fails. p must be of this arena (-ENOENT else). A block that
 * moves keeps no special alignment. */
JEMHOOKS_API void *jemhooks_realloc(jemhooks_arena *arena, void *p, size_t size);
/* Any thread may free; NULL is allowed; an address in no region: -ENOENT, nothing done. */
JEMHOOKS_API int jemhooks_free(void *p);
/* free with the size that was asked for; -EINVAL, nothing done, if the block is smaller. */
JEMHOOKS_API int jemhooks_free_sized(void *p, size_t size);
/* Bytes usable at live block p; 0 where p is not ours. */
JEMHOOKS_API size_t jemhooks_usable_size(const void *p);

/* Empties the calling thread's cache, returns all free pages, deregisters every idle and unleased region and gives its
 * pages back. *released (may be NULL): bytes deregistered. */
JEMHOOKS_API int jemhooks_trim(jemhooks_arena *arena, size_t *released);

/* Returns when what can be made ready ahead of use is ready; at once where nothing is prepared. For warming up. -EDEADLK: called
 * from inside a registrar. */
JEMHOOKS_API int jemhooks_wait_ready(jemhooks_arena *arena);

/* Ends every registration of the arena now, on all its rails, live blocks and leases or not; the next key registers anew. For
 * a resource that is about to go, such as a protection domain. A transfer under way is not waited for, and a lease taken before
 * keeps nothing registered; nothing is registered ahead before something is used again. The first error of a registrar is
 * returned: its region is still registered. -EDEADLK: called from inside a registrar or subscriber; -ECHILD. */
JEMHOOKS_API int jemhooks_revoke(jemhooks_arena *arena);

typedef struct jemhooks_region_info {
    uint64_t base, length, committed; /* bytes; committed: held by jemalloc (in use, dirty or muzzy) */
    uint64_t lkey, rkey, remote_base, generation;
    uint32_t state, leases;
} jemhooks_region_info;
/* Fills in up to *count regions and sets *count to how many there are. A snapshot, region by region. */
JEMHOOKS_API int jemhooks_regions(jemhooks_arena *arena, jemhooks_region_info *info, size_t *count);

typedef struct jemhooks_stats {
    size_t size;                     /* sizeof(jemhooks_stats), set by the caller */
    uint64_t regions, mapped;        /* how many, bytes                            */
    uint64_t committed;              /* bytes held by jemalloc                     */
    uint64_t registered;             /* bytes now registered                       */
    uint64_t registered_peak;
    uint64_t registrations, deregistrations, registration_failures;
    uint64_t active, dirty, muzzy;   /* bytes, jemalloc's own account              */
    uint64_t abandoned;              /* bytes of address space jemalloc lost: 0    */
    uint64_t allocated;              /* bytes in live blocks, those in thread caches included; 0 if jemalloc
                                        was built without statistics               */
    uint64_t hits;                   /* idle regions that came into use again while still registered */
    uint64_t evictions;              /* deregistrations to make room, or after idle_ttl */
    uint64_t retries;                /* registrations tried again after evictions  */
    uint64_t registering_ns;         /* spent in successful registrations          */
    uint64_t durations[JEMHOOKS_DURATIONS]; /* how many of them took less than 1 us, 2 us, 4 us, …; the last: all others */
} jemhooks_stats;
JEMHOOKS_API int jemhooks_get_stats(jemhooks_arena *arena, jemhooks_stats *stats);
/* Regions that stay mapped for good because their registrar failed to deregister them, process-wide. */
JEMHOOKS_API size_t jemhooks_stranded_bytes(void);

#ifdef __cplusplus
}
#endif

#include "jemhooks_provider.h"
#endif
