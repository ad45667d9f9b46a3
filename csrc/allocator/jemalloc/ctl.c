/* ctl.c - mallctl: which jemalloc this is, what it can do, and its controls by mib.
 * Features are detected by name at run time; version macros can read 0.0.0, and the header need not be the library's.
 * Concurrency: everything is read once, under pthread_once, and constant afterwards.                                */
#include "jemalloc.h"
#include "../../error.h"
#include "../../module_file.h"

#include <stdio.h>
#include <string.h>

#define MIB_DEPTH 7

static const char *const names[JH_CTL_COUNT] = {
    [JH_CTL_PURGE] = "arena.0.purge",
    [JH_CTL_DECAY] = "arena.0.decay",
    [JH_CTL_DESTROY] = "arena.0.destroy",
    [JH_CTL_DIRTY_DECAY] = "arena.0.dirty_decay_ms",
    [JH_CTL_MUZZY_DECAY] = "arena.0.muzzy_decay_ms",
    [JH_CTL_OVERSIZE] = "arena.0.oversize_threshold",
    [JH_CTL_GROW_LIMIT] = "arena.0.retain_grow_limit",
    [JH_CTL_CHUNK_HOOKS] = "arena.0.chunk_hooks",
    [JH_CTL_RESET] = "arena.0.reset",
    [JH_CTL_DECAY_TIME] = "arena.0.decay_time",
    [JH_CTL_DIRTY_MULT] = "arena.0.lg_dirty_mult",
    [JH_CTL_THREADS] = "stats.arenas.0.nthreads",
    [JH_CTL_PACTIVE] = "stats.arenas.0.pactive",
    [JH_CTL_PDIRTY] = "stats.arenas.0.pdirty",
    [JH_CTL_PMUZZY] = "stats.arenas.0.pmuzzy",
    [JH_CTL_ABANDONED] = "stats.arenas.0.abandoned_vm",
    [JH_CTL_SMALL_ALLOCATED] = "stats.arenas.0.small.allocated",
    [JH_CTL_LARGE_ALLOCATED] = "stats.arenas.0.large.allocated",
    [JH_CTL_HUGE_ALLOCATED] = "stats.arenas.0.huge.allocated",
};

#define AS_IS(name) #name
#define REAL_NAME(function) AS_IS(function) /* with the prefix that this jemalloc has, or without */
#define CALLED(function) {REAL_NAME(function), (void *)function}

jh_features jh_jemalloc;
static const struct {
    const char *name;
    void *function;
} called[] = {CALLED(je_mallocx), CALLED(je_dallocx), CALLED(je_sallocx), CALLED(je_nallocx), CALLED(je_xallocx),
              CALLED(je_mallctl), CALLED(je_mallctlnametomib), CALLED(je_mallctlbymib)};
static struct {
    const char *file, *other; /* where they are from; of another file than the first: none, if all is well */
    size_t first, odd;
} from;
static struct {
    size_t mib[MIB_DEPTH];
    size_t depth; /* 0: this jemalloc lacks the control */
    size_t index; /* where in mib the arena's index is  */
} mibs[JH_CTL_COUNT];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static bool exists(const char *name) {
    size_t mib[MIB_DEPTH], depth = MIB_DEPTH;
    return !je_mallctlnametomib(name, mib, &depth);
}

static bool option(const char *name) {
    bool value = false;
    size_t size = sizeof value;
    return !je_mallctl(name, &value, &size, NULL, 0) && value;
}

int64_t jh_ctl_option(const char *name, int64_t otherwise) {
    ssize_t value = otherwise;
    size_t size = sizeof value;
    return je_mallctl(name, &value, &size, NULL, 0) ? otherwise : value;
}

static const char *string_option(const char *name, const char *otherwise) {
    const char *value = otherwise;
    size_t size = sizeof value;
    return je_mallctl(name, &value, &size, NULL, 0) ? otherwise : value;
}

/* That of a release without the commit: "5.3.0", not "5.3.0-0-g54eaed1d8b56b1aa528be3bdd1877e59c56fa90c". */
static void load_version(void) {
    static char text[80];
    const char *all = string_option("version", "unknown"), *commit = strstr(all, "-0-g");
    snprintf(text, sizeof text, "%.*s", (int)(commit ? (size_t)(commit - all) : strlen(all)), all);
    jh_jemalloc.version = text;
}

/* A jemalloc whose functions have a prefix has it in capitals before this, too. */
static void load_options_name(void) {
    static char text[80];
    int prefix = (int)(strlen(REAL_NAME(je_mallocx)) - strlen("mallocx"));
    snprintf(text, sizeof text, "%.*sMALLOC_CONF", prefix, REAL_NAME(je_mallocx));
    for (char *c = text; *c; c++)
        if (*c >= 'a' && *c <= 'z') *c = (char)(*c - 'a' + 'A');
    jh_jemalloc.options = text;
}

