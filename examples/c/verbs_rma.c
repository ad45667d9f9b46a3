/* verbs_rma.c - jemhooks memory moved by ibverbs: RDMA write, read and atomic fetch-and-add over a reliable connected queue
 * pair, between two machines or (--loopback) two processes. Build with `make`; exits 0 when every byte was right.
 * The protection domain is the program's own, and the arena's registrar uses it: every pointer has its key without a
 * registration for the transfer. */
#define _GNU_SOURCE
#include <getopt.h>
#include <infiniband/verbs.h>
#include <jemhooks.h>
#include <jemhooks_verbs.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_BUFFERS = 10000, ADDITIONS = 100, TIMEOUT_S = 60 };

static const char usage[] =
    "usage: verbs_rma --loopback | --server | --client HOST  [--port N] [--device NAME] [--gid-index N] [--size BYTES]\n"
    "                 [--count N]\n"
    "  --loopback       both sides on this machine\n"
    "  --server         wait for a client, and serve it\n"
    "  --client HOST    connect to the server on HOST\n"
    "  --port N         the server's TCP port (18517)\n"
    "  --device NAME    such as mlx5_0 or rxe0 (the first)\n"
    "  --gid-index N    of port 1 (its first IPv4 GID)\n"
    "  --size BYTES     of the largest buffer (262144); both sides alike\n"
    "  --count N        buffers, 1 to 10000 (50); both sides alike\n";

typedef struct options {
    const char *host, *port, *device;
    int gid_index; /* -1: choose */
    bool server, loopback;
    size_t size, count;
} options;

typedef struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_port_attr port;
    union ibv_gid gid;
    int gid_index;
    jemhooks_registrar *verbs;
    jemhooks_arena *arena;
    unsigned char *buffer[MAX_BUFFERS];
    uint64_t *counter; /* the server's; where the client's fetches arrive */
    FILE *in, *out;    /* the TCP connection to the other side             */
} side;

static void die(const char *format, ...) {
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fprintf(stderr, "verbs_rma: %s\n", text);
    exit(1);
}

static size_t length(const options *o, size_t i) {
    return i ? 1 + i * 7919 % o->size : o->size;
}

static unsigned char byte(size_t i, size_t j, int round) {
    return (unsigned char)(i * 31 + j * 7 + j / 251 + (size_t)round * 101 + 1);
}

static void fill(side *s, const options *o, int round) {
    for (size_t i = 0; i < o->count; i++)
        for (size_t j = 0; j < length(o, i); j++) s->buffer[i][j] = byte(i, j, round);
}

static size_t wrong(const side *s, const options *o, int round) {
    size_t n = 0;
    for (size_t i = 0; i < o->count; i++)
        for (size_t j = 0; j < length(o, i); j++) n += s->buffer[i][j] != byte(i, j, round);
    return n;
}

/* ---- device and memory ------------------------------------------------------------------------------------------- */

static void open_device(side *s, const options *o) {
    int count = 0;
    struct ibv_device **list = ibv_get_device_list(&count), *found = NULL;
    for (int i = 0; i < count && !found; i++)
        if (!o->device || !strcmp(o->device, ibv_get_device_name(list[i]))) found = list[i];
    if (!found) die("%s%s among the %d RDMA devices of this host", o->device ? "no device " : "none",
                    o->device ? o->device : "", count);
    s->context = ibv_open_device(found);
    if (!s->context) die("ibv_open_device: %s", strerror(errno));
    ibv_free_device_list(list);
    s->pd = ibv_alloc_pd(s->context);
    s->cq = ibv_create_cq(s->context, 16, NULL, NULL, 0);
    if (!s->pd || !s->cq || ibv_query_port(s->context, 1, &s->port)) die("opening the device: %s", strerror(errno));
}

static bool has_gid(side *s, int index) {
    static const union ibv_gid none;
    return !ibv_query_gid(s->context, 1, index, &s->gid) && memcmp(&s->gid, &none, sizeof none);
}

