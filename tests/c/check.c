/* check.c - see check.h.
 * Concurrency: `lock` guards the table of violated reasons and the figures; all else is the caller's own. */
#include "check.h"

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define REASONS 64
#define PRINTED_OF_EACH 3

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    const char *reason;
    unsigned long count;
} reasons[REASONS];
static char figures[2048];
static int arguments;
static char **argument;

/* ---- programs, cases, options ------------------------------------------------------------------------------------ */

const char *option_text(const char *name, const char *otherwise) {
    size_t n = strlen(name);
    for (int i = 1; i < arguments; i++)
        if (!strncmp(argument[i], name, n) && argument[i][n] == '=') return argument[i] + n + 1;
    return otherwise;
}

long option(const char *name, long otherwise) {
    const char *text = option_text(name, NULL);
    return text ? strtol(text, NULL, 0) : otherwise;
}

void figure(const char *name, double value) {
    pthread_mutex_lock(&lock);
    size_t used = strlen(figures);
    snprintf(figures + used, sizeof figures - used, " %s=%.10g", name, value);
    pthread_mutex_unlock(&lock);
}

void violated(const char *reason, const char *format, ...) {
    va_list args;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < REASONS - 1 && reasons[i].reason && strcmp(reasons[i].reason, reason)) i++;
    reasons[i].reason = reason;
    if (reasons[i].count++ < PRINTED_OF_EACH) {
        va_start(args, format);
        printf("VIOLATED %s: ", reason);
        vprintf(format, args);
        printf("\n");
        fflush(stdout);
        va_end(args);
    }
    pthread_mutex_unlock(&lock);
}

bool anything_violated(void) {
    return reasons[0].reason != NULL;
}

void must(int rc, const char *call, const char *file, int line) {
    if (!rc) return;
    violated("setup", "%s:%d: %s gave %d: %s", file, line, call, rc, jemhooks_last_error());
    exit(1);
}

void *must_have(void *p, const char *what) {
    if (p && p != MAP_FAILED) return p;
    violated("setup", "no %s: %s", what, *jemhooks_last_error() ? jemhooks_last_error() : strerror(errno));
    exit(1);
}

static int verdict(const char *program) {
    const char *name = strrchr(program, '/');
    int bad = 0;
    printf("%s:%s", name ? name + 1 : program, figures);
    for (; bad < REASONS && reasons[bad].reason; bad++)
        printf(" %s%s x%lu", bad ? "" : "VIOLATED ", reasons[bad].reason, reasons[bad].count);
    printf("%s (jemalloc %s)\n", bad ? "" : " ok", jemhooks_allocator_version());
    return bad != 0;
}

void take_options(int argc, char **argv) {
    arguments = argc;
    argument = argv;
}

int run_cases(const test_case *cases) {
    const char *only = option_text("case", NULL);
    int ran = 0;
    for (; cases->name; cases++) {
        if (only && strcmp(only, cases->name)) continue;
        cases->run();
        ran++;
    }
    CHECK("setup", ran, "there is no case '%s'", only);
    figure("cases", ran);
    return verdict(argument[0]);
}

/* ---- random numbers and patterns --------------------------------------------------------------------------------- */

