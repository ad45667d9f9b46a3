/* jemhooks_provider.h - where an arena's memory comes from. Included by jemhooks.h; not by itself.
 *
 * Config NULL: the defaults of the INIT macro. An arena keeps its own reference to its provider.
 * Threads: every function may be called from any thread at any time.                                                */
#ifndef JEMHOOKS_PROVIDER_H
#define JEMHOOKS_PROVIDER_H

#include "jemhooks.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the kinds there are ----------------------------------------------------------------------------------------- */

/* Private anonymous memory. */
typedef struct jemhooks_anonymous_config {
    size_t size;           /* sizeof(jemhooks_anonymous_config)                                        */
    size_t page_size;      /* 0: ordinary pages; 2 MiB or 1 GiB (2097152, 1073741824): hugetlb pages    */
    int transparent_huge;  /* 1: madvise(MADV_HUGEPAGE), the default; 0: MADV_NOHUGEPAGE; ignored for hugetlb */
    int numa_node;         /* bind to this node; -1: the kernel's choice                               */
} jemhooks_anonymous_config;
#define JEMHOOKS_ANONYMOUS_CONFIG_INIT {sizeof(jemhooks_anonymous_config), 0, 1, -1}
JEMHOOKS_API int jemhooks_provider_anonymous(const jemhooks_anonymous_config *config, jemhooks_provider **provider);

typedef struct jemhooks_range {
    void *base;
    size_t length; /* bytes */
} jemhooks_range;

/* The caller's own memory; never given back or unmapped. */
typedef struct jemhooks_fixed_config {
    size_t size;
    void *base;            /* the caller's range, rounded inwards to 4 KiB; it must outlive the arena  */
    size_t length;
    int host_accessible;   /* 0: never read or written by this library or the allocator (device memory) */
    int zeroed;            /* 1: the memory holds only zero bytes                                      */
    const jemhooks_range *ranges; /* instead of base and length: several; copied                           */
    size_t range_count;
    int shared;            /* 0: one arena at a time lives here, each range is one region. 1: any number of arenas; their
                              regions are carved out of the ranges, and return when an arena is destroyed      */
} jemhooks_fixed_config;
#define JEMHOOKS_FIXED_CONFIG_INIT {sizeof(jemhooks_fixed_config), NULL, 0, 1, 0, NULL, 0, 0}
JEMHOOKS_API int jemhooks_provider_fixed(const jemhooks_fixed_config *config, jemhooks_provider **provider);

/* Memory that other processes can map (jemhooks_ipc.h): a memfd for each arena, which cannot be shrunk. */
typedef struct jemhooks_memfd_config {
    size_t size;
    size_t page_size; /* 0: ordinary pages; 2 MiB or 1 GiB: hugetlb pages */
} jemhooks_memfd_config;
#define JEMHOOKS_MEMFD_CONFIG_INIT {sizeof(jemhooks_memfd_config), 0}
JEMHOOKS_API int jemhooks_provider_memfd(const jemhooks_memfd_config *config, jemhooks_provider **provider);

/* Memory in a file: page cache, or persistent memory itself where the file system is mounted with dax. Never more than the file
 * system has room for: a block is refused, where a bare mapping would end in SIGBUS. Other processes can map it.
 * path is a directory: each arena gets a file of its own there that has no name and goes with it (O_TMPFILE).
 * Otherwise it is a file of `length` bytes for all arenas of this provider: a new one, which stays when they are gone; or, with
 * `overwrite`, one that is there, whose contents serve as memory. It is never truncated.
 * Long-term pinning of such memory is refused by the kernel, but on tmpfs: so are arenas with registrars that pin. */
typedef struct jemhooks_file_config {
    size_t size;
    const char *path;
    size_t length;    /* bytes, a multiple of 4 KiB; 0: an existing file's; none for a directory */
    int overwrite;
} jemhooks_file_config;
#define JEMHOOKS_FILE_CONFIG_INIT {sizeof(jemhooks_file_config), NULL, 0, 0}
JEMHOOKS_API int jemhooks_provider_file(const jemhooks_file_config *config, jemhooks_provider **provider);

