/* pages.c - the account of a region's pages: four bitmaps, one bit for each 4 KiB.
 * A successful decommit promises jemalloc zeroes, so a page that may hold old bytes is *stale* until it is either given
 * back to the kernel (and that succeeded) or cleared when it is committed again. An extent that jemalloc gets without that
 * promise has nothing to clear.
 * Concurrency: `lock` guards everything; `committed` is also read without it, as an atomic. */
#include "pages.h"
#include "fault.h"
#include "pagemap.h"

#include <string.h>
#include <sys/mman.h>

#define WORD 64

/* The bits of word w that lie in [first, end). */
static uint64_t mask(size_t w, size_t first, size_t end) {
    uint64_t m = ~(uint64_t)0;
    if (first > w * WORD) m &= ~(uint64_t)0 << (first - w * WORD);
    if (end < (w + 1) * WORD) m &= ~(uint64_t)0 >> ((w + 1) * WORD - end);
    return m;
}

/* Sets or clears [first, end); how many bits changed. */
static size_t change(uint64_t *bits, size_t first, size_t end, bool set) {
    size_t changed = 0;
    if (first >= end) return 0;
    for (size_t w = first / WORD; w <= (end - 1) / WORD; w++) {
        uint64_t m = mask(w, first, end);
        changed += (size_t)__builtin_popcountll((set ? ~bits[w] : bits[w]) & m);
        bits[w] = set ? bits[w] | m : bits[w] & ~m;
    }
    return changed;
}

/* The first bit of [first, end) that is set (or clear), end if there is none. */
static size_t seek(const uint64_t *bits, size_t first, size_t end, bool set) {
    if (first >= end) return end;
    for (size_t w = first / WORD; w <= (end - 1) / WORD; w++) {
        uint64_t m = (set ? bits[w] : ~bits[w]) & mask(w, first, end);
        if (m) return w * WORD + (size_t)__builtin_ctzll(m);
    }
    return end;
}

static void set_committed(jh_pages *p, size_t n) {
    __atomic_store_n(&p->committed, n, __ATOMIC_RELAXED);
}

int jh_pages_init(jh_pages *p, jemhooks_provider *provider, void *tenant, const jemhooks_mapping *mapping) {
    size_t words = (mapping->length / JH_PAGE + WORD - 1) / WORD;
    p->provider = provider;
    p->tenant = tenant;
    p->mapping = *mapping;
    p->base = mapping->base;
    p->count = mapping->length / JH_PAGE;
    set_committed(p, 0);
    p->own = p->blocks = 0;
    p->committed_bits = p->inline_bits;
    memset(p->inline_bits, 0, sizeof p->inline_bits);
    if (words > 1) {
        p->committed_bits = (uint64_t *)mmap(NULL, JH_BITMAPS * words * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p->committed_bits == MAP_FAILED) return -ENOMEM;
    }
    p->own_bits = p->committed_bits + words;
    p->stale_bits = p->own_bits + words;
    p->promised_bits = p->stale_bits + words;
    if (!mapping->zero) change(p->stale_bits, 0, p->count, true);
    return -pthread_mutex_init(&p->lock, NULL);
}

void jh_pages_fini(jh_pages *p) {
    if (p->committed_bits != p->inline_bits)
        munmap(p->committed_bits, JH_BITMAPS * ((p->count + WORD - 1) / WORD) * sizeof(uint64_t));
    int rc = pthread_mutex_destroy(&p->lock);
    JH_ASSERT(!rc); /* EBUSY: someone still holds it */
}

/* The first run of pages in [*a, end) that are stale and promised to be zero; *a and *b, or false. */
static bool next_to_clear(const jh_pages *p, size_t *a, size_t *b, size_t end) {
    while ((*a = seek(p->stale_bits, *a, end, true)) < end) {
        *b = seek(p->stale_bits, *a, end, false);
        *a = seek(p->promised_bits, *a, *b, true);
        if (*a == *b) continue;
        *b = seek(p->promised_bits, *a, *b, false);
        return true;
    }
    return false;
}

int jh_pages_reserve(jh_pages *p, size_t first, size_t n) {
    const jemhooks_provider_ops *ops = &p->provider->ops;
    if (!ops->reserve || JH_FAULT(reserve_skipped)) return 0;
    return ops->reserve(p->provider->self, p->tenant, &p->mapping, first * JH_PAGE, n * JH_PAGE);
}

