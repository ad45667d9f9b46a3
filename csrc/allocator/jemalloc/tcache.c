/* tcache.c - one explicit jemalloc thread cache per thread and heap.
 * The automatic cache would mix arenas: memory freed to it comes back for any of them. An explicit one holds blocks of one
 * heap only. A thread makes its cache at first use and ends it when it exits; a heap ends all of its caches before it is
 * destroyed. jemalloc has 4,095 cache ids; a thread that gets none allocates without. So do all with jemalloc 4, which keeps a list of caches
 * that it corrupts when another thread than their own ends one.
 * Concurrency: `lock` guards the lists and the slots; jemalloc is called under it (and its hooks never take it). Each
 * thread's table is its own.                                                                                        */
#include "jemalloc.h"

#include <stdlib.h>
#include <string.h>

#define SLOTS 4095 /* as many as jemalloc has arenas */

struct jh_tcache {
    jh_heap *heap;
    jh_thread *thread;
    unsigned id;
    jh_tcache *next_of_heap, *next_of_thread;
};

_Thread_local jh_thread *jh_this_thread;
static _Thread_local bool exited; /* this thread's caches are gone for good */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t at_exit_of_thread;
static uint64_t taken[(SLOTS + 63) / 64];
static atomic_ullong serials;

/* Unlinks c from its heap's list, or from its thread's. */
static void unlink_heap(jh_tcache *c) {
    jh_tcache **p = &c->heap->caches;
    while (*p != c) p = &(*p)->next_of_heap;
    *p = c->next_of_heap;
}

static void unlink_thread(jh_tcache *c) {
    jh_tcache **p = &c->thread->caches;
    while (*p != c) p = &(*p)->next_of_thread;
    *p = c->next_of_thread;
}

static void end(jh_tcache *c) {
    jh_growth_hold();
    je_mallctl("tcache.destroy", NULL, NULL, &c->id, sizeof c->id);
    jh_growth_leave();
    free(c);
}

static void thread_exits(void *thread) {
    jh_thread *t = thread;
    exited = true;
    jh_this_thread = NULL;
    pthread_mutex_lock(&lock);
    while (t->caches) {
        jh_tcache *c = t->caches;
        t->caches = c->next_of_thread;
        unlink_heap(c);
        end(c);
    }
    pthread_mutex_unlock(&lock);
    free(t->entry);
    free(t);
}

/* The child's one thread starts anew: earlier heaps are frozen, and their caches with them. */
static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    memset(taken, 0, sizeof taken);
    if (jh_this_thread) jh_this_thread->caches = NULL;
}

__attribute__((constructor)) static void start(void) {
    pthread_key_create(&at_exit_of_thread, thread_exits);
    pthread_atfork(NULL, NULL, in_child);
}

int jh_tcache_enter(jh_heap *heap) {
    int rc = -EAGAIN;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < SLOTS && rc; i++) {
        if (taken[i / 64] >> i % 64 & 1) continue;
        taken[i / 64] |= (uint64_t)1 << i % 64;
        heap->slot = i;
        rc = 0;
    }
    pthread_mutex_unlock(&lock);
    atomic_store(&heap->serial, atomic_fetch_add(&serials, 1) + 1);
    return rc;
}

void jh_tcache_leave(jh_heap *heap) {
    pthread_mutex_lock(&lock);
    taken[heap->slot / 64] &= ~((uint64_t)1 << heap->slot % 64);
    pthread_mutex_unlock(&lock);
}

/* This thread's table with a place for the heap's slot, or NULL. */
static jh_thread *table(unsigned slot) {
    jh_thread *t = jh_this_thread;
    if (exited) return NULL;
    if (!t) {
        if (!(t = calloc(1, sizeof *t))) return NULL;
        if (pthread_setspecific(at_exit_of_thread, t)) {
            free(t);
            return NULL;
        }
        jh_this_thread = t;
    }
    if (slot >= t->size) {
        unsigned size = (slot + 16) & ~15u;
        struct jh_thread_entry *entry = realloc(t->entry, size * sizeof *entry);
        if (!entry) return NULL;
        memset(entry + t->size, 0, (size - t->size) * sizeof *entry);
        t->entry = entry;
        t->size = size;
    }
    return t;
}

int jh_tcache_make(jh_heap *heap) {
    const jh_shard *shard = &heap->shard[atomic_fetch_add(&heap->turn, 1) % heap->shards];
    int flags = MALLOCX_ARENA(shard->index) | MALLOCX_TCACHE_NONE;
    jh_thread *t = table(heap->slot);
    if (!t) return flags;
    struct jh_thread_entry *entry = &t->entry[heap->slot];
    jh_tcache *c = malloc(sizeof *c);
    size_t size = sizeof c->id;
    jh_growth_hold();
    pthread_mutex_lock(&lock);
    entry->serial = atomic_load(&heap->serial);
    entry->flags = flags;
    bool caches = !heap->space->uncached && !jh_jemalloc.chunk;
    if (c && caches && !je_mallctl("tcache.create", &c->id, &size, NULL, 0)) {
        *c = (jh_tcache){heap, t, c->id, heap->caches, t->caches};
        heap->caches = t->caches = c;
        entry->flags = MALLOCX_ARENA(shard->index) | MALLOCX_TCACHE(c->id);
        c = NULL;
    }
    pthread_mutex_unlock(&lock);
    jh_growth_leave();
    free(c);
    return entry->flags;
}

void jh_tcache_end_all(jh_heap *heap) {
    pthread_mutex_lock(&lock);
    while (heap->caches) {
        jh_tcache *c = heap->caches;
        heap->caches = c->next_of_heap;
        unlink_thread(c);
        end(c);
    }
    atomic_store(&heap->serial, atomic_fetch_add(&serials, 1) + 1);
    pthread_mutex_unlock(&lock);
}

void jh_tcache_flush(jh_heap *heap) {
    if (!jh_this_thread) return;
    pthread_mutex_lock(&lock);
    for (jh_tcache *c = jh_this_thread->caches; c; c = c->next_of_thread)
        if (c->heap == heap) je_mallctl("tcache.flush", NULL, NULL, &c->id, sizeof c->id);
    pthread_mutex_unlock(&lock);
}
