/* ipc.c - memory of other processes: arguments, handles, and threads that open and close while exporters come and go.
 *     test_ipc [case=…] rounds=200 threads=8 seed=1
 * Concurrency: `threads` and `exporters` have many threads that open and close the same handles; everything else is one thread. */
#include "check.h"
#include "jemhooks_ipc.h"
#include "jemhooks_provider.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE (40 * KIB)

static jemhooks_arena *shared_arena(void) {
    jemhooks_provider *memfd;
    MUST(jemhooks_provider_memfd(NULL, &memfd));
    jemhooks_arena *arena = arena_on(memfd, NULL, 0);
    jemhooks_provider_close(memfd);
    return arena;
}

static jemhooks_ipc_stats ipc_stats(void) {
    jemhooks_ipc_stats s = {.size = sizeof s};
    MUST(jemhooks_ipc_get_stats(&s));
    return s;
}

/* Nothing is open; what is kept for the next open goes when told. */
static void check_nothing_mapped(const char *when) {
    CHECK("leak", !ipc_stats().opened, "%s: %lu mappings have open blocks", when, (unsigned long)ipc_stats().opened);
    jemhooks_ipc_set_cache(0);
    jemhooks_ipc_stats s = ipc_stats();
    CHECK("leak", !s.opened && !s.cached && !s.exporters, "%s: %lu mappings and %lu exporters stay without a cache", when,
          (unsigned long)s.cached, (unsigned long)s.exporters);
    jemhooks_ipc_set_cache(64);
}

/* ---- one thread -------------------------------------------------------------------------------------------------- */

static void refused(const char *what, int rc, int err, int kind) {
    CHECK("refused", rc == -err && jemhooks_last_error_kind() == kind && *jemhooks_last_error(), "%s: %d instead of %d, kind %d: %s", what,
          rc, -err, jemhooks_last_error_kind(), jemhooks_last_error());
}

static void arguments(void) {
    jemhooks_arena *arena = shared_arena(), *private = arena_on(NULL, NULL, 0);
    char *p = must_have(jemhooks_alloc(arena, 1000), "block"), *q = must_have(jemhooks_alloc(private, 1000), "block"), here[8];
    jemhooks_ipc_handle handle;
    jemhooks_ipc_block block = {0}, none = {0};
    fill(p, 1000, 1);
    refused("export to nowhere", jemhooks_ipc_export(p, 10, 0, NULL), EINVAL, JEMHOOKS_ERROR_CONFIG);
    refused("export with flags", jemhooks_ipc_export(p, 10, 6, &handle), EINVAL, JEMHOOKS_ERROR_CONFIG);
    refused("export of the stack", jemhooks_ipc_export(here, 8, 0, &handle), ENOENT, JEMHOOKS_ERROR_NOT_OURS);
    refused("export of NULL", jemhooks_ipc_export(NULL, 8, 0, &handle), ENOENT, JEMHOOKS_ERROR_NOT_OURS);
    refused("export of private memory", jemhooks_ipc_export(q, 8, 0, &handle), EOPNOTSUPP, JEMHOOKS_ERROR_PROVIDER);
    refused("export beyond the region", jemhooks_ipc_export(p, SIZE_MAX, 0, &handle), EINVAL, JEMHOOKS_ERROR_CONFIG);
    MUST(jemhooks_ipc_export(p, 0, 0, &handle));
    refused("open to nowhere", jemhooks_ipc_open(&handle, 0, NULL), EINVAL, JEMHOOKS_ERROR_CONFIG);
    refused("open of NULL", jemhooks_ipc_open(NULL, 0, &block), EINVAL, JEMHOOKS_ERROR_CONFIG);
    refused("open with flags", jemhooks_ipc_open(&handle, 2, &block), EINVAL, JEMHOOKS_ERROR_CONFIG);
    refused("receive to nowhere", jemhooks_ipc_receive(0, 0, 0, NULL), EINVAL, JEMHOOKS_ERROR_CONFIG);
    refused("stats to nowhere", jemhooks_ipc_get_stats(NULL), EINVAL, JEMHOOKS_ERROR_CONFIG);
    MUST(jemhooks_ipc_open(&handle, 0, &block));
    CHECK("block", block.length == jemhooks_usable_size(p) && block.writable && filled(block.base, 1000, 1000, 1),
          "length 0 must export all usable bytes, and the bytes must be the same");
    CHECK("block", (char *)block.base >= (char *)block.region &&
          (char *)block.base + block.length <= (char *)block.region + block.region_length, "a block outside of its region");
    jemhooks_ipc_stats small = {.size = 2 * sizeof(uint64_t)};
    small.exporters = 77;
    MUST(jemhooks_ipc_get_stats(&small));
    CHECK("stats", small.exported == 1 && small.exporters == 77, "a caller's smaller struct is written beyond its end");
    CHECK("alive", jemhooks_ipc_alive(&block) == 1 && !jemhooks_ipc_alive(&none) && !jemhooks_ipc_alive(NULL), "alive");
    jemhooks_ipc_close(&block);
    CHECK("close", !block.base && !jemhooks_ipc_alive(&block), "a closed block must be empty");
    jemhooks_ipc_close(&block);
    jemhooks_ipc_close(&none);
    jemhooks_ipc_close(NULL);
    MUST(jemhooks_free(p));
    MUST(jemhooks_free(q));
    arena_end(arena);
    arena_end(private);
    refused("open after the arena's end", jemhooks_ipc_open(&handle, 0, &block), ESTALE, JEMHOOKS_ERROR_CLOSED);
    CHECK("stats", !ipc_stats().exported, "an arena that has ended still exports");
    check_nothing_mapped("arguments");
}

