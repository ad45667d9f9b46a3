/* mimalloc.c - a heap is a number of heaps of mimalloc 2, each in a mimalloc arena of its own over memory carved from the space.
 * - mimalloc takes memory in pieces of 32 MiB and keeps its records in them, so all of it is committed as the allocator's own: only
 *   the blocks that live in a region keep it busy. Memory is never given up before the heap ends. The host must be able to touch it,
 *   and a peer that writes outside of the blocks it was given breaks the heap.
 * - A mimalloc heap serves one thread, the one that makes the arena. Any thread may free.
 * - mimalloc never forgets memory that it was given: a range stays in a table when its region goes, for memory that comes to the
 *   same address; the provider is asked to map there. 64 ranges are all there can be in a process.
 * - It takes memory that it was never given before for zero, whatever it is told.
 * Concurrency: the owner allocates, purges and destroys; any thread frees. `lock` guards the table, is held for moments. */
#include "closed.h"
#include "../error.h"
#include "../module_file.h"
#include "../provider/place.h"

#include <mimalloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECE ((size_t)32 << 20) /* its MI_SEGMENT_SIZE */
enum { MOST = 64, NATURAL = 8 }; /* its MI_MAX_ARENAS; blocks are aligned so if nothing is said */

typedef struct range {
    void *base;
    size_t length;
    mi_arena_id_t id;
    bool used; /* by a heap of this process, or of one that it was forked from */
} range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range ranges[MOST];
static unsigned range_count;

/* A thread that made heaps, while it or one of them lives. */
typedef struct owner {
    atomic_uint users;
    atomic_bool ended;
} owner;

static pthread_key_t key;
static _Thread_local owner *me;

struct jh_heap {
    jh_closed closed;
    owner *owner;
    unsigned parts;
    struct part {
        range *range;
        mi_heap_t *heap;
    } part[MOST];
};

static _Thread_local const char *why; /* the last allocation of this thread was refused */

static void unuse(owner *o) {
    if (atomic_fetch_sub(&o->users, 1) == 1) free(o);
}

static void thread_ends(void *o) {
    atomic_store(&((owner *)o)->ended, true);
    me = NULL;
    unuse(o);
}

static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
}

__attribute__((constructor)) static void load(void) {
    pthread_key_create(&key, thread_ends);
    pthread_atfork(NULL, NULL, in_child);
}

int jh_heap_prepare(jh_space *space) {
    return jh_closed_check(space, "mimalloc");
}

size_t jh_heap_piece(size_t *alignment) {
    return *alignment = PIECE;
}

int jh_heap_create(jh_space *space, const jemhooks_config *config, jh_heap **heap) {
    jh_heap *h = calloc(1, sizeof *h);
    (void)config;
    if (!me && (me = calloc(1, sizeof *me))) {
        atomic_store(&me->users, 1);
        pthread_setspecific(key, me);
    }
    if (!h || !me) {
        free(h);
        return jh_fail(JEMHOOKS_ERROR_MEMORY, ENOMEM, "arena '%s': no memory for the heap itself", space->rails.name);
    }
    h->closed.space = space;
    h->owner = me;
    atomic_fetch_add(&me->users, 1);
    *heap = space->heap = h;
    return 0;
}

/* ---- ranges -------------------------------------------------------------------------------------------------------- */

/* Where a range of that length was, and is no more; NULL: nowhere, that is, anywhere will do. */
static void *address_of_old(size_t length) {
    void *base = NULL;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < range_count && !base; i++)
        if (!ranges[i].used && ranges[i].length == length) base = ranges[i].base;
    pthread_mutex_unlock(&lock);
    return base;
}

/* The range in the table, which mimalloc knows from now on if it did not. NULL: it can know no more. */
static range *enter(void *base, size_t length) {
    range *r = NULL;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < range_count && !r; i++)
        if (!ranges[i].used && ranges[i].base == base && ranges[i].length == length) r = &ranges[i];
    if (!r && range_count < MOST) {
        range new = {base, length, 0, false};
        if (mi_manage_os_memory_ex(base, length, true, false, true, -1, true, &new.id)) {
            r = &ranges[range_count++];
            *r = new;
        }
    }
    if (r) r->used = true;
    pthread_mutex_unlock(&lock);
    return r;
}

static void leave(range *r) {
    pthread_mutex_lock(&lock);
    r->used = false;
    pthread_mutex_unlock(&lock);
}

/* Memory for one more mimalloc heap, of `length` bytes. */
static bool grow(jh_heap *heap, size_t length) {
    jh_place_at = address_of_old(length);
    void *p = jh_closed_take(&heap->closed, length, PIECE);
    jh_place_at = NULL;
    if (!p) return false;
    struct part part = {.range = enter(p, length)};
    if (part.range && !(part.heap = mi_heap_new_in_arena(part.range->id))) leave(part.range);
    if (part.heap) {
        heap->part[heap->parts++] = part;
        return true;
    }
    why = "mimalloc has 64 ranges of memory, the most that it can have (it forgets none); use fewer arenas, or a larger region_max";
    jh_closed_give_back(&heap->closed, p, length);
    return false;
}