uint64_t roll(dice *d) { /* splitmix64 */
    uint64_t z = d->state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

size_t roll_below(dice *d, size_t n) {
    return (size_t)(roll(d) % n);
}

static uint64_t word_at(uint64_t tag, size_t at) {
    return (tag + at) * 0x9e3779b97f4a7c15 | 0x0101010101010101;
}

static size_t stride(size_t size) {
    return size <= 16 * KIB ? 8 : 1024;
}

void fill(void *p, size_t size, uint64_t tag) {
    for (size_t at = 0; at < size; at += stride(size)) {
        uint64_t word = word_at(tag, at);
        memcpy((char *)p + at, &word, size - at < 8 ? size - at : 8);
    }
}

bool filled(const void *p, size_t size, size_t keep, uint64_t tag) {
    for (size_t at = 0; at < keep; at += stride(size)) {
        uint64_t word = word_at(tag, at);
        if (memcmp((const char *)p + at, &word, keep - at < 8 ? keep - at : 8)) return false;
    }
    return true;
}

bool all_zero(const void *p, size_t size) {
    const char *bytes = p;
    return !size || (!bytes[0] && !memcmp(bytes, bytes + 1, size - 1));
}

/* ---- the kernel's view ------------------------------------------------------------------------------------------- */

long status_kib(const char *line) {
    FILE *f = must_have(fopen("/proc/self/status", "r"), "/proc/self/status");
    char text[256];
    long value = -1;
    size_t n = strlen(line);
    while (value < 0 && fgets(text, sizeof text, f))
        if (!strncmp(text, line, n) && text[n] == ':') value = strtol(text + n + 1, NULL, 10);
    fclose(f);
    return value;
}

long count_mappings(void) {
    FILE *f = must_have(fopen("/proc/self/maps", "r"), "/proc/self/maps");
    long lines = 0;
    for (int c; (c = getc(f)) != EOF;) lines += c == '\n';
    fclose(f);
    return lines;
}

long count_files(void) {
    DIR *d = must_have(opendir("/proc/self/fd"), "/proc/self/fd");
    long n = 0;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

size_t resident_pages(const void *base, size_t length) {
    unsigned char *pages = must_have(malloc(length / PAGE), "table of pages");
    size_t n = 0;
    if (mincore((void *)(uintptr_t)base, length, pages)) violated("setup", "mincore: %s", strerror(errno));
    else
        for (size_t i = 0; i < length / PAGE; i++) n += pages[i] & 1;
    free(pages);
    return n;
}

bool is_mapped(const void *address) {
    unsigned char page;
    return !mincore((void *)((uintptr_t)address & ~(PAGE - 1)), PAGE, &page);
}

void *map_aligned(size_t length, int protection) {
    char *room = must_have(mmap(NULL, length + SLOT, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), "memory");
    char *base = (char *)(((uintptr_t)room + SLOT - 1) & ~(SLOT - 1));
    if (base > room) munmap(room, (size_t)(base - room));
    munmap(base + length, (size_t)(room + SLOT - base));
    return base;
}

void check_pinned(const char *when, size_t bytes) {
    struct timespec start, now;
    static atomic_bool impatient;
    clock_gettime(CLOCK_MONOTONIC, &start);
    long pinned = status_kib("VmPin");
    for (now = start; pinned != (long)(bytes / KIB) && now.tv_sec < start.tv_sec + 3 && !atomic_load(&impatient);) {
        pinned = status_kib("VmPin");
        clock_gettime(CLOCK_MONOTONIC, &now);
    }
    if (!CHECK("pinned", pinned == (long)(bytes / KIB), "%s %ld KiB are pinned, not %zu", when, pinned, bytes / KIB))
        atomic_store(&impatient, true);
}

void in_child(const char *what, void (*run)(void)) {
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        reasons[0].reason = NULL; /* the parent's are not the child's */
        alarm((unsigned)option("alarm", 60));
        run();
        fflush(stdout);
        _exit(anything_violated());
    }
    if (child < 0 || waitpid(child, &status, 0) != child) violated("setup", "fork or waitpid: %s", strerror(errno));
    else if (WIFSIGNALED(status))
        violated("child", "%s: it ended by signal %d (%s)", what, WTERMSIG(status), strsignal(WTERMSIG(status)));
    else CHECK("child", !WEXITSTATUS(status), "%s: exit status %d", what, WEXITSTATUS(status));
}

/* ---- the library's view ------------------------------------------------------------------------------------------ */

bool jemalloc_at_least(int major, int minor) {
    int have_major = 0, have_minor = 0;
    sscanf(jemhooks_allocator_version(), "%d.%d", &have_major, &have_minor);
    return !have_major || have_major > major || (have_major == major && have_minor >= minor);
}

size_t records(void) {
    return jemalloc_at_least(5, 0) ? 0 : 13 * PAGE;
}

size_t beside_records(uintptr_t *at, uintptr_t stop) {
    uintptr_t slot = *at & ~(SLOT - 1), end = records() ? slot + SLOT : stop;
    if (*at - slot < records()) *at = slot + records();
    if (end > stop) end = stop;
    return *at < end ? end - *at : 0;
}

jemhooks_registrar *null_open(const jemhooks_null_config *config) {
    jemhooks_registrar *registrar;
    MUST(jemhooks_registrar_open("null", config, &registrar));
    return registrar;
}

jemhooks_null_stats null_stats(jemhooks_registrar *registrar) {
    jemhooks_null_stats stats = {.size = sizeof stats};
    MUST(jemhooks_null_get_stats(registrar, &stats));
    return stats;
}

jemhooks_stats stats_of(jemhooks_arena *arena) {
    jemhooks_stats stats = {.size = sizeof stats};
    MUST(jemhooks_get_stats(arena, &stats));
    return stats;
}

jemhooks_region_info *regions_of(jemhooks_arena *arena, size_t *count) {
    *count = 0;
    MUST(jemhooks_regions(arena, NULL, count));
    size_t room = *count + 64; /* others may be adding some */
    jemhooks_region_info *info = must_have(calloc(room, sizeof *info), "table of regions");
    *count = room;
    MUST(jemhooks_regions(arena, info, count));
    if (*count > room) *count = room;
    return info;
}

jemhooks_region_info region_at(jemhooks_arena *arena, const void *p) {
    size_t count;
    jemhooks_region_info *r = regions_of(arena, &count), found = {.base = 0};
    for (size_t i = 0; i < count; i++)
        if ((uintptr_t)p - r[i].base < r[i].length) found = r[i];
    free(r);
    CHECK("setup", found.base, "%p is in no region of its arena", p);
    return found;
}

jemhooks_arena *arena_of(const jemhooks_config *config) {
    jemhooks_arena *arena;
    MUST(jemhooks_arena_create(config, &arena));
    return arena;
}

jemhooks_arena *arena_on(jemhooks_provider *provider, jemhooks_registrar *const *registrars, unsigned count) {
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.provider = provider;
    config.registrars = registrars;
    config.registrar_count = count;
    config.policy = count ? JEMHOOKS_LAZY : JEMHOOKS_NONE;
    config.dirty_decay_ms = config.muzzy_decay_ms = 0;
    return arena_of(&config);
}

void arena_end(jemhooks_arena *arena) {
    MUST(jemhooks_arena_destroy(arena));
}

jemhooks_provider *fixed_range(void *base, size_t length, bool host_accessible, bool zeroed) {
    jemhooks_fixed_config config = JEMHOOKS_FIXED_CONFIG_INIT;
    jemhooks_provider *provider;
    config.base = base;
    config.length = length;
    config.host_accessible = host_accessible;
    config.zeroed = zeroed;
    MUST(jemhooks_provider_fixed(&config, &provider));
    return provider;
}

void check_arena(jemhooks_arena *arena, size_t region_max, size_t largest_block, size_t *registered) {
    jemhooks_stats s = stats_of(arena);
    size_t count, mapped = 0, committed = 0, mine = 0;
    jemhooks_region_info *r = regions_of(arena, &count);
    size_t held = s.active + s.dirty + s.muzzy; /* not so with jemalloc 4: it commits large blocks to the end of their last chunk, and so on */
    CHECK("account", s.committed == held || !jemalloc_at_least(5, 0),
          "%zu bytes committed, but jemalloc holds %zu (active %zu, dirty %zu, muzzy %zu)", (size_t)s.committed,
          held, (size_t)s.active, (size_t)s.dirty, (size_t)s.muzzy);
    CHECK("abandoned", !s.abandoned, "jemalloc lost %zu bytes of address space", (size_t)s.abandoned);
    for (size_t i = 0; i < count; i++) {
        CHECK("alignment", !(r[i].base % SLOT), "a region starts at %#zx, not on 2 MiB", (size_t)r[i].base);
        CHECK("growth", r[i].length <= region_max || r[i].length <= largest_block,
              "a region of %zu bytes, with region_max %zu and no block above %zu", (size_t)r[i].length, region_max,
              largest_block);
        mapped += r[i].length;
        committed += r[i].committed;
        if (r[i].state == JEMHOOKS_REGISTERED) {
            mine++;
            *registered += 1;
        } else {
            CHECK("state", r[i].state == JEMHOOKS_MAPPED, "a region at rest is in state %u", r[i].state);
        }
    }
    CHECK("sums", count == s.regions && mapped == s.mapped && committed == s.committed,
          "statistics say %zu regions, %zu mapped, %zu committed; the regions themselves %zu, %zu, %zu",
          (size_t)s.regions, (size_t)s.mapped, (size_t)s.committed, count, mapped, committed);
    CHECK("sums", s.registrations - s.deregistrations == mine,
          "%zu registrations less %zu deregistrations, but %zu regions are registered", (size_t)s.registrations,
          (size_t)s.deregistrations, mine);
    free(r);
}

void check_idle(jemhooks_arena *arena, bool pages_too) {
    size_t count, busy = 0, registered = 0, resident = 0;
    jemhooks_region_info *r = regions_of(arena, &count);
    for (size_t i = 0; i < count; i++) {
        busy += r[i].committed != 0;
        registered += r[i].state != JEMHOOKS_MAPPED;
        if (pages_too) resident += resident_pages((void *)(uintptr_t)r[i].base, r[i].length);
    }
    size_t spare = records() ? 4 : 0; /* jemalloc 4 keeps a chunk, or at least its records, in each of at most four shards */
    CHECK("idle", busy <= spare, "%zu of %zu regions are busy after everything was freed and trimmed", busy, count);
    CHECK("idle", registered <= spare, "%zu of %zu regions are registered after everything was freed and trimmed", registered,
          count);
    CHECK("resident", !resident || (spare && (busy || resident <= spare * records() / PAGE)),
          "%zu pages of idle regions are still in memory", resident);
    free(r);
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

pthread_t start_thread(void *(*run)(void *), void *arg) {
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 * KIB);
    int rc = pthread_create(&thread, &attributes, run, arg);
    pthread_attr_destroy(&attributes);
    if (rc) {
        violated("setup", "no thread: %s", strerror(rc));
        exit(1);
    }
    return thread;
}

void join_thread(pthread_t thread) {
    pthread_join(thread, NULL);
}
