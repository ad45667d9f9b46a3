/* threads.c - an allocator whose heaps serve one thread says so to the others, which may free; memory that comes and goes is known
 * to it once. Linked with an installed jemhooks, over mimalloc. */
#include <jemhooks.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define SAYS(what) (strstr(jemhooks_last_error(), what) ? 0 : (printf("said: %s\n", jemhooks_last_error()), 1))

static jemhooks_arena *arena;
static int bad;

static void *other(void *p) {
    bad += jemhooks_alloc(arena, 100) != NULL || SAYS("serves only the thread that made the arena");
    bad += !jemhooks_arena_destroy(arena) || SAYS("still allocated");
    bad += jemhooks_free(p) != 0;
    bad += !jemhooks_arena_destroy(arena) || SAYS("destroy it there");
    return NULL;
}

int main(void) {
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.policy = JEMHOOKS_NONE;
    for (int i = 0; i < 200; i++) {
        if (jemhooks_arena_create(&config, &arena)) return puts(jemhooks_last_error()), 1;
        void *p = jemhooks_calloc(arena, 1, 3000000), *q;
        if (!p || ((char *)p)[2999999]) return puts(jemhooks_last_error()), 2;
        memset(p, 1, 3000000);
        bad += jemhooks_aligned_alloc(arena, 32 << 20, 1) != NULL || SAYS("16 MiB at most");
        bad += !(q = jemhooks_aligned_alloc(arena, 16 << 20, 1)) || (size_t)q % (16 << 20) || jemhooks_free(q);
        pthread_t thread;
        pthread_create(&thread, NULL, other, p);
        pthread_join(thread, NULL);
        bad += jemhooks_arena_destroy(arena) != 0;
    }
    return bad ? 3 : 0;
}