static void choose_gid(side *s, const options *o) {
    static const unsigned char ipv4[12] = {[10] = 0xff, [11] = 0xff};
    int last = s->port.gid_tbl_len < 256 ? s->port.gid_tbl_len : 256;
    if (o->gid_index >= last || (o->gid_index >= 0 && !has_gid(s, o->gid_index)))
        die("device %s has no GID with index %d on port 1", ibv_get_device_name(s->context->device), o->gid_index);
    for (s->gid_index = 0; o->gid_index < 0 && s->gid_index < last; s->gid_index++)
        if (has_gid(s, s->gid_index) && !memcmp(&s->gid, ipv4, sizeof ipv4)) return;
    s->gid_index = o->gid_index < 0 ? 0 : o->gid_index;
    if (!has_gid(s, s->gid_index)) die("port 1 has no GID");
}

static void open_side(side *s, const options *o) {
    open_device(s, o);
    choose_gid(s, o);
    jemhooks_verbs_config verbs = JEMHOOKS_VERBS_CONFIG_INIT;
    verbs.pd = s->pd;
    if (jemhooks_registrar_open("verbs", &verbs, &s->verbs)) die("%s", jemhooks_last_error());
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    config.registrars = &s->verbs;
    config.registrar_count = 1;
    config.access = JEMHOOKS_REMOTE_READ | JEMHOOKS_REMOTE_WRITE | JEMHOOKS_REMOTE_ATOMIC;
    if (jemhooks_arena_create(&config, &s->arena)) die("%s", jemhooks_last_error());
    for (size_t i = 0; i < o->count; i++)
        if (!(s->buffer[i] = jemhooks_calloc(s->arena, 1, length(o, i)))) die("%s", jemhooks_last_error());
    if (!(s->counter = jemhooks_calloc(s->arena, 1, sizeof *s->counter))) die("%s", jemhooks_last_error());
}

static void close_side(side *s, const options *o) {
    for (size_t i = 0; i < o->count; i++) jemhooks_free(s->buffer[i]);
    jemhooks_free(s->counter);
    if (jemhooks_arena_destroy(s->arena)) die("%s", jemhooks_last_error());
    jemhooks_registrar_close(s->verbs);
    if (ibv_destroy_qp(s->qp) || ibv_destroy_cq(s->cq) || ibv_dealloc_pd(s->pd) || ibv_close_device(s->context))
        die("closing the device: %s", strerror(errno));
    fclose(s->in);
    fclose(s->out);
}

static jemhooks_key key_of(const void *p) {
    jemhooks_key key;
    if (jemhooks_get_key(p, &key)) die("%s", jemhooks_last_error());
    return key;
}

/* ---- the connection ----------------------------------------------------------------------------------------------- */

static void say(side *s, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(s->out, format, list);
    va_end(list);
    if (fflush(s->out)) die("the other side is gone");
}

/* How long to wait for the other side; 0: as long as it takes. */
static void be_patient(int fd, int seconds) {
    struct timeval patience = {seconds, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
}

static void listen_to(side *s, int fd) {
    be_patient(fd, TIMEOUT_S);
    s->in = fdopen(fd, "r");
    s->out = fdopen(dup(fd), "w");
    if (!s->in || !s->out) die("the connection: %s", strerror(errno));
}

static void expect(int got, int wanted) {
    if (got != wanted) die("the other side is gone, or was started with another --size or --count");
}

/* Both sides tell each other how to reach their queue pair, and connect it. */
static void connect_queue(side *s) {
    struct ibv_qp_init_attr init = {.send_cq = s->cq, .recv_cq = s->cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
                                    .cap = {.max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
    s->qp = ibv_create_qp(s->pd, &init);
    if (!s->qp) die("ibv_create_qp: %s", strerror(errno));
    say(s, "%u %u %u %llx %llx\n", s->qp->qp_num, s->port.lid, s->port.active_mtu,
        (unsigned long long)s->gid.global.subnet_prefix, (unsigned long long)s->gid.global.interface_id);
    unsigned qpn, lid, mtu;
    unsigned long long prefix, interface;
    expect(fscanf(s->in, "%u %u %u %llx %llx", &qpn, &lid, &mtu, &prefix, &interface), 5);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags =
                               IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC};
    int rc = ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .dest_qp_num = qpn, .max_dest_rd_atomic = 4, .min_rnr_timer = 12,
        .path_mtu = mtu < s->port.active_mtu ? mtu : s->port.active_mtu,
        .ah_attr = {.is_global = 1, .dlid = (uint16_t)lid, .port_num = 1, .grh = {.hop_limit = 64, .sgid_index =
                    (uint8_t)s->gid_index, .dgid.global = {.subnet_prefix = prefix, .interface_id = interface}}}};
    if (!rc) rc = ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4};
    if (!rc) rc = ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    if (rc) die("ibv_modify_qp: %s", strerror(rc));
}

