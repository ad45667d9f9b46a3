/* bench.c - the measured loops behind `jemhooks bench`: ours beside the bare things, in one run.
 * Rounds of all rows alternate, so that a noisy machine disturbs all alike; medians are reported.
 * Concurrency: none; each call has its own arena.                                                                   */
#include "face.h"
#include "jemhooks_null.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { MAX_ROUNDS = 101, BATCH = 64, BLOCK_ROWS = 4, LOOKUP_ROWS = 5 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, ascending);
    return v[n / 2];
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* jemalloc's own functions, from the library that jemhooks is linked with; a prefixed build has je_ names. */
static struct {
    void *(*mallocx)(size_t, int);
    void (*dallocx)(void *, int);
    int (*mallctl)(const char *, void *, size_t *, void *, size_t);
} je;

static bool resolve(void *library, const char *prefix) {
    char name[32];
    strcpy(name, prefix);
    *(void **)&je.mallocx = dlsym(library, strcat(strcpy(name, prefix), "mallocx"));
    *(void **)&je.dallocx = dlsym(library, strcat(strcpy(name, prefix), "dallocx"));
    *(void **)&je.mallctl = dlsym(library, strcat(strcpy(name, prefix), "mallctl"));
    return je.mallocx && je.dallocx && je.mallctl;
}

static bool find_jemalloc(void) {
    Dl_info info;
    if (!dladdr((void *)jemhooks_version, &info)) return false;
    void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return library && (resolve(library, "") || resolve(library, "je_"));
}

static void one_round(int row, jemhooks_arena *arena, int flags, size_t size) {
    void *p[BATCH];
    for (int i = 0; i < BATCH; i++) {
        p[i] = row == 0 ? jemhooks_alloc(arena, size) : row == 1 ? je.mallocx(size, flags)
             : row == 2 ? jemhooks_calloc(arena, 1, size) : malloc(size);
        __asm__ volatile("" : : "r"(p[i]) : "memory");
    }
    for (int i = 0; i < BATCH; i++) {
        if (row == 1) je.dallocx(p[i], flags);
        else if (row == 3) free(p[i]);
        else jemhooks_free(p[i]);
    }
}

int jh_bench_blocks(size_t size, size_t iterations, int rounds, double *ns) {
    static double samples[BLOCK_ROWS][MAX_ROUNDS];
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    jemhooks_arena *arena;
    unsigned tcache, index;
    size_t n = sizeof tcache;
    config.policy = JEMHOOKS_NONE;
    if (rounds < 1 || rounds > MAX_ROUNDS || !iterations) return -EINVAL;
    if (!find_jemalloc()) return jemhooks_set_error("no jemalloc is found to compare with"), -ENOENT;
    int rc = jemhooks_arena_create(&config, &arena);
    if (rc) return rc;
    if ((je.mallctl("arenas.create", &index, &n, NULL, 0) && je.mallctl("arenas.extend", &index, &n, NULL, 0)) || /* 5.x, 4.x */
        je.mallctl("tcache.create", &tcache, &n, NULL, 0)) {
        jemhooks_arena_destroy(arena);
        return jemhooks_set_error("jemalloc gives no arena or no thread cache to compare with"), -EAGAIN;
    }
    int flags = (int)((index + 1) << 20) | (int)((tcache + 2) << 8); /* MALLOCX_ARENA | MALLOCX_TCACHE */
    for (int r = 0; r < rounds; r++)
        for (int row = 0; row < BLOCK_ROWS; row++) {
            double t = now();
            for (size_t i = 0; i < iterations; i += BATCH) one_round(row, arena, flags, size);
            samples[row][r] = (now() - t) / (double)((iterations + BATCH - 1) / BATCH * BATCH);
        }
    for (int row = 0; row < BLOCK_ROWS; row++) ns[row] = median(samples[row], rounds);
    je.mallctl("tcache.destroy", NULL, NULL, &tcache, sizeof tcache);
    return jemhooks_arena_destroy(arena);
}

/* ---- look-ups ----------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t base, length, lkey, rkey;
} __attribute__((aligned(64))) bare; /* what the fastest table one could write would keep */

typedef struct {
    jemhooks_arena *arena;
    void **block;
    size_t blocks;
    bare *entry;
    bare **table; /* by address >> 21 */
    uint64_t *address;
    size_t addresses;
    jemhooks_key *key;
} field;

#define TABLE_BYTES ((size_t)1 << 30)