/* ---- blocks -------------------------------------------------------------------------------------------------------- */

static void *allocate(const jh_heap *heap, unsigned part, size_t size, size_t alignment) {
    mi_heap_t *h = heap->part[part].heap;
    return alignment > NATURAL ? mi_heap_malloc_aligned(h, size, alignment) : mi_heap_malloc(h, size);
}

/* Grows by what such a block needs, or by more: ranges are few, so they double. */
static bool grow_for(jh_heap *heap, size_t size, size_t alignment) {
    size_t records = (size_t)1 << 20, need = (size + alignment + records + PIECE - 1) / PIECE * PIECE;
    size_t most = heap->closed.space->region_max / PIECE * PIECE, length = PIECE << (heap->parts / 2 < 5 ? heap->parts / 2 : 5);
    if (length > most) length = most;
    return (length > need && grow(heap, length)) || grow(heap, need);
}

static void *find(jh_heap *heap, size_t size, size_t alignment) {
    if (heap->owner != me) {
        why = "a mimalloc heap serves only the thread that made the arena; allocate on that thread, or make an arena on this one";
        return NULL;
    }
    if (alignment > PIECE / 2) {
        why = "mimalloc aligns to 16 MiB at most";
        return NULL;
    }
    for (unsigned i = heap->parts; i > 0; i--) {
        void *p = allocate(heap, i - 1, size, alignment);
        if (p) return p;
    }
    if (size > PTRDIFF_MAX / 2 || heap->parts == MOST) return NULL;
    if (!grow_for(heap, size, alignment)) return NULL;
    return allocate(heap, heap->parts - 1, size, alignment);
}

void *jh_heap_alloc(jh_heap *heap, size_t size, size_t alignment, bool zero, jemhooks_region **region) {
    why = NULL;
    void *p = find(heap, size, alignment);
    if (!p) return NULL;
    *region = jh_closed_enter(&heap->closed, p, mi_usable_size(p));
    return zero ? memset(p, 0, size) : p;
}

const char *jh_heap_refusal(void) {
    return why;
}

bool jh_heap_resize(jh_heap *heap, void *p, size_t size) {
    (void)heap;
    return jh_closed_fits(mi_usable_size(p), size);
}

void jh_heap_free(jh_heap *heap, void *p) {
    jh_region *r = jh_closed_region(&heap->closed, p);
    size_t bytes = mi_usable_size(p);
    mi_free(p);
    jh_closed_leave(&heap->closed, r, bytes);
}

size_t jh_heap_usable(const void *p) {
    return mi_usable_size(p);
}

/* ---- the heap as a whole -------------------------------------------------------------------------------------------- */

int jh_heap_destroy(jh_heap *heap) {
    int rc = jh_closed_idle(&heap->closed);
    if (rc) return rc;
    if (heap->owner != me && heap->parts) {
        bool ended = atomic_load(&heap->owner->ended);
        return jh_fail(JEMHOOKS_ERROR_BUSY, ended ? EIO : EBUSY, "arena '%s': mimalloc heaps end on the thread that made the arena%s",
                       heap->closed.space->rails.name, ended ? ", which has ended: its memory stays mapped for good" : "; destroy it there");
    }
    for (unsigned i = 0; i < heap->parts; i++) {
        mi_heap_collect(heap->part[i].heap, true);
        mi_heap_destroy(heap->part[i].heap);
        leave(heap->part[i].range);
    }
    unuse(heap->owner);
    free(heap);
    return 0;
}

void jh_heap_purge(jh_heap *heap, bool flush) {
    (void)flush;
    if (heap->owner != me) return;
    for (unsigned i = 0; i < heap->parts; i++) mi_heap_collect(heap->part[i].heap, true);
}

void jh_heap_age(jh_heap *heap) {
    (void)heap; /* runs on another thread than the owner, and nothing is given up */
}

void jh_heap_stats(jh_heap *heap, jemhooks_stats *stats) {
    jh_closed_stats(&heap->closed, stats);
}

const char *jemhooks_allocator_version(void) {
    static char version[32];
    int v = mi_version();
    snprintf(version, sizeof version, "mimalloc %d.%d.%d", v / 100, v / 10 % 10, v % 10);
    return version;
}

const char *jemhooks_allocator_file(void) {
    const char *file = jh_file_of((const void *)mi_version);
    return file ? file : "";
}

const char *jemhooks_allocator_options(void) {
    return "";
}
