/* pages.h - which pages of a region jemalloc holds, and which may hold old bytes. */
#ifndef JH_PAGES_H
#define JH_PAGES_H

#include "pagemap.h"
#include "provider/provider.h"

#include <pthread.h>

enum { JH_BITMAPS = 4 };

typedef struct jh_pages {
    pthread_mutex_t lock; /* short: its holder clears memory or calls madvise, no more; hooks take it */
    jemhooks_provider *provider;
    void *tenant;         /* of the provider      */
    jemhooks_mapping mapping;
    char *base;
    size_t count;         /* pages of 4 KiB                                           */
    size_t committed;     /* how many pages are committed and not own; may be read unlocked, atomically */
    size_t own;           /* how many are own                                           */
    size_t blocks;        /* bytes of the blocks in own pages, of an allocator that does not tell their pages; read as committed */
    uint64_t *committed_bits; /* jemalloc holds the page: in use, dirty or muzzy          */
    uint64_t *own_bits;       /* of these: jemalloc 4 keeps records of its own in the page, so no block lies there */
    uint64_t *stale_bits;     /* the page may hold old bytes                               */
    uint64_t *promised_bits;  /* jemalloc takes the uncommitted page for zero: if it is stale, it must be cleared at its
                                 next commit                                               */
    uint64_t inline_bits[JH_BITMAPS]; /* all bitmaps of a region of up to 64 pages                 */
} jh_pages;

/* Everything uncommitted; stale unless the mapping reads as zero. 0 or -ENOMEM. Hooks may call it. */
int jh_pages_init(jh_pages *p, jemhooks_provider *provider, void *tenant, const jemhooks_mapping *mapping);
void jh_pages_fini(jh_pages *p);

/* The rest needs `lock` held. Ranges are in pages from base. */
/* Sees to it that these pages can be touched. 0 or -errno: the provider has no room for them. */
int jh_pages_reserve(jh_pages *p, size_t first, size_t n);
/* jemalloc starts to use these pages, which are reserved: clears those of them that are stale and were promised to be zero. Counts by bits, not
 * lengths: pages may be committed already. */
void jh_pages_commit(jh_pages *p, size_t first, size_t n);
/* These pages, which are committed, are for the allocator's own records. */
void jh_pages_own(jh_pages *p, size_t first, size_t n);
/* jemalloc is done with these pages, and takes them for zero: the bytes of those that were committed are old now. */
void jh_pages_decommit(jh_pages *p, size_t first, size_t n);
/* The same, both, of pages that nobody has touched since: they are as fresh or as stale as before, and promised no more. */
void jh_pages_hold(jh_pages *p, size_t first, size_t n, bool hold);
bool jh_pages_all_committed(const jh_pages *p, size_t first, size_t n);
/* Pages that jemalloc gets, and has not committed: does it take them for zero? */
void jh_pages_promise(jh_pages *p, size_t first, size_t n, bool zero);
bool jh_pages_any_stale(const jh_pages *p, size_t first, size_t n);
/* A device may write to any page from now on: the uncommitted ones become stale. */
void jh_pages_mark_uncommitted(jh_pages *p);
/* Gives stale pages of the range back to the provider, or all of the region but the allocator's own pages, if no others are
 * committed (pinning or a huge page may have populated pages never used). What did not go stays stale. */
void jh_pages_give_back(jh_pages *p, size_t first, size_t n);
/* Gives back what a refused reservation of the range may have got; never pages that are committed. */
void jh_pages_unreserve(jh_pages *p, size_t first, size_t n);

/* Bytes that keep the region busy. May be called unlocked. */
static inline size_t jh_pages_busy(const jh_pages *p) {
    return __atomic_load_n(&p->committed, __ATOMIC_RELAXED) * JH_PAGE + __atomic_load_n(&p->blocks, __ATOMIC_RELAXED);
}

#endif
