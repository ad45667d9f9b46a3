/* ucx_rma.c - two processes, UCX put and get: buffers from an arena, their packed keys from any pointer, no ucp_mem_map().
 * Usage: ucx_rma [buffers]; build with `make ucx_rma`. UCX_TLS chooses the transport. Exits 0 when every byte was right. */
#define _GNU_SOURCE
#include <jemhooks.h>
#include <jemhooks_ucx.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { MAX_BUFFERS = 1000, MAX_MESSAGE = 4096, MAX_PACKED = 256 };

/* What a peer needs to reach a buffer. */
typedef struct {
    uint64_t address;
    size_t length; /* of the packed key */
    unsigned char packed[MAX_PACKED];
} remote;

typedef struct {
    jemhooks_registrar *ucx;
    jemhooks_arena *arena;
    ucp_worker_h worker;
    int peer; /* a socket, for addresses and keys */
    size_t count;
    unsigned char *buffer[MAX_BUFFERS];
} side;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "ucx_rma: %s: %s\n", what, why);
    exit(1);
}

static void ok(const char *what, ucs_status_t status) {
    if (status != UCS_OK) fail(what, ucs_status_string(status));
}

static size_t length(size_t i) {
    return 1 + i * 7919 % 60000;
}

static unsigned char byte(size_t i, size_t j) {
    return (unsigned char)(i * 31 + j * 7 + 1);
}

static void send_bytes(const side *s, const void *bytes, size_t n) {
    if (n > MAX_MESSAGE || send(s->peer, bytes, n, 0) != (ssize_t)n) fail("sending", "the other process is gone");
}

static size_t receive(const side *s, void *bytes) {
    ssize_t n = recv(s->peer, bytes, MAX_MESSAGE, 0);
    if (n <= 0) fail("receiving", "the other process is gone");
    return (size_t)n;
}

/* The registrar makes a UCP context; the worker is of the same one. */
static void open_side(side *s, int peer, size_t count) {
    s->peer = peer;
    if (jemhooks_registrar_open("ucx", NULL, &s->ucx)) fail("opening UCX", jemhooks_last_error());
    jemhooks_ucx_info info = {.size = sizeof info};
    if (jemhooks_ucx_get_info(s->ucx, &info)) fail("asking for the context", jemhooks_last_error());
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    ok("ucp_worker_create", ucp_worker_create(info.context, &params, &s->worker));
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.registrars = &s->ucx;
    config.registrar_count = 1;
    if (jemhooks_arena_create(&config, &s->arena)) fail("creating the arena", jemhooks_last_error());
    for (s->count = 0; s->count < count; s->count++)
        if (!(s->buffer[s->count] = jemhooks_calloc(s->arena, 1, length(s->count)))) fail("allocating", jemhooks_last_error());
}

static void close_side(side *s) {
    ucp_worker_destroy(s->worker); /* before its context */
    while (s->count) jemhooks_free(s->buffer[--s->count]);
    if (jemhooks_arena_destroy(s->arena)) fail("destroying the arena", jemhooks_last_error());
    jemhooks_registrar_close(s->ucx);
}

/* Sends its address, and of each buffer the remote address and the packed key; serves its peer until told to stop. */
static int target(side *s) {
    ucp_address_t *address;
    size_t n, wrong = 0;
    ok("ucp_worker_get_address", ucp_worker_get_address(s->worker, &address, &n));
    send_bytes(s, address, n);
    ucp_worker_release_address(s->worker, address);
    for (size_t i = 0; i < s->count; i++) {
        jemhooks_key key;
        const void *packed;
        if (jemhooks_get_key(s->buffer[i], &key) || jemhooks_packed_key(s->buffer[i], 0, &packed, &n))
            fail("key", jemhooks_last_error());
        remote r = {.address = key.addr, .length = n};
        if (n > MAX_PACKED) fail("key", "the packed key is too long");
        memcpy(r.packed, packed, n);
        send_bytes(s, &r, sizeof r);
    }
    for (struct pollfd told = {s->peer, POLLIN, 0}; !poll(&told, 1, 0);) ucp_worker_progress(s->worker); /* tcp needs it */
    for (size_t i = 0; i < s->count; i++)
        for (size_t j = 0; j < length(i); j++) wrong += s->buffer[i][j] != byte(i, j);
    return wrong != 0;
}

