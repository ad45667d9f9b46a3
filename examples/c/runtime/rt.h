/* rt.h - a miniature runtime, as far as its memory goes: objects that peers can reach by a key.
 * Which allocator is behind it was chosen when it was configured. Every function may be called from any thread between rt_init()
 * and rt_fini().                                                                                                     */
#ifndef RT_H
#define RT_H

#include <stddef.h>
#include <stdint.h>

typedef struct rt_key {
    uint64_t address, rkey; /* what a peer needs */
} rt_key;

/* "jemhooks 0.1.0 over 5.3.0-…", or "malloc". */
const char *rt_allocator(void);
/* registrar: who registers memory ("fabric", "null", …); 0, or -1 with rt_error(). Plain malloc ignores it. */
int rt_init(const char *registrar);
int rt_fini(void);
const char *rt_error(void);

/* NULL: rt_error(). */
void *rt_malloc(size_t size);
void rt_free(void *p);
/* The key of an object. -1: it has none, as under plain malloc. */
int rt_key_of(const void *p, rt_key *key);
/* How many registrations there have been. */
unsigned long rt_registrations(void);

#endif