/* Moves n bytes between p and the other side, and waits until they have moved. */
static void transfer(side *s, enum ibv_wr_opcode opcode, void *p, size_t n, uint64_t remote, uint32_t rkey) {
    struct ibv_sge local = {(uintptr_t)p, (uint32_t)n, (uint32_t)key_of(p).lkey};
    struct ibv_send_wr request = {.opcode = opcode, .sg_list = &local, .num_sge = 1}, *bad;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        request.wr.atomic.remote_addr = remote;
        request.wr.atomic.rkey = rkey;
        request.wr.atomic.compare_add = 3;
    } else {
        request.wr.rdma.remote_addr = remote;
        request.wr.rdma.rkey = rkey;
    }
    int rc = ibv_post_send(s->qp, &request, &bad), found;
    if (rc) die("ibv_post_send: %s", strerror(rc));
    struct ibv_wc done;
    time_t end = time(NULL) + TIMEOUT_S;
    while (!(found = ibv_poll_cq(s->cq, 1, &done)))
        if (time(NULL) > end) die("no completion within %d s", TIMEOUT_S);
    if (found < 0 || done.status) die("the transfer failed: %s", found < 0 ? "polling" : ibv_wc_status_str(done.status));
}

/* ---- the two sides ------------------------------------------------------------------------------------------------- */

static void serve(side *s, const options *o) {
    connect_queue(s);
    say(s, "%zu\n", o->count);
    for (size_t i = 0; i <= o->count; i++) {
        jemhooks_key key = key_of(i < o->count ? (void *)s->buffer[i] : s->counter);
        say(s, "%llx %llx\n", (unsigned long long)key.addr, (unsigned long long)key.rkey);
    }
    be_patient(fileno(s->in), 0); /* the client's transfers are not seen here */
    expect(fscanf(s->in, " written%n", &(int){0}), 0);
    expect(fgetc(s->in), '\n');
    say(s, "%zu\n", wrong(s, o, 1));
    fill(s, o, 2);
    say(s, "refilled\n");
    expect(fgetc(s->in), 'e');
    say(s, "%llu\n", (unsigned long long)*s->counter);
}

static size_t run(side *s, const options *o) {
    static struct { unsigned long long address, rkey; } there[MAX_BUFFERS + 1];
    size_t count, bad, total = 0;
    connect_queue(s);
    expect(fscanf(s->in, "%zu", &count), 1);
    if (count != o->count) expect(0, 1);
    for (size_t i = 0; i <= count; i++) expect(fscanf(s->in, "%llx %llx", &there[i].address, &there[i].rkey), 2);
    fill(s, o, 1);
    for (size_t i = 0; i < count; i++) {
        transfer(s, IBV_WR_RDMA_WRITE, s->buffer[i], length(o, i), there[i].address, (uint32_t)there[i].rkey);
        total += length(o, i);
    }
    say(s, "written\n");
    expect(fscanf(s->in, "%zu refilled", &bad), 1);
    for (size_t i = 0; i < count; i++)
        transfer(s, IBV_WR_RDMA_READ, s->buffer[i], length(o, i), there[i].address, (uint32_t)there[i].rkey);
    bad += wrong(s, o, 2);
    for (uint64_t n = 0; n < ADDITIONS; n++) {
        transfer(s, IBV_WR_ATOMIC_FETCH_AND_ADD, s->counter, 8, there[count].address, (uint32_t)there[count].rkey);
        bad += *s->counter != 3 * n;
    }
    unsigned long long counted;
    say(s, "e");
    expect(fscanf(s->in, "%llu", &counted), 1);
    bad += counted != 3 * ADDITIONS;
    jemhooks_stats stats = {.size = sizeof stats};
    if (jemhooks_get_stats(s->arena, &stats)) die("%s", jemhooks_last_error());
    printf("%s: %zu writes, %zu reads, %d additions, %zu bytes each way: %zu wrong; %llu registrations\n",
           ibv_get_device_name(s->context->device), count, count, ADDITIONS, total, bad,
           (unsigned long long)stats.registrations);
    return bad;
}

