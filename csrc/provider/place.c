/* place.c - mappings on 2 MiB that take whole 2 MiB of address space; only the asked-for part can be touched, since a huge page
 * across the end of a region would stay in memory when the region is given back.
 * No state: may be used from any thread.                                                                             */
#include "place.h"
#include "../error.h"
#include "../fault.h"
#include "../pagemap.h"

#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

_Thread_local void *jh_place_at;

static size_t rounded(size_t n, size_t unit) {
    return (n + unit - 1) / unit * unit;
}

/* Address space of that length with room to align it, or without where it was asked for. *span: its length. NULL: none. */
static char *reserve(size_t length, size_t alignment, size_t *span) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (jh_place_at && !((uintptr_t)jh_place_at % alignment)) {
        char *there = mmap(jh_place_at, *span = length, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
        if (there == jh_place_at) return there;
        if (there != MAP_FAILED) munmap(there, length); /* before Linux 4.17 an address is a wish */
    }
    char *room = mmap(NULL, *span = length + alignment, PROT_NONE, flags, -1, 0);
    return room == MAP_FAILED ? NULL : room;
}

void *jh_place(size_t length, size_t alignment, int flags, int fd, uint64_t offset) {
    if (alignment < JH_SLOT) alignment = JH_SLOT;
    size_t span = rounded(length, JH_SLOT);
    if (span < length || span + alignment < span) {
        errno = ENOMEM;
        return NULL;
    }
    if (JH_FAULT(alignment_small)) alignment = 2 * JH_PAGE;
    /* Reserve with room to align, then put the real mapping on the aligned part: a hugetlb mapping cannot be trimmed
     * below its page, and one that fails must fail here, not at the first touch. */
    size_t reserved;
    char *room = reserve(span, alignment, &reserved);
    if (!room) return NULL;
    char *base = (char *)rounded((uintptr_t)room, alignment);
    if (JH_FAULT(alignment_small) && !((uintptr_t)base % JH_SLOT)) base += JH_PAGE;
    if (mmap(base, length, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, (off_t)offset) == MAP_FAILED) {
        int err = errno;
        munmap(room, reserved);
        errno = err;
        return NULL;
    }
    if (base > room) munmap(room, (size_t)(base - room));
    if (room + reserved > base + span) munmap(base + span, (size_t)(room + reserved - base) - span);
    return base;
}

void jh_displace(void *base, size_t length) {
    munmap(base, rounded(length, JH_SLOT));
}

int jh_check_huge(const char *what, size_t page_size) {
    char path[80];
    if (!page_size) return 0;
    if (page_size != (size_t)2 << 20 && page_size != (size_t)1 << 30)
        return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "%s: page_size %zu is not one of 0 (ordinary pages), 2097152 and 1073741824 "
                       "bytes", what, page_size);
    snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-%zukB", page_size >> 10);
    if (!access(path, F_OK)) return 0;
    return jh_fail(JEMHOOKS_ERROR_PROVIDER, EOPNOTSUPP, "%s: this machine has no huge pages of %zu bytes; use page_size 2097152 or 0",
                   what, page_size);
}

unsigned jh_huge_flags(size_t page_size) {
    return (unsigned)__builtin_ctzl(page_size) << 26; /* MAP_HUGE_SHIFT and MFD_HUGE_SHIFT */
}