/* A dax device (/dev/dax0.0), whole. It keeps what was written, and is never given back. */
typedef struct jemhooks_devdax_config {
    size_t size;
    const char *path;
    int shared;       /* as for fixed memory */
} jemhooks_devdax_config;
#define JEMHOOKS_DEVDAX_CONFIG_INIT {sizeof(jemhooks_devdax_config), NULL, 0}
JEMHOOKS_API int jemhooks_provider_devdax(const jemhooks_devdax_config *config, jemhooks_provider **provider);

/* ---- the caller's own -------------------------------------------------------------------------------------------- */

/* A range that a provider has mapped: a region, or room for several. */
typedef struct jemhooks_mapping {
    void *base;
    size_t length;
    uint64_t offset; /* the provider's own, e.g. where it begins in its file            */
    int zero;        /* does it read as zero?                                           */
} jemhooks_mapping;

enum jemhooks_provider_flags {
    JEMHOOKS_NOT_HOST_ACCESSIBLE = 1, /* the CPU must not touch the memory                                          */
    JEMHOOKS_NOT_PINNABLE = 2,        /* the kernel refuses to pin it: no registrars that pin                       */
    JEMHOOKS_NOT_DIVISIBLE = 4        /* without unmap: what map() gave is reused as it was, neither split nor joined */
};

/* map, unmap, give_back and reserve run inside the allocator: system calls at most; no malloc, none of this library's functions,
 * no lock but one that is held only so. Calls may come from several threads at once. Results are 0 or -errno. */
typedef struct jemhooks_provider_ops {
    size_t size;     /* sizeof(jemhooks_provider_ops)                                                                */
    const char *name;
    size_t page;     /* bytes; mappings begin on it and are a multiple of it: a power of two, 4096 at least; 0: 4096  */
    unsigned flags;  /* enum jemhooks_provider_flags                                                                 */
    /* An arena moves in: *tenant (preset to NULL) goes along with its calls; and out. May be NULL. */
    int (*enter)(void *self, const char *arena, void **tenant);
    void (*leave)(void *self, void *tenant);
    /* Maps at least m->length bytes on `alignment`, and fills in *m. It must keep out of the pages of others. */
    int (*map)(void *self, void *tenant, size_t alignment, jemhooks_mapping *m);
    /* NULL: nothing is ever unmapped; what an arena had is kept for the next, whatever its tenant. */
    void (*unmap)(void *self, void *tenant, const jemhooks_mapping *m);
    /* Gives the pages of [at, at + length) back. 0 only if they read as zero now. May be NULL: never. */
    int (*give_back)(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length);
    /* Before pages of [at, at + length) are used: sees to it that there is memory behind them, so that touching them is safe. May
     * be NULL: there always is. */
    int (*reserve)(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length);
    /* Which file the mapping is of, and where it begins there, so that other processes can map it. The descriptor stays the
     * provider's. May be NULL: it cannot be. */
    int (*share)(void *self, void *tenant, const jemhooks_mapping *m, int *fd, uint64_t *offset);
    void (*close)(void *self); /* after the last arena; may be NULL */
} jemhooks_provider_ops;

/* `ops` is copied; `ops->name` and `self` must outlive the provider. Functions that can say more than -errno call
 * jemhooks_set_error(). */
JEMHOOKS_API int jemhooks_provider_create(const jemhooks_provider_ops *ops, void *self, jemhooks_provider **provider);
/* Drops the caller's reference. NULL is allowed. */
JEMHOOKS_API void jemhooks_provider_close(jemhooks_provider *provider);

/* What it can do. */
typedef struct jemhooks_provider_info {
    size_t size;             /* sizeof(jemhooks_provider_info), set by the caller                              */
    const char *name;
    uint64_t page;           /* bytes                                                                          */
    uint64_t total;          /* bytes of all its memory; 0: it maps what is asked of it                        */
    uint64_t free;           /* of those that arenas share, or left by earlier arenas                          */
    int host_accessible, pinnable;
    int gives_back, unmaps;  /* single pages; the regions of an arena that is destroyed                        */
    int divides;             /* 0: each range is one region, for one arena at a time                           */
    int shares;              /* can other processes map it?                                                    */
} jemhooks_provider_info;
JEMHOOKS_API int jemhooks_provider_get_info(jemhooks_provider *provider, jemhooks_provider_info *info);

#ifdef __cplusplus
}
#endif
#endif
