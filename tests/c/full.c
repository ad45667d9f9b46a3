/* full.c - memory that runs out: how much of it can be used, and a file system that gets full. The file system is played by a
 * provider whose pages can only be touched once they are reserved: whoever touches others dies of SIGSEGV, as of SIGBUS in a file.
 *     test_full [case=…] seed=1
 * Concurrency: one thread.                                                                                          */
#include "check.h"
#include "jemhooks_provider.h"

#include <stdio.h>
#include <sys/mman.h>

#define BLOCK (64 * KIB)
#define DISK (32 * MIB)

/* ---- a disk that can be full ------------------------------------------------------------------------------------- */

#define WINDOW (1024 * MIB)

static struct {
    char *base;                          /* WINDOW bytes of address space          */
    size_t at;                           /* where the next mapping goes            */
    size_t mapped;                       /* bytes                                  */
    size_t room;                         /* pages that are left                    */
    size_t refusals;
    bool keeps;                          /* what is unmapped keeps its pages, as in a file */
    unsigned char reserved[WINDOW / PAGE];
} disk;

static int disk_map(void *self, void *tenant, size_t alignment, jemhooks_mapping *m) {
    size_t at = (disk.at + alignment - 1) & ~(alignment - 1);
    (void)self, (void)tenant;
    if (at > WINDOW || m->length > WINDOW - at) return -ENOMEM;
    disk.at = (at + m->length + SLOT - 1) & ~(SLOT - 1);
    disk.mapped += m->length;
    *m = (jemhooks_mapping){disk.base + at, m->length, at, 1};
    return 0;
}

static int disk_give_back(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length) {
    char *base = (char *)m->base + at;
    (void)self, (void)tenant;
    for (size_t i = (size_t)(base - disk.base) / PAGE, end = i + length / PAGE; i < end; i++) {
        disk.room += disk.reserved[i];
        disk.reserved[i] = 0;
    }
    return mprotect(base, length, PROT_NONE) || madvise(base, length, MADV_DONTNEED) ? -errno : 0;
}

static void disk_unmap(void *self, void *tenant, const jemhooks_mapping *m) {
    if (!disk.keeps) disk_give_back(self, tenant, m, 0, m->length);
    disk.mapped -= m->length;
    size_t end = ((size_t)((char *)m->base - disk.base) + m->length + SLOT - 1) & ~(SLOT - 1);
    if (end == disk.at) disk.at = (size_t)((char *)m->base - disk.base); /* what was just refused leaves no trace */
    if (!disk.mapped) disk.at = 0;
}

/* A refused call leaves the pages that there was room for, as in ext4. */
static int disk_reserve(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length) {
    char *base = (char *)m->base + at;
    size_t i = (size_t)(base - disk.base) / PAGE, end = i + length / PAGE;
    (void)self, (void)tenant;
    for (; i < end && (disk.reserved[i] || disk.room); i++) {
        disk.room -= !disk.reserved[i];
        disk.reserved[i] = 1;
    }
    if (i < end) {
        disk.refusals++;
        return -ENOSPC;
    }
    return mprotect(base, length, PROT_READ | PROT_WRITE) ? -errno : 0;
}

static jemhooks_provider *disk_open(size_t bytes) {
    static const jemhooks_provider_ops ops = {.size = sizeof ops, .name = "disk", .map = disk_map, .unmap = disk_unmap,
                                              .give_back = disk_give_back, .reserve = disk_reserve};
    jemhooks_provider *provider;
    if (!disk.base) disk.base = map_aligned(WINDOW, PROT_NONE);
    disk.room = bytes / PAGE;
    disk.refusals = 0;
    MUST(jemhooks_provider_create(&ops, NULL, &provider));
    return provider;
}

static void disk_close(jemhooks_provider *provider, size_t bytes) {
    CHECK("leak", !disk.mapped, "%zu bytes are still mapped", disk.mapped);
    CHECK("leak", disk.room == bytes / PAGE, "%zu of %zu pages came back", disk.room, bytes / PAGE);
    jemhooks_provider_close(provider);
}

/* ---- what must hold when it is full ------------------------------------------------------------------------------ */

