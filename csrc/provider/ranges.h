/* ranges.h - free ranges of memory, from which regions are carved and to which they return. */
#ifndef JH_RANGES_H
#define JH_RANGES_H

#include "jemhooks.h"

#include <stdbool.h>

typedef struct jh_range jh_range;

/* All zero: no ranges. */
typedef struct jh_ranges {
    jh_range *root[2];    /* the free ranges by address, and by length                        */
    jh_range *spare;      /* structs without a range                                          */
    size_t spares, taken; /* how many of them; how many ranges were taken and may come back   */
    size_t bytes;         /* free                                                             */
    bool solid;           /* ranges are neither split nor joined                              */
    void *slabs;
} jh_ranges;

/* Adds a range, and joins it to its neighbours. 0; -EEXIST: it overlaps another; -ENOMEM. What was taken may always come back. */
int jh_ranges_put(jh_ranges *r, const jemhooks_mapping *m);
/* Takes `length` bytes on `alignment` out of the smallest range that has them (with `solid`, all of it), at the lowest address
 * among equals. 0, -ENOMEM: none has. */
int jh_ranges_take(jh_ranges *r, size_t length, size_t alignment, jemhooks_mapping *m);
/* Takes the range that begins at base: 0, or -ENOENT. */
int jh_ranges_take_at(jh_ranges *r, const void *base, jemhooks_mapping *m);
/* How long it is; 0: none begins there. */
size_t jh_ranges_length(const jh_ranges *r, const void *base);
/* The structs; not the memory. */
void jh_ranges_fini(jh_ranges *r);

#endif
