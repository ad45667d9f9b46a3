/* allocator.h - what arena.c needs of the allocator chosen at configure time: a heap whose memory comes from a space. */
#ifndef JH_ALLOCATOR_H
#define JH_ALLOCATOR_H

#include "../space.h"

typedef struct jh_heap jh_heap;

/* Loads the allocator once, and checks that it can serve the space. 0 or an error, recorded. */
int jh_heap_prepare(jh_space *space);
/* Bytes, and their alignment, of the least that the prepared allocator takes out of a space at a time. */
size_t jh_heap_piece(size_t *alignment);
int jh_heap_create(jh_space *space, const jemhooks_config *config, jh_heap **heap);
/* Ends all thread caches, then the heap, if no block lives: afterwards no hook runs any more. -EBUSY: blocks live, or
 * threads are bound to it; -EIO: it can neither be used nor destroyed. Both recorded. */
int jh_heap_destroy(jh_heap *heap);
/* alignment: a power of two. *region is that of the block. NULL, not recorded. */
void *jh_heap_alloc(jh_heap *heap, size_t size, size_t alignment, bool zero, jemhooks_region **region);
/* Why the calling thread's last allocation was refused, if the allocator would have it so; else NULL. */
const char *jh_heap_refusal(void);
/* Grows or shrinks the block in place to `size` bytes, if that can be done. */
bool jh_heap_resize(jh_heap *heap, void *p, size_t size);
void jh_heap_free(jh_heap *heap, void *p);
size_t jh_heap_usable(const void *p);
/* Gives every free page back to the space; with the calling thread's cache if `flush`. */
void jh_heap_purge(jh_heap *heap, bool flush);
/* Gives back what has been free for longer than the decay times say. */
void jh_heap_age(jh_heap *heap);
/* active, dirty, muzzy, abandoned, allocated */
void jh_heap_stats(jh_heap *heap, jemhooks_stats *stats);

#endif