enum { MOST = 4096 };
static char *block[MOST];

/* Fills blocks from block[n] on until there is no more memory; how many there are then. */
static size_t fill_up(jemhooks_arena *arena, size_t n) {
    for (; n < MOST && (block[n] = jemhooks_alloc(arena, BLOCK)); n++) fill(block[n], BLOCK, n);
    CHECK("full", n < MOST && errno == ENOMEM && jemhooks_last_error_kind() == JEMHOOKS_ERROR_MEMORY,
          "a full disk gave %zu blocks, then errno %d", n, errno);
    CHECK("remedy", strstr(jemhooks_last_error(), "make room in its file system") && strstr(jemhooks_last_error(), "disk"),
          "the error names no remedy: %s", jemhooks_last_error());
    return n;
}

/* `spare`: a registered region has all of its pages, whoever fills the disk. */
static void check_full(const char *when, jemhooks_arena *arena, size_t n, bool spare) {
    jemhooks_stats before = stats_of(arena);
    for (int i = 0; i < 200; i++) {
        char *p = jemhooks_alloc(arena, (size_t)4096 << i % 9);
        if (p && i % 9 > 4 && !spare) violated("full", "%s, a block of %d bytes can be had", when, 4096 << i % 9);
        MUST(jemhooks_free(p));
    }
    jemhooks_stats after = stats_of(arena);
    CHECK("abandoned", !after.abandoned, "%s, jemalloc lost %zu bytes", when, (size_t)after.abandoned);
    CHECK("bounded", after.mapped <= before.mapped, "%s, refused blocks made %zu mapped bytes of %zu", when, (size_t)after.mapped,
          (size_t)before.mapped);
    CHECK("bounded", after.mapped <= DISK + 16 * MIB, "%s, %zu bytes are mapped over a disk of %zu", when, (size_t)after.mapped,
          (size_t)DISK);
    size_t its = after.active + after.dirty + after.muzzy; /* 5.0 counts what it was refused as active */
    CHECK("account", after.committed == its || (!jemalloc_at_least(5, 1) && after.committed < its),
          "%s, %zu bytes are committed, but jemalloc has %zu", when, (size_t)after.committed, its);
    for (size_t i = 0; i < n; i++)
        if (block[i]) CHECK("content", filled(block[i], BLOCK, BLOCK, i), "%s, block %zu changed", when, i);
}

static jemhooks_arena *disk_arena(jemhooks_provider *provider, jemhooks_registrar *const *registrars, int policy) {
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.provider = provider;
    config.registrars = registrars;
    config.registrar_count = registrars ? 1 : 0;
    config.policy = policy;
    config.access = JEMHOOKS_REMOTE_WRITE;
    config.region_max = 8 * MIB;
    config.dirty_decay_ms = config.muzzy_decay_ms = 0;
    return arena_of(&config);
}

static void free_all(size_t n) {
    for (size_t i = 0; i < n; i++) MUST(jemhooks_free(block[i]));
}

/* ---- full from the start, at growth, and later ------------------------------------------------------------------- */

static void at_creation(void) {
    jemhooks_provider *provider = disk_open(0);
    jemhooks_arena *arena = disk_arena(provider, NULL, JEMHOOKS_NONE);
    size_t n = fill_up(arena, 0);
    CHECK("full", !n, "a disk without a page holds %zu blocks", n);
    check_full("without a page", arena, 0, false);
    disk.room = DISK / PAGE;
    n = fill_up(arena, 0);
    CHECK("goes_on", n * BLOCK > DISK * 3 / 4, "once there was room, %zu blocks fitted", n);
    free_all(n);
    arena_end(arena);
    disk_close(provider, DISK);
}

