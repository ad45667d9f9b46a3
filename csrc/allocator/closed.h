/* closed.h - what allocators share that keep their records in the memory they are given, and do not tell which of it is free: all
 * of that memory is committed as their own, and the blocks that live in a region keep it busy.                          */
#ifndef JH_CLOSED_H
#define JH_CLOSED_H

#include "allocator.h"

typedef struct jh_closed {
    jh_space *space;
    atomic_size_t live; /* bytes of blocks */
} jh_closed;

/* Can the host touch the space's memory, as `allocator` must? 0 or an error, recorded. */
int jh_closed_check(const jh_space *space, const char *allocator);
/* Memory from the space, for the allocator to use as it likes. NULL: none. */
void *jh_closed_take(jh_closed *closed, size_t length, size_t alignment);
void jh_closed_give_back(jh_closed *closed, void *memory, size_t length);
/* A block of that many usable bytes has been allocated; its region. */
jemhooks_region *jh_closed_enter(jh_closed *closed, void *block, size_t bytes);
jh_region *jh_closed_region(const jh_closed *closed, const void *block);
/* Such a block of that region is free again; to be called when the allocator knows so: the region may go at once. */
void jh_closed_leave(jh_closed *closed, jh_region *region, size_t bytes);
/* 0, or -EBUSY, recorded: blocks live. */
int jh_closed_idle(const jh_closed *closed);
/* May a block of `usable` bytes stay where it is when `size` are asked for? Not if that would waste half of it. */
bool jh_closed_fits(size_t usable, size_t size);
void jh_closed_stats(jh_closed *closed, jemhooks_stats *stats);

#endif
