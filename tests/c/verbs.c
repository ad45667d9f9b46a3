/* verbs.c - the registrar "verbs" from C over real queue pairs: its own protection domain and the caller's, two rails, and
 * RDMA writes into live blocks while other threads free, purge, trim and allocate. Needs the guest of ci/vm.
 *     test_verbs [case=…] transfers=2000 limit=0
 * With limit (MiB) the storm may register no more at a time, and regions are evicted all the time.
 * Concurrency: every writing thread has two queue pairs of its own, connected to each other; the arena is shared.      */
#include "check.h"
#include "jemhooks_verbs.h"

#include <infiniband/verbs.h>
#include <time.h>

typedef struct queue {
    struct ibv_cq *cq;
    struct ibv_qp *qp, *peer;
} queue;

static jemhooks_registrar *open_verbs(const char *device, struct ibv_pd *pd) {
    jemhooks_verbs_config config = JEMHOOKS_VERBS_CONFIG_INIT;
    jemhooks_registrar *r;
    config.device = device;
    config.pd = pd;
    MUST(jemhooks_registrar_open("verbs", &config, &r));
    return r;
}

static jemhooks_verbs_info info_of(jemhooks_registrar *r) {
    jemhooks_verbs_info info = {.size = sizeof info};
    MUST(jemhooks_verbs_get_info(r, &info));
    return info;
}

static void connect_to(struct ibv_qp *qp, uint32_t peer, enum ibv_mtu mtu, union ibv_gid gid, int index) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1,
                               .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE};
    MUST(-ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .dest_qp_num = peer, .path_mtu = mtu, .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 64, .sgid_index = (uint8_t)index, .dgid = gid}}};
    MUST(-ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    MUST(-ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                        IBV_QP_MAX_QP_RD_ATOMIC));
}