static int plant(field *f, size_t regions, jemhooks_registrar *registrar) {
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.registrars = &registrar;
    config.registrar_count = 1;
    config.region_max = config.region_min;
    int rc = jemhooks_arena_create(&config, &f->arena);
    if (rc) return rc;
    for (; f->blocks < regions; f->blocks++) {
        jemhooks_key key;
        if (!(f->block[f->blocks] = jemhooks_alloc(f->arena, 1792 << 10))) return -ENOMEM;
        if ((rc = jemhooks_get_key(f->block[f->blocks], &key))) return rc;
        const jemhooks_region *r = jemhooks_region_of(f->block[f->blocks]);
        bare *b = &f->entry[f->blocks];
        *b = (bare){r->base, r->length, key.lkey, key.rkey};
        for (uint64_t slot = r->base >> 21; slot <= (r->base + r->length - 1) >> 21; slot++) f->table[slot] = b;
    }
    uint64_t x = 88172645463325252u; /* xorshift; any odd seed will do */
    for (size_t i = 0; i < f->addresses; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        f->address[i] = (uintptr_t)f->block[x % regions] + (x >> 32) % (1792 << 10);
    }
    return 0;
}

static uint64_t look_up(const field *f, int row) {
    uint64_t sum = 0;
    jemhooks_key k;
    switch (row) {
    case 0:
        for (size_t i = 0; i < f->addresses; i++)
            if (!jemhooks_lookup((void *)f->address[i], &k)) sum += k.rkey;
        break;
    case 1:
        for (size_t i = 0; i < f->addresses; i++) {
            const bare *b = f->table[f->address[i] >> 21];
            if (b && f->address[i] - b->base < b->length) sum += b->rkey;
        }
        break;
    case 2:
        for (size_t i = 0; i < f->addresses; i++)
            if (!jemhooks_get_key((void *)f->address[i], &k)) sum += k.rkey;
        break;
    case 3:
        jemhooks_get_keys(f->addresses, f->address, f->key, NULL);
        for (size_t i = 0; i < f->addresses; i++) sum += f->key[i].rkey;
        break;
    default:
        for (size_t i = 0; i < f->addresses; i++) sum += jemhooks_region_of((void *)f->address[i])->rkey;
    }
    return sum;
}

int jh_bench_lookups(size_t regions, size_t iterations, int rounds, double *ns, size_t *made) {
    static double samples[LOOKUP_ROWS][MAX_ROUNDS];
    if (rounds < 1 || rounds > MAX_ROUNDS || !iterations || !regions) return -EINVAL;
    field f = {.addresses = 1 << 16};
    jemhooks_registrar *registrar = NULL;
    int rc = -ENOMEM;
    f.block = calloc(regions, sizeof *f.block);
    f.entry = aligned_alloc(64, regions * sizeof *f.entry);
    f.address = malloc(f.addresses * sizeof *f.address);
    f.key = malloc(f.addresses * sizeof *f.key);
    f.table = (bare **)mmap(NULL, TABLE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f.block && f.entry && f.address && f.key && f.table != MAP_FAILED && !(rc = jemhooks_registrar_open("null", NULL, &registrar)))
        rc = plant(&f, regions, registrar);
    size_t repeats = iterations / f.addresses + 1;
    uint64_t first = rc ? 0 : look_up(&f, 1);
    for (int r = 0; r < rounds && !rc; r++)
        for (int row = 0; row < LOOKUP_ROWS && !rc; row++) {
            double t = now();
            for (size_t i = 0; i < repeats && !rc; i++)
                if (look_up(&f, row) != first) rc = -EPROTO; /* a row that finds other keys measures nothing */
            samples[row][r] = (now() - t) / (double)(repeats * f.addresses);
        }
    for (int row = 0; row < LOOKUP_ROWS && !rc; row++) ns[row] = median(samples[row], rounds);
    *made = f.blocks;
    for (size_t i = 0; i < f.blocks; i++) jemhooks_free(f.block[i]);
    int end = f.arena ? jemhooks_arena_destroy(f.arena) : 0;
    jemhooks_registrar_close(registrar);
    if (f.table != MAP_FAILED) munmap((void *)f.table, TABLE_BYTES);
    free(f.block), free(f.entry), free(f.address), free(f.key);
    return rc ? rc : end;
}

/* ---- the slowest of many fresh buffers --------------------------------------------------------------------------- */

int jh_bench_tail(jemhooks_arena *arena, size_t size, size_t buffers, double *ns) {
    enum { WINDOW = 256 }; /* so many live at a time */
    void *window[WINDOW] = {NULL};
    double *took = malloc(buffers * sizeof *took);
    int rc = took ? 0 : -ENOMEM;
    for (size_t i = 0; i < buffers && !rc; i++) {
        jemhooks_free(window[i % WINDOW]);
        double start = now();
        window[i % WINDOW] = jemhooks_alloc(arena, size);
        took[i] = now() - start;
        if (window[i % WINDOW]) memset(window[i % WINDOW], 1, size); /* as whoever sends it would */
        else rc = -errno;
    }
    for (int i = 0; i < WINDOW; i++) jemhooks_free(window[i]);
    if (!rc) {
        qsort(took, buffers, sizeof *took, ascending);
        ns[0] = took[buffers / 2];
        ns[1] = took[buffers - 1 - buffers / 1000];
        ns[2] = took[buffers - 1];
    }
    free(took);
    return rc;
}