/* As handle.c does it. */
static void sign(jemhooks_ipc_handle *handle) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < 56; i++) h = (h ^ handle->bytes[i]) * 0x100000001b3u;
    memcpy(handle->bytes + 56, &h, sizeof h);
}

/* Random bytes in random fields, with the right checksum: refused or not, nothing crashes and nothing stays mapped. */
static void forged(void) {
    jemhooks_arena *arena = shared_arena();
    char *p = must_have(jemhooks_alloc(arena, SIZE), "block");
    jemhooks_ipc_handle good;
    jemhooks_ipc_block block;
    dice d = {(uint64_t)option("seed", 1)};
    long opened = 0;
    MUST(jemhooks_ipc_export(p, SIZE, 0, &good));
    for (long i = 0; i < option("rounds", 200) * 20; i++) {
        jemhooks_ipc_handle h = good;
        uint64_t word = roll(&d) >> roll_below(&d, 64);
        size_t field = 5 + roll_below(&d, 2); /* offset or length */
        if (roll_below(&d, 4)) memcpy(h.bytes + field * 8, &word, sizeof word);
        else h.bytes[4 + roll_below(&d, 52)] ^= (unsigned char)(1 << roll_below(&d, 8));
        sign(&h);
        jemhooks_ipc_set_cache(roll_below(&d, 2));
        int rc = jemhooks_ipc_open(&h, 0, &block);
        if (!rc) {
            const volatile unsigned char *bytes = block.base;
            (void)bytes[0], (void)bytes[block.length - 1];
            CHECK("region", (char *)block.base >= (char *)block.region && block.length <= block.region_length &&
                  (char *)block.base - (char *)block.region <= (ptrdiff_t)(block.region_length - block.length),
                  "a forged handle reaches beyond its region");
            jemhooks_ipc_close(&block);
            opened++;
        } else {
            CHECK("refused", *jemhooks_last_error(), "refused without a word");
        }
    }
    CHECK("setup", opened > 10, "only %ld were opened", opened);
    MUST(jemhooks_free(p));
    arena_end(arena);
    check_nothing_mapped("forged");
}

