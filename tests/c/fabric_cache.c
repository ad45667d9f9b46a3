/* fabric_cache.c - libfabric's own cache of memory regions over memory of an arena, through its verbs provider: told by
 * jemhooks' adapter it keeps nothing stale, and caches no memory but ours; with the monitor of somebody who does not see us it
 * does. A device reads by the key that libfabric gives. Needs the guest of ci/vm.
 *     test_fabric_cache told=1 rounds=40
 *     test_fabric_cache case=late                 a domain is open already
 * Concurrency: none. */
#include "check.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>
#include <stdio.h>
#include <sys/mman.h>

static const char address[] = "10.7.0.1"; /* of rxe0 */

static void did(long result, const char *call) {
    if (result >= 0) return;
    violated("setup", "%s: %s", call, fi_strerror((int)-result));
    exit(1);
}
#define DO(call) did((call), #call)

/* ---- an endpoint connected to another one of this process ---------------------------------------------------------- */

static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_eq *events;
static struct fid_cq *done;
static struct fid_pep *listener;
static struct fid_ep *here, *there;

static struct fi_info *info_for(uint64_t flags) {
    struct fi_info *hints = fi_allocinfo(), *found;
    hints->ep_attr->type = FI_EP_MSG;
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->fabric_attr->prov_name = strdup("verbs");
    DO(fi_getinfo(FI_VERSION(1, 17), address, "7471", flags, hints, &found));
    fi_freeinfo(hints);
    return found;
}

static uint32_t next_event(struct fi_eq_cm_entry *entry) {
    char room[512];
    uint32_t kind;
    DO(fi_eq_sread(events, &kind, room, sizeof room, 30000, 0));
    memcpy(entry, room, sizeof *entry);
    return kind;
}

static struct fid_ep *endpoint(struct fi_info *info) {
    struct fid_ep *ep;
    DO(fi_endpoint(domain, info, &ep, NULL));
    DO(fi_ep_bind(ep, &events->fid, 0));
    DO(fi_ep_bind(ep, &done->fid, FI_TRANSMIT | FI_RECV));
    DO(fi_enable(ep));
    return ep;
}

static void open_domain(void) {
    struct fi_eq_attr eq = {.wait_obj = FI_WAIT_UNSPEC};
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_CONTEXT, .size = 64};
    struct fi_info *listening = info_for(FI_SOURCE), *calling = info_for(0);
    struct fi_eq_cm_entry entry;
    DO(fi_fabric(listening->fabric_attr, &fabric, NULL));
    DO(fi_eq_open(fabric, &eq, &events, NULL));
    DO(fi_passive_ep(fabric, listening, &listener, NULL));
    DO(fi_pep_bind(listener, &events->fid, 0));
    DO(fi_listen(listener));
    DO(fi_domain(fabric, calling, &domain, NULL));
    DO(fi_cq_open(domain, &cq, &done, NULL));
    here = endpoint(calling);
    DO(fi_connect(here, calling->dest_addr, NULL, 0));
    CHECK("setup", next_event(&entry) == FI_CONNREQ, "no connection request");
    there = endpoint(entry.info);
    DO(fi_accept(there, NULL, 0));
    next_event(&entry);
    next_event(&entry);
    fi_freeinfo(listening);
    fi_freeinfo(calling);
}

static void close_domain(void) {
    fi_close(&here->fid);
    fi_close(&there->fid);
    fi_close(&listener->fid);
    fi_close(&done->fid);
    fi_close(&events->fid);
    DO(fi_close(&domain->fid));
    DO(fi_close(&fabric->fid));
}

static struct fid_mr *reg(void *p, size_t length) {
    struct fid_mr *mr;
    DO(fi_mr_reg(domain, p, length, FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL));
    return mr;
}

static void read_by_device(char *into, struct fid_mr *local, const char *from, uint64_t key, size_t length) {
    struct fi_cq_entry entry;
    ssize_t n;
    DO(fi_read(here, into, length, fi_mr_desc(local), 0, (uintptr_t)from, key, NULL));
    while ((n = fi_cq_read(done, &entry, 1)) == -FI_EAGAIN) {}
    DO(n);
}

/* ---- somebody else's monitor, that does not see us ------------------------------------------------------------------ */

static int other_start(struct fid_mem_monitor *m) {
    (void)m;
    return 0;
}
static void other_stop(struct fid_mem_monitor *m) {
    (void)m;
}
static int other_subscribe(struct fid_mem_monitor *m, const void *p, size_t length) {
    (void)m, (void)p, (void)length;
    return 0;
}
static void other_unsubscribe(struct fid_mem_monitor *m, const void *p, size_t length) {
    (void)m, (void)p, (void)length;
}
static bool other_valid(struct fid_mem_monitor *m, const void *p, size_t length) {
    (void)m, (void)p, (void)length;
    return true;
}