/* What jemalloc 4 is like; 0 chunk: it is no jemalloc 4. */
static void load_chunks(void) {
    size_t lg = 0, size = sizeof lg;
    unsigned n = 0;
    jh_jemalloc.decays = true;
    if (exists("arena.0.extent_hooks") || je_mallctl("opt.lg_chunk", &lg, &size, NULL, 0)) return;
    jh_jemalloc.chunk = (size_t)1 << lg;
    jh_jemalloc.recommits = mibs[JH_CTL_RESET].depth && strncmp(jh_jemalloc.version, "4.2.", 4);
    jh_jemalloc.decays = !strcmp(string_option("opt.purge", ""), "decay");
    jh_jemalloc.retain = jh_jemalloc.bounds_growth = true; /* it asks for what it needs, and keeps it */
    size = sizeof n;
    if (je_mallctl("arenas.nlruns", &n, &size, NULL, 0) || !n) return;
    size_t mib[MIB_DEPTH], depth = MIB_DEPTH;
    if (je_mallctlnametomib("arenas.lrun.0.size", mib, &depth)) return;
    mib[2] = n - 1;
    size = sizeof jh_jemalloc.largest_run;
    je_mallctlbymib(mib, depth, &jh_jemalloc.largest_run, &size, NULL, 0);
}

/* With two jemallocs in a process, all that is called must be of one: its pointers mean nothing to the other. */
static void find_files(void) {
    for (size_t i = 0; i < sizeof called / sizeof *called && !from.other; i++) {
        const char *file = jh_file_of(called[i].function);
        if (!file) continue;
        if (!from.file) from.file = file, from.first = i;
        else if (strcmp(file, from.file)) from.other = file, from.odd = i;
    }
}

static void load(void) {
    jh_jemalloc.version = "unknown";
    load_options_name();
    find_files();
    if (from.other) return;
    load_version();
    for (int i = 0; i < JH_CTL_COUNT; i++) {
        mibs[i].depth = MIB_DEPTH;
        mibs[i].index = strncmp(names[i], "stats.", 6) ? 1 : 2;
        if (je_mallctlnametomib(names[i], mibs[i].mib, &mibs[i].depth)) mibs[i].depth = 0;
    }
    jh_jemalloc.retain = option("opt.retain");
    jh_jemalloc.zeroes = exists("experimental.arenas_create_ext");
    jh_jemalloc.metadata_apart = jh_jemalloc.zeroes && option("opt.zero");
    jh_jemalloc.bounds_growth = mibs[JH_CTL_GROW_LIMIT].depth;
    load_chunks();
    jh_growth_start();
    bool detects_use = jh_ctl_option("opt.lg_san_uaf_align", -1) >= 0; /* from 5.3 on, by filling freed blocks */
    bool junk = strcmp(string_option("opt.junk", "false"), "false");
    jh_jemalloc.touches = junk || detects_use || option("opt.zero") || option("config.debug");
}

int jh_ctl_load(void) {
    pthread_once(&once, load);
    if (from.other)
        return jh_fail(JEMHOOKS_ERROR_LOAD, ELIBBAD, "there are two jemallocs in this process: %s is that of %s, and %s that of %s; preload "
                       "and link only one of them", called[from.first].name, from.file, called[from.odd].name, from.other);
    bool hooked = jh_jemalloc.chunk ? mibs[JH_CTL_CHUNK_HOOKS].depth && exists("opt.purge") : exists("arena.0.extent_hooks");
    if (!hooked || !strcmp(jh_jemalloc.version, "5.0.0"))
        return jh_fail(JEMHOOKS_ERROR_LOAD, ENOTSUP, "jemalloc %s cannot be hooked: 5.0.0 grows by its default hooks, 4.0 does not use "
                       "again what its hooks keep, and earlier ones have no such hooks; install jemalloc 5.0.1 or later, or 4.1 to "
                       "4.5", jh_jemalloc.version);
    if (!jh_jemalloc.zeroes && option("opt.zero"))
        return jh_fail(JEMHOOKS_ERROR_CONFIG, ENOTSUP, "jemalloc %s with opt.zero clears memory behind the hooks' back; remove "
                       "zero:true from %s or install jemalloc 5.3", jh_jemalloc.version, jh_jemalloc.options);
    return 0;
}

int jh_ctl_arena(enum jh_ctl ctl, unsigned index, void *old, size_t *old_size, void *new, size_t new_size) {
    if (!mibs[ctl].depth) return -ENOENT;
    size_t mib[MIB_DEPTH];
    memcpy(mib, mibs[ctl].mib, sizeof mib);
    mib[mibs[ctl].index] = index;
    return -je_mallctlbymib(mib, mibs[ctl].depth, old, old_size, new, new_size);
}

size_t jh_ctl_stat(enum jh_ctl ctl, unsigned index) {
    size_t value = 0, size = sizeof value;
    return jh_ctl_arena(ctl, index, &value, &size, NULL, 0) ? 0 : value;
}

void jh_ctl_epoch(void) {
    uint64_t epoch = 1;
    size_t size = sizeof epoch;
    je_mallctl("epoch", &epoch, &size, &epoch, sizeof epoch);
}

const char *jemhooks_allocator_version(void) {
    pthread_once(&once, load);
    return jh_jemalloc.version;
}

const char *jemhooks_allocator_file(void) {
    pthread_once(&once, load);
    return from.file ? from.file : "";
}

const char *jemhooks_allocator_options(void) {
    pthread_once(&once, load);
    return jh_jemalloc.options;
}