/* A reliable connected queue pair, with its peer on the same device. */
static queue queue_on(struct ibv_pd *pd) {
    static const unsigned char ipv4[12] = {[10] = 0xff, [11] = 0xff};
    struct ibv_port_attr port;
    union ibv_gid gid;
    int index = -1;
    MUST(-ibv_query_port(pd->context, 1, &port));
    do MUST(ibv_query_gid(pd->context, 1, ++index, &gid));
    while (memcmp(&gid, ipv4, sizeof ipv4));
    queue q = {.cq = must_have(ibv_create_cq(pd->context, 16, NULL, NULL, 0), "completion queue")};
    struct ibv_qp_init_attr init = {.send_cq = q.cq, .recv_cq = q.cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
                                    .cap = {.max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
    q.qp = must_have(ibv_create_qp(pd, &init), "queue pair");
    q.peer = must_have(ibv_create_qp(pd, &init), "queue pair");
    connect_to(q.qp, q.peer->qp_num, port.active_mtu, gid, index);
    connect_to(q.peer, q.qp->qp_num, port.active_mtu, gid, index);
    return q;
}

static void queue_end(queue q) {
    MUST(-ibv_destroy_qp(q.qp));
    MUST(-ibv_destroy_qp(q.peer));
    MUST(-ibv_destroy_cq(q.cq));
}

/* Writes n bytes from p to `remote`; how it completed. */
static enum ibv_wc_status put(queue q, const void *p, uint64_t lkey, size_t n, uint64_t remote, uint64_t rkey) {
    struct ibv_sge piece = {(uintptr_t)p, (uint32_t)n, (uint32_t)lkey};
    struct ibv_send_wr request = {.opcode = IBV_WR_RDMA_WRITE, .sg_list = &piece, .num_sge = 1,
                                  .wr.rdma = {.remote_addr = remote, .rkey = (uint32_t)rkey}}, *bad;
    struct ibv_wc done = {.status = IBV_WC_GENERAL_ERR};
    MUST(-ibv_post_send(q.qp, &request, &bad));
    for (time_t end = time(NULL) + 60; time(NULL) < end && !ibv_poll_cq(q.cq, 1, &done);) {}
    return done.status;
}

static jemhooks_key key_of(const void *p, unsigned rail) {
    jemhooks_key key;
    MUST(jemhooks_get_rail_key(p, rail, &key));
    return key;
}

/* A transfer of n bytes from one block to another, on a rail of their arena, by a queue pair of its protection domain. */
static void check_transfer(const char *what, jemhooks_arena *arena, queue q, unsigned rail) {
    unsigned char *from = must_have(jemhooks_alloc(arena, MIB), "block"), *to = must_have(jemhooks_calloc(arena, 1, MIB), "block");
    fill(from, MIB, 7);
    jemhooks_key key = key_of(to, rail);
    CHECK("address", key.addr == (uintptr_t)to, "%s: the remote address is not the address", what);
    enum ibv_wc_status status = put(q, from, key_of(from, rail).lkey, MIB, key.addr, key.rkey);
    CHECK("transfer", !status && filled(to, MIB, MIB, 7), "%s: %s", what, ibv_wc_status_str(status));
    MUST(jemhooks_free(from));
    MUST(jemhooks_free(to));
}

/* ---- protection domains ------------------------------------------------------------------------------------------- */

static void own_domain(void) {
    jemhooks_registrar *verbs = open_verbs("rxe1", NULL);
    jemhooks_verbs_info info = info_of(verbs);
    CHECK("info", !strcmp(info.device, "rxe1") && info.atomics && info.ports == 1 && info.context == info.pd->context,
          "device %s, %u ports", info.device, info.ports);
    jemhooks_arena *arena = arena_on(NULL, &verbs, 1);
    queue q = queue_on(info.pd);
    check_transfer("own", arena, q, 0);
    unsigned char *p = must_have(jemhooks_alloc(arena, 100), "block");
    jemhooks_key old = key_of(p, 0);
    MUST(jemhooks_revoke(arena));
    memset(p, 0xEE, 100);
    unsigned char *from = must_have(jemhooks_alloc(arena, 3 * MIB), "block"); /* in another region */
    enum ibv_wc_status status = put(q, from, key_of(from, 0).lkey, 100, old.addr, old.rkey);
    CHECK("stale", status == IBV_WC_REM_ACCESS_ERR && p[0] == 0xEE && p[99] == 0xEE,
          "a key after its deregistration: %s", ibv_wc_status_str(status));
    queue_end(q);
    MUST(jemhooks_free(p));
    MUST(jemhooks_free(from));
    arena_end(arena);
    jemhooks_registrar_close(verbs);
}

static struct ibv_context *context_of(const char *name) {
    int n;
    struct ibv_device **list = must_have(ibv_get_device_list(&n), "list of devices");
    struct ibv_context *context = NULL;
    for (int i = 0; i < n && !context; i++)
        if (!strcmp(name, ibv_get_device_name(list[i]))) context = ibv_open_device(list[i]);
    ibv_free_device_list(list);
    return must_have(context, name);
}

static void two_rails(void) {
    static const char *const name[] = {"rxe0", "rxe1"};
    struct ibv_pd *pd[2];
    jemhooks_registrar *rail[2], *none;
    for (int i = 0; i < 2; i++) {
        pd[i] = must_have(ibv_alloc_pd(context_of(name[i])), "protection domain");
        rail[i] = open_verbs(i ? name[i] : NULL, pd[i]);
        CHECK("info", !strcmp(info_of(rail[i]).device, name[i]) && info_of(rail[i]).pd == pd[i], "not the domain given");
    }
    jemhooks_verbs_config config = JEMHOOKS_VERBS_CONFIG_INIT;
    config.pd = pd[0];
    config.device = "rxe1";
    CHECK("wrong", jemhooks_registrar_open("verbs", &config, &none) == -EINVAL &&
          strstr(jemhooks_last_error(), "is of device rxe0, not of rxe1"), "%s", jemhooks_last_error());
    config = (jemhooks_verbs_config){.size = sizeof config, .device = "mlx5_3"};
    CHECK("wrong", jemhooks_registrar_open("verbs", &config, &none) == -ENODEV &&
          strstr(jemhooks_last_error(), "no device is named mlx5_3; this host has rxe0, rxe1"), "%s", jemhooks_last_error());
    jemhooks_arena *arena = arena_on(NULL, rail, 2);
    for (unsigned i = 0; i < 2; i++) {
        queue q = queue_on(pd[i]);
        check_transfer(name[i], arena, q, i);
        queue_end(q);
    }
    CHECK("busy", ibv_dealloc_pd(pd[0]) == EBUSY, "a protection domain with registrations was deallocated");
    arena_end(arena);
    for (int i = 0; i < 2; i++) {
        struct ibv_context *context = pd[i]->context;
        jemhooks_registrar_close(rail[i]);
        MUST(-ibv_dealloc_pd(pd[i]));
        MUST(-ibv_close_device(context));
    }
}

/* ---- a storm ------------------------------------------------------------------------------------------------------- */

static jemhooks_arena *shared;
static jemhooks_registrar *storming;
static atomic_bool stop;
static long limit; /* MiB; 0: none */

/* Under a budget only leased keys are good, and no more is pinned than it allows: the kernel's account, not ours. */
static jemhooks_key key_to_use(const void *p) {
    jemhooks_key key;
    if (!limit) return key_of(p, 0);
    MUST(jemhooks_lease(p, &key));
    return key;
}

static void key_used(const void *p) {
    if (!limit) return;
    MUST(jemhooks_release(p));
    long pinned = status_kib("VmPin");
    CHECK("budget", pinned <= limit * 1024, "%ld KiB are pinned, with a pin_limit of %ld MiB", pinned, limit);
}

static void *write_always(void *arg) {
    dice d = {(uint64_t)(uintptr_t)arg};
    queue q = queue_on(info_of(storming).pd);
    for (long n = 0; n < option("transfers", 2000) && !anything_violated(); n++) {
        size_t size = 1 + roll_below(&d, 9000), room = n % 4 ? size : MIB + MIB / 2;
        unsigned char *from = must_have(jemhooks_alloc(shared, size), "block");
        unsigned char *to = must_have(jemhooks_alloc(shared, room), "block");
        fill(from, size, (uint64_t)n);
        memset(to, 0xEE, size);
        uint64_t lkey = key_to_use(from).lkey, rkey = key_to_use(to).rkey;
        enum ibv_wc_status status = put(q, from, lkey, size, (uintptr_t)to, rkey);
        key_used(from);
        key_used(to);
        CHECK("transfer", !status, "a write into a live block: %s", ibv_wc_status_str(status));
        CHECK("stale", filled(to, size, size, (uint64_t)n), "the CPU does not see what the device wrote");
        MUST(jemhooks_free(from));
        MUST(jemhooks_free(to));
        if (room > size && !limit) MUST(jemhooks_trim(shared, NULL)); /* most of a region has become idle */
    }
    queue_end(q);
    return NULL;
}

/* Under a budget its blocks lie in more regions than may be registered, and it asks for the keys of all. */
static void *churn(void *arg) {
    enum { MOST = 24 };
    dice d = {(uint64_t)(uintptr_t)arg};
    static const size_t sizes[] = {64, 4000, 60000, 700000};
    while (!atomic_load(&stop)) {
        void *p[MOST];
        size_t size[MOST];
        int n = limit ? MOST : 8;
        for (int i = 0; i < n; i++) {
            size[i] = sizes[limit ? 3 : roll_below(&d, 4)];
            p[i] = must_have(jemhooks_alloc(shared, size[i]), "block");
            fill(p[i], size[i], (uint64_t)i);
            jemhooks_key key;
            if (limit) MUST(jemhooks_get_key(p[i], &key));
        }
        for (int i = 0; i < n; i++) {
            CHECK("foreign", filled(p[i], size[i], size[i], (uint64_t)i), "a transfer to another block came here");
            MUST(jemhooks_free(p[i]));
        }
        if (!limit) MUST(jemhooks_trim(shared, NULL));
    }
    return NULL;
}

static void storm(void) {
    jemhooks_anonymous_config memory = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    limit = option("limit", 0);
    memory.transparent_huge = 0; /* or whole huge pages are pinned */
    MUST(jemhooks_provider_anonymous(&memory, &config.provider));
    storming = open_verbs("rxe0", NULL);
    config.registrars = &storming;
    config.registrar_count = 1;
    config.dirty_decay_ms = config.muzzy_decay_ms = 0;
    if (limit) config.pin_limit = (uint64_t)limit * MIB, config.region_max = SLOT, config.evict = JEMHOOKS_EVICT_UNLEASED;
    shared = arena_of(&config);
    jemhooks_provider_close(config.provider);
    pthread_t writer[2], other[2];
    for (size_t i = 0; i < 2; i++) writer[i] = start_thread(write_always, (void *)(i + 1));
    for (size_t i = 0; i < 2; i++) other[i] = start_thread(churn, (void *)(i + 3));
    for (int i = 0; i < 2; i++) join_thread(writer[i]);
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++) join_thread(other[i]);
    figure("registrations", (double)stats_of(shared).registrations);
    figure("evictions", (double)stats_of(shared).evictions);
    if (limit)
        CHECK("budget", stats_of(shared).evictions > (uint64_t)option("transfers", 2000) / 10, "only %zu evictions",
              (size_t)stats_of(shared).evictions);
    CHECK("churn", stats_of(shared).deregistrations > (uint64_t)option("transfers", 2000) / 100, "only %zu deregistrations",
          (size_t)stats_of(shared).deregistrations);
    arena_end(shared);
    jemhooks_registrar_close(storming);
}

int main(int argc, char **argv) {
    static const test_case cases[] = {
        {"own_domain", own_domain}, {"two_rails", two_rails}, {"storm", storm}, {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
