/* placement.h - puts the regions of this process side by side. */
#ifndef PLACEMENT_H
#define PLACEMENT_H

#include <stdbool.h>

/* From now on each region starts where the one before it ended, so that extents of different regions are neighbours.
 * False: under a sanitizer, which has an mmap() of its own, that cannot be. */
bool place_side_by_side(void);

#endif
