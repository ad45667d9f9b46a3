/* fabric_rma.c - two processes on loopback: arena memory, its key from any pointer, bytes moved by libfabric RMA.
 * Usage: fabric_rma [provider [buffers]]; build with `make`. Exits 0 when every byte was right. */
#define _GNU_SOURCE
#include <jemhooks.h>
#include <jemhooks_fabric.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_BUFFERS = 1000, TIMEOUT_MS = 30000 };

typedef struct {
    jemhooks_registrar *fabric;
    jemhooks_arena *arena;
    size_t count;
    unsigned char *buffer[MAX_BUFFERS];
} side;

static void fail(const char *what) {
    fprintf(stderr, "fabric_rma: %s: %s\n", what, jemhooks_last_error());
    exit(1);
}

static size_t length(size_t i) {
    return 1 + i * 7919 % 60000;
}

static unsigned char byte(size_t i, size_t j) {
    return (unsigned char)(i * 31 + j * 7 + 1);
}

static void open_side(side *s, const char *provider, size_t count) {
    jemhooks_fabric_config fabric = JEMHOOKS_FABRIC_CONFIG_INIT;
    fabric.provider = provider;
    if (jemhooks_registrar_open("fabric", &fabric, &s->fabric)) fail("opening libfabric");
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.registrars = &s->fabric;
    config.registrar_count = 1;
    if (jemhooks_arena_create(&config, &s->arena)) fail("creating the arena");
    for (s->count = 0; s->count < count; s->count++)
        if (!(s->buffer[s->count] = jemhooks_calloc(s->arena, 1, length(s->count)))) fail("allocating");
}

static void close_side(side *s) {
    while (s->count) jemhooks_free(s->buffer[--s->count]);
    if (jemhooks_arena_destroy(s->arena)) fail("destroying the arena");
    jemhooks_registrar_close(s->fabric);
}

static void exact(ssize_t moved, size_t wanted) {
    if (moved != (ssize_t)wanted) fail("the other process is gone");
}

/* Sends its address and keys, serves its peer until told to stop, then counts wrong bytes. */
static int target(side *s, int in, int out) {
    char address[256];
    size_t n = sizeof address;
    if (jemhooks_fabric_address(s->fabric, address, &n)) fail("own address");
    exact(write(out, &n, sizeof n), sizeof n);
    exact(write(out, address, n), n);
    for (size_t i = 0; i < s->count; i++) {
        jemhooks_key key;
        if (jemhooks_get_key(s->buffer[i], &key)) fail("key");
        exact(write(out, &key, sizeof key), sizeof key);
    }
    for (struct pollfd told = {in, POLLIN, 0}; !poll(&told, 1, 0);)
        if (jemhooks_fabric_progress(s->fabric, 1)) fail("progress");
    size_t wrong = 0;
    for (size_t i = 0; i < s->count; i++)
        for (size_t j = 0; j < length(i); j++) wrong += s->buffer[i][j] != byte(i, j);
    return wrong != 0;
}

static void initiator(side *s, int in, int out) {
    char address[256];
    size_t n, bytes = 0;
    uint64_t peer, ticket;
    exact(read(in, &n, sizeof n), sizeof n);
    exact(read(in, address, n), n);
    if (jemhooks_fabric_connect(s->fabric, address, n, &peer)) fail("connect");
    for (size_t i = 0; i < s->count; i++) {
        jemhooks_key remote, local;
        exact(read(in, &remote, sizeof remote), sizeof remote);
        for (size_t j = 0; j < length(i); j++) s->buffer[i][j] = byte(i, j);
        if (jemhooks_get_key(s->buffer[i], &local)) fail("key");
        if (jemhooks_fabric_put(s->fabric, peer, s->buffer[i], local.lkey, length(i), remote.addr, remote.rkey, &ticket) ||
            jemhooks_fabric_wait(s->fabric, ticket, TIMEOUT_MS))
            fail("put");
        bytes += length(i);
    }
    exact(write(out, "", 1), 1);
    jemhooks_stats stats = {.size = sizeof stats};
    if (jemhooks_get_stats(s->arena, &stats)) fail("stats");
    printf("%zu puts, %zu bytes, %llu registrations\n", s->count, bytes, (unsigned long long)stats.registrations);
}

int main(int argc, char **argv) {
    const char *provider = argc > 1 ? argv[1] : "tcp";
    size_t count = argc > 2 ? strtoul(argv[2], NULL, 10) : 200;
    int to_target[2], to_initiator[2], status = 1;
    if (count < 1 || count > MAX_BUFFERS) {
        fprintf(stderr, "fabric_rma: %zu buffers; 1 to %d can be moved\n", count, MAX_BUFFERS);
        return 2;
    }
    if (pipe(to_target) || pipe(to_initiator)) return 1;
    pid_t child = fork(); /* before anything of jemhooks or libfabric exists */
    if (child < 0) return 1;
    side s;
    if (!child) {
        close(to_target[1]), close(to_initiator[0]);
        open_side(&s, provider, count);
        int wrong = target(&s, to_target[0], to_initiator[1]);
        close_side(&s);
        return wrong;
    }
    close(to_target[0]), close(to_initiator[1]);
    open_side(&s, provider, count);
    initiator(&s, to_initiator[0], to_target[1]);
    waitpid(child, &status, 0);
    close_side(&s);
    printf(status ? "the target found wrong bytes\n" : "every byte is right\n");
    return status != 0;
}
