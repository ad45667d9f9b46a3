/* pagemap.h - address to region; jemhooks_region_of() in the public header is the reader. */
#ifndef JH_PAGEMAP_H
#define JH_PAGEMAP_H

#include "jemhooks.h"

#define JH_PAGE ((size_t)4096)
#define JH_SLOT ((size_t)2 << 20)

/* Reserves the table once. 0 or -errno of mmap. Not for hooks. */
int jh_pagemap_reserve(void);
/* Enters region r at its [base, base + length), both multiples of 4 KiB. *outer is the region in whose midst r lies, or
 * NULL. -EEXIST: r overlaps another region only in part; -ERANGE: beyond the address space covered; -ENOMEM.
 * On failure nothing has changed. Hooks may call it. */
int jh_pagemap_insert(jemhooks_region *r, jemhooks_region **outer);
/* Puts `outer` (may be NULL) wherever r still stands. Hooks may call it. */
void jh_pagemap_remove(jemhooks_region *r, jemhooks_region *outer);

#endif
