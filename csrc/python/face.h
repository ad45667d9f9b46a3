/* face.h - what the Python package needs beyond jemhooks.h: addresses as integers, and arenas that count their users. */
#ifndef JH_FACE_H
#define JH_FACE_H

#include "jemhooks.h"

/* An arena with a count of blocks, regions in view and calls in flight, so that Python may close it at any time: it is
 * destroyed when the last of them ends. That may happen in a finaliser, in whatever order a garbage collection frees
 * things; so the ends of uses are C functions that find everything from an address. */
typedef struct jh_face jh_face;

typedef struct jh_face_stats {
    uint64_t current_bytes, current_count, peak_bytes, peak_count, total_bytes, total_count;
} jh_face_stats;

/* 0 with *face, or the error of jemhooks_arena_create(). `deferred`: the arena must not be destroyed in a finaliser, since
 * its registrars are Python's; it is queued for jh_face_next(). `owner`: the id of the object whose memory it is, or 0; it is
 * kept until the arena is gone, and for good if a region is stranded. */
int jh_face_open(jemhooks_config *config, int deferred, uintptr_t owner, jh_face **face);
/* No more uses. 1: it had none, so the caller destroys it, by jh_face_finish(). */
int jh_face_close(jh_face *face);
/* A use: 0, or -ESHUTDOWN if the arena is closed; with `hold`, only if it is closed and no one else uses it. */
int jh_face_enter(jh_face *face, int hold);
/* The end of a use; the last use of a closed arena destroys or queues it. */
void jh_face_leave(jh_face *face);
/* Destroys the closed and unused arena: 0; -EBUSY, -ECHILD: it is still there; another error: gone, with stranded regions. */
int jh_face_finish(jh_face *face);
/* The same later, by jh_face_next(). */
void jh_face_defer(jh_face *face);
/* Takes a face from the queue, to be finished; NULL: it is empty. */
jh_face *jh_face_next(void);
/* Empties the queue: in a forked child, where the arenas are not to be destroyed. */
void jh_face_forget(void);
/* Closes the arena, if nobody has, in a finaliser; the caller will not name the face any more: it goes when its arena has. */
void jh_face_abandon(jh_face *face);
jemhooks_arena *jh_face_arena(jh_face *face);

/* A block is a use. Its address, or 0: failed, with an error recorded and errno set; 1: the arena is closed. */
uintptr_t jh_face_alloc(jh_face *face, size_t size, size_t alignment, int zero);
/* Frees a block, which ends its use. */
void jh_face_free(void *block);
/* Ends the use of a region whose 64 bytes of metadata are at `user`. */
void jh_face_leave_region(void *user);
void jh_face_get_stats(const jh_face *face, jh_face_stats *stats);

int jh_face_key(uintptr_t address, jemhooks_key *key);
int jh_face_rail_key(uintptr_t address, unsigned rail, jemhooks_key *key);
/* rkey << 32 | lkey, registering where needed. UINT64_MAX: failed, recorded, with errno; UINT64_MAX - 1: the keys do not fit
 * into 32 bits each. */
uint64_t jh_face_packed_keys(uintptr_t address);
int jh_face_packed_key(uintptr_t address, unsigned rail, void *buffer, size_t *length);
int jh_face_lease(uintptr_t address, jemhooks_key *key);
int jh_face_unlease(uintptr_t address);
/* Of the region at the address, as of now. -ENOENT; -EAGAIN: it is just changing. *user: its 64 bytes of metadata; *arena:
 * whose it is. */
int jh_face_region(uintptr_t address, jemhooks_region_info *info, uintptr_t *user, uintptr_t *arena);
/* As struct ibv_sge. */
typedef struct jh_face_sge {
    uint64_t addr;
    uint32_t length, lkey;
} jh_face_sge;
/* The scatter list of n ranges of the face's own memory, with local keys of `rail`. *done: how many were filled in. EXDEV: the
 * next lies in another arena or in none; EMSGSIZE: it has no bytes, 4 GiB or more, or reaches beyond its region; EOVERFLOW:
 * its key has more than 32 bits. Negative: the errors of jemhooks_get_rail_key(), recorded. */
int jh_face_sges(jh_face *face, unsigned rail, size_t n, const uint64_t *addresses, const uint64_t *lengths, jh_face_sge *sges,
                 size_t *done);

/* queue.c: a bounded queue of events; in a forked child only good for jh_queue_close(). */
typedef struct jh_queue jh_queue;
typedef struct jh_queue_event {
    uint64_t base, length;
    int kind;
    char arena[64]; /* its name */
} jh_queue_event;
/* Of one arena or (NULL) all; events that come while `room` others wait are lost, and counted. 0; -ENOMEM; or recorded. */
int jh_queue_open(jemhooks_arena *arena, unsigned kinds, size_t room, jh_queue **queue);
int jh_queue_close(jh_queue *queue);
/* Up to `most` events, the oldest first; how many. */
size_t jh_queue_take(jh_queue *queue, jh_queue_event *out, size_t most);
void jh_queue_get_state(jh_queue *queue, size_t *waiting, uint64_t *lost);

/* bench.c: medians over `rounds` rounds, in ns per operation. 0 or -errno. */
/* ns[0..3]: allocate and free `size` bytes by jemhooks, by mallocx with an explicit tcache, by jemhooks_calloc, by malloc. */
int jh_bench_blocks(size_t size, size_t iterations, int rounds, double *ns);
/* Over random addresses in at least `regions` regions of 2 MiB (*made: how many). ns[0..4]: the inline look-up, bare table
 * -> region -> key with bounds check, jemhooks_get_key(), jemhooks_get_keys(), jemhooks_region_of(). */
int jh_bench_lookups(size_t regions, size_t iterations, int rounds, double *ns, size_t *made);
/* ns[0..2]: median, 99.9th percentile and maximum of allocating so many buffers, which are filled, and the 256 last
 * of which live. Of one round. */
int jh_bench_tail(jemhooks_arena *arena, size_t size, size_t buffers, double *ns);

#endif
