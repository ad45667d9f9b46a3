/* rt.c - the runtime's memory over the allocator that was chosen: arenas of jemhooks, or plain malloc. */
#include "rt.h"

#ifdef RT_WITH_JEMHOOKS
#include <jemhooks.h>

#include <stdio.h>

static jemhooks_registrar *registrar;
static jemhooks_arena *arena;

const char *rt_allocator(void) {
    static char text[128];
    snprintf(text, sizeof text, "jemhooks %s over %s", jemhooks_version(), jemhooks_allocator_version());
    return text;
}

int rt_init(const char *kind) {
    if (jemhooks_registrar_open(kind, NULL, &registrar)) return -1;
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.name = "runtime";
    config.registrars = &registrar;
    config.registrar_count = 1;
    if (!jemhooks_arena_create(&config, &arena)) return 0;
    jemhooks_registrar_close(registrar);
    return -1;
}

int rt_fini(void) {
    if (jemhooks_arena_destroy(arena)) return -1;
    jemhooks_registrar_close(registrar);
    return 0;
}

const char *rt_error(void) {
    return jemhooks_last_error();
}

void *rt_malloc(size_t size) {
    return jemhooks_alloc(arena, size);
}

void rt_free(void *p) {
    jemhooks_free(p);
}

int rt_key_of(const void *p, rt_key *key) {
    jemhooks_key k;
    if (jemhooks_lookup(p, &k) && jemhooks_get_key(p, &k)) return -1; /* the first mostly suffices, and costs nanoseconds */
    *key = (rt_key){k.addr, k.rkey};
    return 0;
}

unsigned long rt_registrations(void) {
    jemhooks_stats stats = {.size = sizeof stats};
    return jemhooks_get_stats(arena, &stats) ? 0 : (unsigned long)stats.registrations;
}

#else
#include <errno.h>
#include <stdlib.h>
#include <string.h>

const char *rt_allocator(void) {
    return "malloc";
}

int rt_init(const char *kind) {
    (void)kind;
    return 0;
}

int rt_fini(void) {
    return 0;
}

const char *rt_error(void) {
    return strerror(errno);
}

void *rt_malloc(size_t size) {
    return malloc(size);
}

void rt_free(void *p) {
    free(p);
}

int rt_key_of(const void *p, rt_key *key) {
    (void)p, (void)key;
    errno = EOPNOTSUPP;
    return -1;
}

unsigned long rt_registrations(void) {
    return 0;
}
#endif