static void at_growth(void) {
    jemhooks_provider *provider = disk_open(DISK / 2);
    jemhooks_arena *arena = disk_arena(provider, NULL, JEMHOOKS_NONE);
    size_t n = fill_up(arena, 0), more;
    CHECK("full", n * BLOCK > DISK / 2 * 3 / 4, "a disk of %zu bytes holds only %zu blocks", (size_t)DISK / 2, n);
    check_full("full", arena, n, false);
    disk.room += DISK / 2 / PAGE;
    more = fill_up(arena, n);
    CHECK("goes_on", (more - n) * BLOCK > DISK / 2 * 3 / 4, "once there was room, %zu blocks more fitted", more - n);
    check_full("full again", arena, more, false);
    figure("first", (double)n * BLOCK / (DISK / 2));
    figure("both", (double)more * BLOCK / DISK);
    free_all(more);
    MUST(jemhooks_trim(arena, NULL));
    CHECK("leak", disk.room >= (DISK - records()) / PAGE, "%zu of %zu pages were given back", disk.room, (size_t)DISK / PAGE);
    arena_end(arena);
    disk_close(provider, DISK);
}

/* From 5.3.1 on jemalloc rounds blocks of 64 KiB, padded by a page, up to 80 KiB. */
static bool rounds(void) {
    return strcmp(jemhooks_allocator_version(), "5.3.0") && jemalloc_at_least(5, 3);
}

/* Whoever is refused over and over finds the region whole when there is room again. */
static void refused_often(void) {
    jemhooks_provider *provider = disk_open(DISK);
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.provider = provider;
    config.policy = JEMHOOKS_NONE;
    config.region_min = config.region_max = 8 * MIB;
    config.dirty_decay_ms = config.muzzy_decay_ms = 0;
    jemhooks_arena *arena = arena_of(&config);
    block[0] = must_have(jemhooks_alloc(arena, BLOCK), "block");
    fill(block[0], BLOCK, 0);
    size_t room = disk.room, here = 0, n;
    disk.room = 0;
    for (size_t i = 0; i < 3000; i++) {
        char *p = jemhooks_alloc(arena, BLOCK << i % 5);
        if (p) violated("full", "a block of %zu bytes can be had", (size_t)BLOCK << i % 5), jemhooks_free(p);
    }
    disk.room += room; /* and what was given back meanwhile */
    n = fill_up(arena, 1);
    jemhooks_region_info home = region_at(arena, block[0]);
    for (size_t i = 0; i < n; i++) here += (uintptr_t)block[i] - home.base < home.length;
    CHECK("goes_on", here * BLOCK > home.length / 20 * (rounds() ? 12 : 15),
          "a region of %zu bytes holds only %zu blocks after that", (size_t)home.length, here);
    free_all(n);
    arena_end(arena);
    disk_close(provider, DISK);
}

/* What is refused takes no room: neither in a region that there is, nor in one that is not made for it. */
static void refused_whole(void) {
    jemhooks_provider *provider = disk_open(8 * MIB);
    jemhooks_arena *arena = disk_arena(provider, NULL, JEMHOOKS_NONE);
    disk.keeps = true;
    block[0] = must_have(jemhooks_alloc(arena, BLOCK), "block");
    size_t room = disk.room;
    for (int i = 0; i < 20; i++) {
        char *p = jemhooks_alloc(arena, i % 2 ? 6 * MIB : 16 * MIB);
        MUST(jemhooks_free(p));
        MUST(jemhooks_trim(arena, NULL));
        if (!CHECK("room", disk.room == room, "after %zu refusals there is room for %zu pages, %zu before", disk.refusals, disk.room, room))
            break;
    }
    CHECK("setup", disk.refusals >= 10, "only %zu refusals", disk.refusals);
    MUST(jemhooks_free(block[0]));
    disk.keeps = false;
    arena_end(arena);
    disk_close(provider, 8 * MIB);
}