static void leaks(void) {
    jemhooks_arena *arena = shared_arena();
    char *p = must_have(jemhooks_alloc(arena, SIZE), "block");
    jemhooks_ipc_handle handle;
    jemhooks_ipc_block block[3];
    int ends[2];
    MUST(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
    MUST(jemhooks_ipc_export(p, SIZE, 0, &handle));
    for (size_t cache = 0; cache < 2; cache++) {
        long mappings = 0, files = 0;
        jemhooks_ipc_set_cache(cache);
        for (long i = 0; i < option("rounds", 200); i++) {
            MUST(jemhooks_ipc_open(&handle, 0, &block[0]));
            MUST(jemhooks_ipc_open(&handle, JEMHOOKS_IPC_READ_ONLY, &block[1]));
            MUST(jemhooks_ipc_send(ends[0], p, 100, 0, 1000));
            MUST(jemhooks_ipc_receive(ends[1], 0, 1000, &block[2]));
            for (int k = 0; k < 3; k++) jemhooks_ipc_close(&block[k]);
            if (i == 2) mappings = count_mappings(), files = count_files();
        }
        CHECK("leak", count_mappings() <= mappings + 20 && count_files() == files, "%ld mappings and %ld files became %ld and %ld", mappings,
              files, count_mappings(), count_files());
    }
    close(ends[0]);
    close(ends[1]);
    MUST(jemhooks_free(p));
    arena_end(arena);
    check_nothing_mapped("leaks");
}

/* ---- many threads ------------------------------------------------------------------------------------------------ */

enum { BOARD = 4 };

/* Handles that all threads open, replaced by main meanwhile. */
static struct {
    pthread_mutex_t lock;
    jemhooks_ipc_handle handle;
    unsigned char value;
} board[BOARD];
static atomic_bool stop;
static atomic_ulong opens, gone;

static void post(size_t at, const jemhooks_ipc_handle *handle, unsigned char value) {
    pthread_mutex_lock(&board[at].lock);
    board[at].handle = *handle;
    board[at].value = value;
    pthread_mutex_unlock(&board[at].lock);
}

static void look(size_t at, jemhooks_ipc_handle *handle, unsigned char *value) {
    pthread_mutex_lock(&board[at].lock);
    *handle = board[at].handle;
    *value = board[at].value;
    pthread_mutex_unlock(&board[at].lock);
}

/* Only its own bytes, or, once it is freed, zeros. A volatile load: the exporter may write meanwhile. */
static void check_bytes(const jemhooks_ipc_block *block, unsigned char value) {
    for (size_t i = 0; i < block->length; i += 511) {
        unsigned char byte = ((const volatile unsigned char *)block->base)[i];
        if (!CHECK("stranger", byte == value || !byte, "byte %zu is %u, another block's, not %u", i, byte, value)) return;
    }
}

static void *open_and_close(void *arg) {
    enum { HELD = 4 };
    dice d = {(uint64_t)(uintptr_t)arg};
    jemhooks_ipc_block held[HELD] = {0};
    unsigned char value[HELD] = {0};
    while (!atomic_load(&stop)) {
        size_t k = roll_below(&d, HELD);
        if (held[k].base) {
            jemhooks_ipc_alive(&held[k]);
            check_bytes(&held[k], value[k]);
            jemhooks_ipc_close(&held[k]);
            continue;
        }
        jemhooks_ipc_handle handle;
        size_t at = roll_below(&d, BOARD);
        look(at, &handle, &value[k]);
        int rc = jemhooks_ipc_open(&handle, roll_below(&d, 4) ? 0 : JEMHOOKS_IPC_READ_ONLY, &held[k]);
        CHECK("refused", !rc || rc == -ESTALE || rc == -ESRCH, "refused with %d: %s", rc, jemhooks_last_error());
        CHECK("refused", !rc || at, "what lasts was refused: %s", jemhooks_last_error());
        atomic_fetch_add(rc ? &gone : &opens, 1);
        if (rc) held[k].base = NULL;
        else check_bytes(&held[k], value[k]);
        if (!at && !rc) CHECK("alive", jemhooks_ipc_alive(&held[k]), "what lasts is not alive");
        if (!roll_below(&d, 64)) jemhooks_ipc_set_cache(roll_below(&d, 4));
        if (!roll_below(&d, 64)) ipc_stats();
    }
    for (size_t k = 0; k < HELD; k++) jemhooks_ipc_close(&held[k]);
    return NULL;
}

static long start_threads(pthread_t *thread, long most) {
    long n = option("threads", 8);
    n = n < most ? n : most;
    atomic_store(&stop, false);
    atomic_store(&opens, 0);
    atomic_store(&gone, 0);
    for (long i = 0; i < n; i++) thread[i] = start_thread(open_and_close, (void *)(intptr_t)(i + 1));
    return n;
}

static void end_threads(const pthread_t *thread, long n, const char *when) {
    for (int ms = 0; ms < 60000 && atomic_load(&opens) <= 100; ms++) usleep(1000); /* few rounds, under valgrind, are over too soon */
    atomic_store(&stop, true);
    for (long i = 0; i < n; i++) join_thread(thread[i]);
    CHECK("setup", atomic_load(&opens) > 100, "%s: only %lu were opened", when, atomic_load(&opens));
    figure("opened", (double)atomic_load(&opens));
    figure("refused", (double)atomic_load(&gone));
}

/* An arena with one exported block. */
static jemhooks_arena *exporter(unsigned char value, char **block, jemhooks_ipc_handle *handle) {
    jemhooks_arena *arena = shared_arena();
    *block = must_have(jemhooks_alloc(arena, SIZE), "block");
    memset(*block, value, SIZE);
    MUST(jemhooks_ipc_export(*block, SIZE, 0, handle));
    return arena;
}

/* So many regions that some must share a place in the table of what is mapped. */
static void many(void) {
    enum { COUNT = 1100 };
    static jemhooks_ipc_handle handle[COUNT];
    static jemhooks_ipc_block opened[COUNT];
    static char *block[COUNT];
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    MUST(jemhooks_provider_memfd(NULL, &config.provider));
    config.region_max = SLOT;
    config.policy = JEMHOOKS_NONE;
    jemhooks_arena *arena = arena_of(&config);
    jemhooks_provider_close(config.provider);
    for (size_t i = 0; i < COUNT; i++) {
        block[i] = must_have(jemhooks_alloc(arena, SLOT - 64 * KIB), "block");
        memcpy(block[i], &i, sizeof i);
        MUST(jemhooks_ipc_export(block[i], 0, 0, &handle[i]));
        MUST(jemhooks_ipc_open(&handle[i], 0, &opened[i]));
    }
    CHECK("setup", ipc_stats().opened > 1024, "only %lu regions", (unsigned long)ipc_stats().opened);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK("stranger", !memcmp(opened[i].base, &i, sizeof i), "region %zu is another one", i);
        jemhooks_ipc_close(&opened[i]);
    }
    CHECK("stats", ipc_stats().cached == 64 && !ipc_stats().opened, "%lu mappings are kept", (unsigned long)ipc_stats().cached);
    for (size_t i = 0; i < COUNT; i++) MUST(jemhooks_free(block[i]));
    arena_end(arena);
    check_nothing_mapped("many");
}

