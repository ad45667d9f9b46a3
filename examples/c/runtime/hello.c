/* hello.c - a program of the runtime's user: allocates objects, asks for their keys.
 *     hello [REGISTRAR]                                                                                               */
#include "rt.h"

#include <stdio.h>
#include <string.h>

#define OBJECTS 1000

static int failed(const char *what) {
    fprintf(stderr, "hello: %s: %s\n", what, rt_error());
    return 1;
}

int main(int argc, char **argv) {
    static void *object[OBJECTS];
    int keys = 0;
    printf("allocator       %s\n", rt_allocator());
    if (rt_init(argc > 1 ? argv[1] : "null")) return failed("rt_init");
    for (int i = 0; i < OBJECTS; i++) {
        rt_key key;
        object[i] = rt_malloc(100 + (size_t)i);
        if (!object[i]) return failed("rt_malloc");
        memset(object[i], i, 100 + (size_t)i);
        keys += !rt_key_of(object[i], &key);
    }
    printf("objects         %d, of which %d have keys\n", OBJECTS, keys);
    printf("registrations   %lu\n", rt_registrations());
    for (int i = 0; i < OBJECTS; i++) rt_free(object[i]);
    return rt_fini() ? failed("rt_fini") : 0;
}