/* A device may have any page of a registered region: what is refused there takes none away. */
static void refused_registered(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    jemhooks_key key;
    jemhooks_provider *provider = config.provider = disk_open(8 * MIB);
    config.registrars = &null;
    config.registrar_count = 1;
    config.access = JEMHOOKS_REMOTE_READ; /* so that registering reserves nothing */
    config.region_min = config.region_max = 8 * MIB;
    config.dirty_decay_ms = config.muzzy_decay_ms = 0;
    jemhooks_arena *arena = arena_of(&config);
    block[0] = must_have(jemhooks_alloc(arena, BLOCK), "block");
    char *freed = must_have(jemhooks_alloc(arena, MIB), "block");
    MUST(jemhooks_get_key(block[0], &key));
    MUST(jemhooks_free(freed));
    MUST(jemhooks_trim(arena, NULL));
    size_t room = disk.room;
    disk.room = 0;
    for (int i = 0; i < 10; i++) CHECK("full", !jemhooks_alloc(arena, MIB + MIB / 2), "there is a block without room for it");
    CHECK("setup", disk.refusals, "nothing was refused");
    CHECK("kept", !disk.room, "%zu pages of a registered region were given back", disk.room);
    disk.room += room;
    MUST(jemhooks_free(block[0]));
    arena_end(arena);
    disk_close(provider, 8 * MIB);
    jemhooks_registrar_close(null);
}

/* Others fill the disk after pages were given back, with and without registered regions. */
static void mid_life(void) {
    for (int registered = 0; registered < 2; registered++) {
        jemhooks_registrar *null = null_open(NULL);
        jemhooks_provider *provider = disk_open(DISK);
        jemhooks_arena *arena = disk_arena(provider, registered ? &null : NULL, registered ? JEMHOOKS_LAZY : JEMHOOKS_NONE);
        size_t n = fill_up(arena, 0), left = 0;
        jemhooks_key key;
        for (int round = 0; round < 3; round++) {
            for (size_t i = 0; i < n; i++) {
                if (i % 4 == 0) left++;
                else if (block[i]) MUST(jemhooks_free(block[i])), block[i] = NULL;
            }
            MUST(jemhooks_trim(arena, NULL));
            size_t stolen = disk.room;
            CHECK("given_back", stolen * PAGE > n * BLOCK / 2, "only %zu pages were given back", stolen);
            disk.room = 0;
            check_full("filled by others", arena, n, registered && round);
            if (registered && !round) CHECK("key", jemhooks_get_key(block[0], &key) < 0, "a region was registered without pages for it");
            CHECK("full", !jemhooks_calloc(arena, 1, 2 * MIB), "there is a block without room for it");
            check_full("filled by others, and refused", arena, n, registered && round);
            disk.room = stolen;
            for (size_t i = 0; i < n; i++)
                if (!block[i] && (block[i] = jemhooks_calloc(arena, 1, BLOCK))) {
                    CHECK("zero", all_zero(block[i], BLOCK), "block %zu holds old bytes", i);
                    fill(block[i], BLOCK, i);
                }
            size_t again = 0;
            for (size_t i = 0; i < n; i++) again += block[i] != NULL;
            CHECK("goes_on", again >= n - n / 10, "of %zu blocks %zu could be had when there was room again", n, again);
            for (size_t i = n - n / 8; registered && !round && i < n; i++) {
                MUST(jemhooks_free(block[i])); /* room for the unused pages of the region */
                block[i] = NULL;
            }
            if (registered && !round) MUST(jemhooks_trim(arena, NULL));
            if (registered && !round && jemhooks_get_key(block[0], &key)) violated("key", "no key: %s", jemhooks_last_error());
        }
        figure("refusals", (double)disk.refusals);
        free_all(n);
        arena_end(arena);
        disk_close(provider, DISK);
        CHECK("errors", !null_stats(null).live && !null_stats(null).errors, "the registrar is left with registrations or errors");
        jemhooks_registrar_close(null);
    }
}