static void import_other(void) {
    static struct fi_ops_mem_monitor ops = {sizeof ops, other_start, other_stop, other_subscribe, other_unsubscribe, other_valid};
    static struct fid_mem_monitor monitor = {.fid.fclass = FI_CLASS_MEM_MONITOR, .export_ops = &ops};
    fi_freeinfo(info_for(0)); /* first, or libfabric crashes */
    DO(fi_import(FI_VERSION(1, 13), "mr_cache", NULL, 0, 0, &monitor.fid, NULL));
}

/* ---- cases --------------------------------------------------------------------------------------------------------- */

/* Registered, its registration ended (so that it is libfabric's cache that has it), freed, and its pages gone: what does a
 * device read at the same address afterwards? */
static void cached(void) {
    enum { SIZE = 64 << 10 };
    size_t stale = 0, went = 0, again = 0;
    if (option("told", 1))
        for (int i = 0; i < 2; i++) MUST(jemhooks_notify_cache("fabric"));
    else import_other();
    open_domain();
    char *result = map_aligned(SLOT, PROT_READ | PROT_WRITE);
    struct fid_mr *local = reg(result, SIZE);
    jemhooks_anonymous_config memory = JEMHOOKS_ANONYMOUS_CONFIG_INIT;
    jemhooks_provider *provider;
    memory.transparent_huge = 0;
    MUST(jemhooks_provider_anonymous(&memory, &provider));
    jemhooks_arena *arena = arena_on(provider, NULL, 0);
    for (long round = 0; round < option("rounds", 40); round++) {
        char *p = must_have(jemhooks_aligned_alloc(arena, PAGE, SIZE), "block");
        memset(p, 'o', SIZE);
        struct fid_mr *mr = reg(p, SIZE);
        uint64_t first = fi_mr_key(mr);
        DO(fi_close(&mr->fid));
        mr = reg(p, SIZE);
        again += fi_mr_key(mr) == first;
        DO(fi_close(&mr->fid));
        MUST(jemhooks_free(p));
        MUST(jemhooks_trim(arena, NULL));
        char *q = must_have(jemhooks_aligned_alloc(arena, PAGE, SIZE), "block");
        if (q == p && *q != 'o') {
            went++;
            memset(q, 'n', SIZE);
            mr = reg(q, SIZE);
            read_by_device(result, local, q, fi_mr_key(mr), SIZE);
            stale += memcmp(result, q, SIZE) != 0;
            DO(fi_close(&mr->fid));
        }
        MUST(jemhooks_free(q));
    }
    CHECK("setup", again, "libfabric caches nothing, so nothing was tested");
    CHECK("setup", went, "the pages of no block went, so nothing was tested");
    CHECK("stale", !stale, "%zu of %zu times a device read pages that had gone", stale, went);
    figure("went", (double)went);
    arena_end(arena);
    jemhooks_provider_close(provider);
    DO(fi_close(&local->fid));
    close_domain();
}

/* Nobody tells us when memory of others goes: it must not be cached. */
static void foreign(void) {
    if (!option("told", 1)) return;
    MUST(jemhooks_notify_cache("fabric"));
    open_domain();
    char *p = map_aligned(SLOT, PROT_READ | PROT_WRITE);
    long before = status_kib("VmPin");
    struct fid_mr *mr = reg(p, SLOT);
    CHECK("foreign", status_kib("VmPin") > before, "memory outside of arenas was not registered");
    DO(fi_close(&mr->fid));
    check_pinned("after memory outside of arenas was deregistered", (size_t)before * KIB);
    close_domain();
}

static void late(void) {
    open_domain();
    struct fid_mr *mr = reg(map_aligned(SLOT, PROT_READ | PROT_WRITE), SLOT); /* its cache is in use */
    int rc = jemhooks_notify_cache("fabric");
    CHECK("late", rc == -EBUSY && jemhooks_last_error_kind() == JEMHOOKS_ERROR_BUSY && strstr(jemhooks_last_error(), "first fi_domain"),
          "with a domain open: %d, %s", rc, jemhooks_last_error());
    DO(fi_close(&mr->fid));
    close_domain();
    jemhooks_arena *arena = arena_on(NULL, NULL, 0);
    MUST(jemhooks_free(must_have(jemhooks_alloc(arena, MIB), "block")));
    arena_end(arena);
}

static void disabled(void) {
    setenv("FI_MR_CACHE_MONITOR", "disabled", 1);
    int rc = jemhooks_notify_cache("fabric");
    CHECK("disabled", rc == -EINVAL && strstr(jemhooks_last_error(), "disabled"), "switched off: %d, %s", rc, jemhooks_last_error());
    unsetenv("FI_MR_CACHE_MONITOR");
}

int main(int argc, char **argv) {
    static const test_case cases[] = {
        {"disabled", disabled}, {"late", late}, {"cached", cached}, {"foreign", foreign}, {NULL, NULL}};
    take_options(argc, argv);
    return run_cases(cases);
}