/* What is in [first, end) is a block's from now on. */
static void disown(jh_pages *p, size_t first, size_t end) {
    size_t fewer = change(p->own_bits, first, end, false);
    p->own -= fewer;
    set_committed(p, p->committed + fewer);
}

void jh_pages_commit(jh_pages *p, size_t first, size_t n) {
    size_t end = first + n;
    bool may = p->provider->host_accessible || JH_FAULT(touch);
    for (size_t a = first, b; may && !JH_FAULT(commit_keeps_stale) && next_to_clear(p, &a, &b, end); a = b)
        memset(p->base + a * JH_PAGE, 0, (b - a) * JH_PAGE);
    if (!JH_FAULT(commit_stays_stale)) change(p->stale_bits, first, end, false); /* what they hold now is a block's */
    set_committed(p, p->committed + change(p->committed_bits, first, end, true));
    disown(p, first, end);
}

void jh_pages_own(jh_pages *p, size_t first, size_t n) {
    size_t more = change(p->own_bits, first, first + n, true);
    p->own += more;
    set_committed(p, p->committed - more);
}

bool jh_pages_all_committed(const jh_pages *p, size_t first, size_t n) {
    return seek(p->committed_bits, first, first + n, false) == first + n;
}

void jh_pages_decommit(jh_pages *p, size_t first, size_t n) {
    size_t end = first + n;
    for (size_t a = first, b; (a = seek(p->committed_bits, a, end, true)) < end; a = b) {
        b = seek(p->committed_bits, a, end, false);
        change(p->stale_bits, a, b, true);
    }
    disown(p, first, end);
    set_committed(p, p->committed - change(p->committed_bits, first, end, false));
    change(p->promised_bits, first, first + n, true);
}

void jh_pages_hold(jh_pages *p, size_t first, size_t n, bool hold) {
    size_t changed = change(p->committed_bits, first, first + n, hold);
    set_committed(p, hold ? p->committed + changed : p->committed - changed);
}

void jh_pages_promise(jh_pages *p, size_t first, size_t n, bool zero) {
    change(p->promised_bits, first, first + n, zero);
}

bool jh_pages_any_stale(const jh_pages *p, size_t first, size_t n) {
    return seek(p->stale_bits, first, first + n, true) < first + n;
}

void jh_pages_mark_uncommitted(jh_pages *p) {
    for (size_t w = 0; w < (p->count + WORD - 1) / WORD; w++)
        p->stale_bits[w] |= ~p->committed_bits[w] & mask(w, 0, p->count);
}

/* Gives back pages [a, b); did they go? */
static bool given_back(const jh_pages *p, size_t a, size_t b) {
    const jemhooks_provider_ops *ops = &p->provider->ops;
    return !ops->give_back(p->provider->self, p->tenant, &p->mapping, a * JH_PAGE, (b - a) * JH_PAGE);
}

void jh_pages_give_back(jh_pages *p, size_t first, size_t n) {
    if (!p->provider->ops.give_back) return;
    if (!jh_pages_busy(p)) {
        for (size_t a = 0, b; (a = seek(p->own_bits, a, p->count, false)) < p->count; a = b) {
            b = seek(p->own_bits, a, p->count, true);
            if (given_back(p, a, b)) change(p->stale_bits, a, b, false);
        }
        return;
    }
    for (size_t end = first + n, a = first, b; (a = seek(p->stale_bits, a, end, true)) < end; a = b) {
        b = seek(p->stale_bits, a, end, false);
        JH_PAUSE(give_back);
        if (given_back(p, a, b)) change(p->stale_bits, a, b, false);
    }
}

void jh_pages_unreserve(jh_pages *p, size_t first, size_t n) {
    size_t unit = p->provider->page / JH_PAGE;
    if (!p->provider->ops.give_back || JH_FAULT(unreserve_skipped)) return;
    for (size_t end = first + n, a = first, b; (a = seek(p->committed_bits, a, end, false)) < end; a = b) {
        b = seek(p->committed_bits, a, end, true);
        size_t from = (a + unit - 1) / unit * unit, to = b / unit * unit;
        if (from < to && given_back(p, from, to)) change(p->stale_bits, from, to, false);
    }
}