/* Registering needs every page of a region: an eager arena refuses, and lives on. */
static void eager(void) {
    jemhooks_registrar *null = null_open(NULL);
    jemhooks_provider *provider = disk_open(MIB);
    jemhooks_arena *arena = disk_arena(provider, &null, JEMHOOKS_EAGER);
    for (int i = 0; i < 100; i++) {
        char *p = jemhooks_alloc(arena, 1000);
        CHECK("eager", !p && (jemhooks_last_error_kind() == JEMHOOKS_ERROR_REGISTRATION || errno == ENOMEM),
              "a block of a region that cannot be reserved: %p, errno %d: %s", (void *)p, errno, jemhooks_last_error());
    }
    MUST(jemhooks_trim(arena, NULL));
    jemhooks_stats s = stats_of(arena);
    CHECK("bounded", s.mapped <= 16 * MIB && !s.abandoned && !s.active, "%zu bytes are mapped, %zu lost, %zu active", (size_t)s.mapped,
          (size_t)s.abandoned, (size_t)s.active);
    CHECK("eager", !null_stats(null).live, "something was registered");
    disk.room += DISK / PAGE;
    char *p = must_have(jemhooks_alloc(arena, 1000), "block when there is room");
    CHECK("goes_on", null_stats(null).live == 1, "its region is not registered");
    fill(p, 1000, 1);
    MUST(jemhooks_free(p));
    arena_end(arena);
    disk_close(provider, DISK + MIB);
    jemhooks_registrar_close(null);
}

/* ---- how much of a range can be used ----------------------------------------------------------------------------- */

#define RANGE (64 * MIB)

static double usable(size_t size, bool shared) {
    char *base = map_aligned(RANGE, PROT_READ | PROT_WRITE);
    jemhooks_fixed_config fixed = JEMHOOKS_FIXED_CONFIG_INIT;
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    size_t n = 0;
    char *p, *last = NULL;
    fixed.base = base;
    fixed.length = RANGE;
    fixed.shared = shared;
    MUST(jemhooks_provider_fixed(&fixed, &config.provider));
    config.policy = JEMHOOKS_NONE;
    if (shared) config.region_min = config.region_max = RANGE / 2;
    jemhooks_arena *arena = arena_of(&config);
    while ((p = jemhooks_alloc(arena, size))) { /* a list of all of them, in themselves */
        CHECK("span", p >= base && p + size <= base + RANGE, "a block outside the range");
        memcpy(p, &last, sizeof last);
        last = p;
        n++;
    }
    while ((p = last)) {
        memcpy(&last, p, sizeof last);
        MUST(jemhooks_free(p));
    }
    CHECK("abandoned", !stats_of(arena).abandoned, "jemalloc lost %zu bytes", (size_t)stats_of(arena).abandoned);
    arena_end(arena);
    jemhooks_provider_close(config.provider);
    munmap(base, RANGE);
    return (double)(n * size) / RANGE;
}

/* jemalloc pads large blocks by a page, so that 64/68 is the most there can be; from 5.3.1 on it rounds that up to its next size,
 * and 64/80 is. jemalloc 4's records take 13 pages of 512, so that beside them is room for one block of 1 MiB. */
static void share(void) {
    static const struct {
        size_t size;
        double alone, shared;
    } least[] = {{64, 0.99, 0.97}, {4 * KIB, 0.99, 0.97}, {64 * KIB, 0.93, 0.93}, {MIB, 0.97, 0.82}};
    for (size_t i = 0; i < sizeof least / sizeof *least; i++) {
        char name[2][32];
        double alone = usable(least[i].size, false), shared = usable(least[i].size, true);
        double most = records() ? (double[]){0.97, 0.97, 0.9, 0.5}[i] : rounds() && least[i].size >= 64 * KIB ? 0.77 : 1;
        double when_shared = least[i].shared < most ? least[i].shared : records() ? most : most - 0.03;
        CHECK("share", alone >= (least[i].alone < most ? least[i].alone : most), "blocks of %zu bytes fill %.4f of a range",
              least[i].size, alone);
        CHECK("share", shared >= when_shared, "blocks of %zu bytes fill %.4f of a shared range", least[i].size, shared);
        snprintf(name[0], sizeof name[0], "alone_%zu", least[i].size);
        snprintf(name[1], sizeof name[1], "shared_%zu", least[i].size);
        figure(name[0], alone);
        figure(name[1], shared);
    }
}

static const test_case cases[] = {{"at_creation", at_creation}, {"at_growth", at_growth}, {"mid_life", mid_life},
                                  {"refused_often", refused_often}, {"refused_whole", refused_whole},
                                  {"refused_registered", refused_registered},
                                  {"eager", eager},             {"share", share},         {NULL, NULL}};

int main(int argc, char **argv) {
    take_options(argc, argv);
    return run_cases(cases);
}