static int one_side(const options *o, bool server, int fd) {
    static side s;
    open_side(&s, o);
    listen_to(&s, fd);
    size_t bad = 0;
    if (server) serve(&s, o);
    else bad = run(&s, o);
    close_side(&s, o);
    return bad != 0;
}

static int tcp(const options *o) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = o->server ? AI_PASSIVE : 0}, *found;
    int rc = getaddrinfo(o->host, o->port, &hints, &found), on = 1, fd = -1;
    if (rc) die("%s port %s: %s", o->host ? o->host : "any address", o->port, gai_strerror(rc));
    time_t end = time(NULL) + TIMEOUT_S;
    struct addrinfo *at = found;
    do { /* one address after the other; the server may still be starting */
        if (fd >= 0) close(fd), usleep(100000);
        fd = socket(at->ai_family, SOCK_STREAM, 0);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        rc = o->server ? bind(fd, at->ai_addr, at->ai_addrlen) : connect(fd, at->ai_addr, at->ai_addrlen);
        at = at->ai_next ? at->ai_next : found;
    } while (rc && !o->server && time(NULL) < end);
    if (rc || (o->server && listen(fd, 1))) die("%s port %s: %s", o->host ? o->host : "own", o->port, strerror(errno));
    freeaddrinfo(found);
    int connection = o->server ? accept(fd, NULL, NULL) : fd;
    if (connection < 0) die("accept: %s", strerror(errno));
    return connection;
}

static int loopback(const options *o) {
    int pair[2], status = 1;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) die("socketpair: %s", strerror(errno));
    pid_t child = fork(); /* before anything of jemhooks or ibverbs exists */
    if (child < 0) die("fork: %s", strerror(errno));
    close(pair[!child]);
    if (!child) exit(one_side(o, true, pair[0]));
    int bad = one_side(o, false, pair[1]);
    waitpid(child, &status, 0);
    return bad || status;
}

static size_t number(const char *text, const char *what, size_t least, size_t most) {
    char *end;
    unsigned long long n = strtoull(text, &end, 10);
    if (*end || !*text || *text == '-' || n < least || n > most) {
        fprintf(stderr, "verbs_rma: %s %s is not a number from %zu to %zu\n%s", what, text, least, most, usage);
        exit(2);
    }
    return (size_t)n;
}

int main(int argc, char **argv) {
    static const struct option names[] = {{"loopback", 0, 0, 'l'}, {"server", 0, 0, 's'}, {"client", 1, 0, 'c'},
        {"port", 1, 0, 'p'}, {"device", 1, 0, 'd'}, {"gid-index", 1, 0, 'g'}, {"size", 1, 0, 'b'}, {"count", 1, 0, 'n'},
        {"help", 0, 0, 'h'}, {0, 0, 0, 0}};
    options o = {.port = "18517", .gid_index = -1, .size = 262144, .count = 50};
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) >= 0;) switch (c) {
        case 'l': o.loopback = true; break;
        case 's': o.server = true; break;
        case 'c': o.host = optarg; break;
        case 'p': number(o.port = optarg, "port", 1, 65535); break;
        case 'd': o.device = optarg; break;
        case 'g': o.gid_index = (int)number(optarg, "GID index", 0, 255); break;
        case 'b': o.size = number(optarg, "size", 1, 1 << 30); break;
        case 'n': o.count = number(optarg, "count", 1, MAX_BUFFERS); break;
        case 'h': fputs(usage, stdout); return 0;
        default: fputs(usage, stderr); return 2;
        }
    if (optind < argc || o.loopback + o.server + !!o.host != 1) {
        fputs(usage, stderr);
        return 2;
    }
    return o.loopback ? loopback(&o) : one_side(&o, o.server, tcp(&o));
}