/* Slots of one file, side by side, so that the kernel needs few mappings for very many regions. */
typedef struct row {
    char *base;
    int fd;
    size_t used;
} row;

static int row_map(void *self, void *tenant, size_t alignment, jemhooks_mapping *m) {
    row *r = self;
    (void)tenant;
    CHECK("setup", alignment <= SLOT && m->length <= SLOT, "%zu bytes on %zu", m->length, alignment);
    *m = (jemhooks_mapping){r->base + r->used * SLOT, m->length, r->used * SLOT, true};
    r->used++;
    return 0;
}

static int row_share(void *self, void *tenant, const jemhooks_mapping *m, int *fd, uint64_t *offset) {
    (void)tenant;
    *fd = ((row *)self)->fd;
    *offset = m->offset;
    return 0;
}

/* One more region than there can be exported: an error says so, and when some have gone there is room again. */
static void table_full(void) {
    enum { MOST = 65535, LATER = 100, SIZE_EACH = 1700 * KIB }; /* of which a slot holds one */
    row r = {NULL, memfd_create("row", MFD_CLOEXEC), 0};
    MUST(ftruncate(r.fd, (off_t)((MOST + 2 * LATER) * SLOT)));
    r.base = mmap(NULL, (MOST + 2 * LATER) * SLOT, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, r.fd, 0);
    CHECK("setup", r.base != MAP_FAILED, "no address space");
    const jemhooks_provider_ops ops = {.size = sizeof ops, .name = "row", .map = row_map, .share = row_share};
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    MUST(jemhooks_provider_create(&ops, &r, &config.provider));
    config.region_min = config.region_max = SLOT;
    config.policy = JEMHOOKS_NONE;
    jemhooks_arena *arena = arena_of(&config), *going;
    config.name = "going";
    going = arena_of(&config);
    jemhooks_ipc_handle handle;
    void **block = must_have(calloc(MOST + LATER, sizeof *block), "array");
    for (size_t i = 0; i < MOST; i++) {
        block[i] = must_have(jemhooks_alloc(i < LATER ? going : arena, SIZE_EACH), "block");
        MUST(jemhooks_ipc_export(block[i], 0, 0, &handle));
    }
    CHECK("stats", ipc_stats().exported == MOST, "%lu regions are exported", (unsigned long)ipc_stats().exported);
    for (size_t i = 0; i < LATER; i++) {
        block[MOST + i] = must_have(jemhooks_alloc(arena, SIZE_EACH), "block");
        refused("an export too many", jemhooks_ipc_export(block[MOST + i], 0, 0, &handle), ENOSPC, JEMHOOKS_ERROR_PROVIDER);
    }
    MUST(jemhooks_ipc_export(block[MOST / 2], 0, 0, &handle)); /* of a region that is in the table */
    for (size_t i = 0; i < LATER; i++) MUST(jemhooks_free(block[i]));
    arena_end(going);
    for (size_t i = 0; i < LATER; i++) MUST(jemhooks_ipc_export(block[MOST + i], 0, 0, &handle));
    CHECK("stats", ipc_stats().exported == MOST, "%lu regions are exported in the end", (unsigned long)ipc_stats().exported);
    for (size_t i = LATER; i < MOST + LATER; i++) MUST(jemhooks_free(block[i]));
    arena_end(arena);
    CHECK("stats", !ipc_stats().exported, "ended arenas still export");
    jemhooks_provider_close(config.provider);
    munmap(r.base, (MOST + 2 * LATER) * SLOT);
    close(r.fd);
    free(block);
}