static void finish(side *s, const char *what, void *request) {
    ucs_status_t status = UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : UCS_OK;
    if (request && !UCS_PTR_IS_ERR(request)) {
        while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) ucp_worker_progress(s->worker);
        ucp_request_free(request);
    }
    ok(what, status);
}

/* Puts each buffer into the target's, and gets the first one back. */
static void initiator(side *s) {
    static unsigned char message[MAX_MESSAGE];
    static remote theirs[MAX_BUFFERS];
    ucp_ep_h endpoint;
    const ucp_request_param_t plain = {0};
    size_t bytes = 0;
    receive(s, message);
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = (ucp_address_t *)message};
    ok("ucp_ep_create", ucp_ep_create(s->worker, &params, &endpoint));
    for (size_t i = 0; i < s->count; i++) { /* all of them first: afterwards the target only serves */
        if (receive(s, message) != sizeof theirs[i]) fail("receiving", "not a key");
        memcpy(&theirs[i], message, sizeof theirs[i]);
        if (theirs[i].length < 9 || theirs[i].length > MAX_PACKED) fail("receiving", "not a packed key");
    }
    for (size_t i = 0; i < s->count; i++) {
        ucp_rkey_h rkey;
        jemhooks_key local;
        ok("ucp_ep_rkey_unpack", ucp_ep_rkey_unpack(endpoint, theirs[i].packed, &rkey));
        for (size_t j = 0; j < length(i); j++) s->buffer[i][j] = byte(i, j);
        if (jemhooks_get_key(s->buffer[i], &local)) fail("key", jemhooks_last_error());
        ucp_request_param_t with_memory = {.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH, .memh = (ucp_mem_h)(uintptr_t)local.lkey};
        finish(s, "put", ucp_put_nbx(endpoint, s->buffer[i], length(i), theirs[i].address, rkey, &with_memory));
        finish(s, "flush", ucp_ep_flush_nbx(endpoint, &plain));
        if (!i) {
            memset(s->buffer[0], 0, length(0));
            finish(s, "get", ucp_get_nbx(endpoint, s->buffer[0], length(0), theirs[0].address, rkey, &plain));
            for (size_t j = 0; j < length(0); j++)
                if (s->buffer[0][j] != byte(0, j)) fail("get", "wrong bytes came back");
        }
        ucp_rkey_destroy(rkey);
        bytes += length(i);
    }
    send_bytes(s, "", 1);
    finish(s, "close", ucp_ep_close_nbx(endpoint, &plain));
    jemhooks_stats stats = {.size = sizeof stats};
    if (jemhooks_get_stats(s->arena, &stats)) fail("stats", jemhooks_last_error());
    printf("%zu puts, %zu bytes, %llu registrations\n", s->count, bytes, (unsigned long long)stats.registrations);
}

int main(int argc, char **argv) {
    size_t count = argc > 1 ? strtoul(argv[1], NULL, 10) : 200;
    int ends[2], status = 1;
    if (count < 1 || count > MAX_BUFFERS) {
        fprintf(stderr, "ucx_rma: %zu buffers; 1 to %d can be moved\n", count, MAX_BUFFERS);
        return 2;
    }
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends)) return 1;
    pid_t child = fork(); /* before anything of jemhooks or UCX exists */
    if (child < 0) return 1;
    static side s;
    close(ends[!child ? 0 : 1]);
    open_side(&s, ends[!child ? 1 : 0], count);
    if (!child) {
        int wrong = target(&s);
        close_side(&s);
        return wrong;
    }
    initiator(&s);
    waitpid(child, &status, 0);
    close_side(&s);
    printf(status ? "the target found wrong bytes\n" : "every byte is right\n");
    return status != 0;
}