/* Arenas of this process come and go. */
static void threads(void) {
    pthread_t thread[32];
    jemhooks_ipc_handle handle;
    jemhooks_arena *arena[BOARD];
    char *block[BOARD];
    for (size_t i = 0; i < BOARD; i++) {
        pthread_mutex_init(&board[i].lock, NULL);
        arena[i] = exporter((unsigned char)(i + 1), &block[i], &handle);
        post(i, &handle, (unsigned char)(i + 1));
    }
    long n = start_threads(thread, 32);
    for (long i = 0; i < option("rounds", 200); i++) {
        size_t at = 1 + (size_t)i % (BOARD - 1);
        unsigned char value = (unsigned char)(10 + i % 200);
        MUST(jemhooks_free(block[at]));
        arena_end(arena[at]);
        arena[at] = exporter(value, &block[at], &handle);
        post(at, &handle, value);
    }
    end_threads(thread, n, "threads");
    for (size_t i = 0; i < BOARD; i++) {
        MUST(jemhooks_free(block[i]));
        arena_end(arena[i]);
    }
    check_nothing_mapped("threads");
}

/* ---- other processes --------------------------------------------------------------------------------------------- */

/* A child that exports a block for each line that it is sent, and gives up the one before. */
static void serve(int socket) {
    jemhooks_arena *arena = NULL;
    jemhooks_ipc_handle handle;
    unsigned char value;
    char *block = NULL;
    while (read(socket, &value, 1) == 1) {
        if (arena) MUST(jemhooks_free(block)), arena_end(arena);
        arena = exporter(value, &block, &handle);
        if (write(socket, &handle, sizeof handle) != sizeof handle) break;
    }
    _exit(0);
}

static pid_t start_server(int *ours) {
    int ends[2];
    MUST(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
    pid_t pid = fork();
    if (!pid) {
        close(ends[0]);
        serve(ends[1]);
    }
    CHECK("setup", pid > 0, "fork failed");
    close(ends[1]);
    *ours = ends[0];
    return pid;
}

static bool ask(int server, size_t at, unsigned char value) {
    jemhooks_ipc_handle handle;
    if (write(server, &value, 1) != 1 || read(server, &handle, sizeof handle) != sizeof handle) return false;
    post(at, &handle, value);
    return true;
}

/* Processes whose arenas come and go, and which are killed while their handles are opened. */
static void exporters(void) {
    enum { SERVERS = 12 };
    pthread_t thread[32];
    pid_t pid[SERVERS];
    int server[SERVERS];
    char *block;
    jemhooks_ipc_handle handle;
    for (size_t i = 0; i < SERVERS; i++) pid[i] = start_server(&server[i]); /* before there are threads */
    jemhooks_arena *lasting = exporter(1, &block, &handle);
    for (size_t i = 0; i < BOARD; i++) {
        pthread_mutex_init(&board[i].lock, NULL);
        post(i, &handle, 1);
    }
    long n = start_threads(thread, 32), each = option("rounds", 200) / SERVERS + 1;
    for (size_t i = 0; i < SERVERS; i++) {
        for (long k = 0; k < each; k++)
            CHECK("setup", ask(server[i], 1 + (size_t)k % (BOARD - 1), (unsigned char)(2 + (i * 17 + (size_t)k) % 250)), "no answer");
        kill(pid[i], SIGKILL);
        waitpid(pid[i], NULL, 0);
        close(server[i]);
    }
    end_threads(thread, n, "exporters");
    MUST(jemhooks_free(block));
    arena_end(lasting);
    check_nothing_mapped("exporters");
}

int main(int argc, char **argv) {
    static const test_case cases[] = {{"arguments", arguments}, {"forged", forged},       {"leaks", leaks},
                                      {"many", many},           {"table_full", table_full}, {"threads", threads},
                                      {"exporters", exporters}, {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
