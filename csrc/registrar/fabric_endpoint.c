/* fabric_endpoint.c - one libfabric endpoint for one-sided transfers: put, get, wait.
 *
 * Each transfer is an operation in a fixed table; its ticket is its place and generation. Operations go free -> ready
 * -> flying -> (ready, for the next piece, or where the provider said FI_EAGAIN) -> done -> free. A piece is what one
 * message of the provider can hold; one piece of an operation flies at a time.
 * Concurrency: `lock` guards the table and is never held while libfabric moves data or anyone sleeps. An operation is
 * made flying before it is posted: from a successful post on it belongs to its completion, after a failed one still to
 * the poster. Only one thread at a time, the leader, reads the completion queue and sleeps on it; the others wait for
 * `changed`, which the leader signals after each round, and one of them follows it.                                  */
#include <poll.h>
#include <pthread.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fabric.h"

/* The longest sleep between two looks at the completion queue, should the provider not wake us: ns. */
#define NAP_WITH_FD 5000000
#define NAP_WITHOUT_FD 50000

/* A provider that drops its connection for a failed transfer (tcp) notices only when polled for a while, and until then
 * fails everything posted to that peer, unsent. So after a failure nothing is posted for SETTLING, and what was not sent
 * is tried again for RECONNECTING. ns. */
#define SETTLING 30000000
#define RECONNECTING 2000000000

enum state { FREE, READY, FLYING, DONE };

/* What is given to the provider at once. */
typedef struct piece {
    bool write;
    fi_addr_t peer;
    unsigned char *local;
    void *descriptor;
    uint64_t remote, rkey;
    size_t length;
} piece;

typedef struct operation {
    struct fi_context2 context; /* first: the provider's own from post to completion                        */
    struct operation *next;     /* in the free or the ready list                                            */
    uint32_t generation;
    enum state state;
    bool forgotten;
    piece piece;                /* the one that is ready or flying                                          */
    size_t left, length;        /* bytes: not done yet, this piece included; in all                         */
    int64_t give_up;            /* when to stop trying to reach its peer; 0: it was reached                 */
    int error;                  /* how it ended: 0 or -errno, then with a text                              */
    char text[160];
} operation;

typedef struct queue {
    operation *first, **last;
} queue;

struct endpoint {
    const fabric_registrar *fabric;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool led;                  /* some thread is the leader                                                 */
    uint64_t events;           /* completions seen, to know whether a look found any                        */
    int64_t settled;           /* when posting may go on after a failed transfer                            */
    operation *free;
    queue ready;
    operation *operations;
    uint32_t count, outstanding;
    fi_addr_t *peers;
    size_t peer_count;
};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void enqueue(queue *q, operation *o) {
    o->next = NULL;
    *q->last = o;
    q->last = &o->next;
}

static void empty(queue *q) {
    q->first = NULL;
    q->last = &q->first;
}

/* ---- operations: all with the lock held ------------------------------------------------------------------------ */

static void recycle(endpoint *e, operation *o) {
    o->state = FREE;
    o->generation++;
    o->next = e->free;
    e->free = o;
    e->outstanding--;
}

static void finish(endpoint *e, operation *o, int error) {
    o->state = DONE;
    o->error = error;
    if (o->forgotten) recycle(e, o);
}

/* To be posted, unless nobody wants it any more. */
static void make_ready(endpoint *e, operation *o) {
    o->state = READY;
    if (o->forgotten) recycle(e, o);
    else enqueue(&e->ready, o);
}

/* Not sent since there is no connection: is it to be tried again? */
static bool try_again(endpoint *e, operation *o, ssize_t error) {
    if (error != FI_ENOTCONN) return false;
    e->settled = now() + SETTLING;
    if (!o->give_up) o->give_up = now() + RECONNECTING;
    if (now() > o->give_up) return false;
    make_ready(e, o);
    return true;
}

static operation *find_ticket(endpoint *e, uint64_t ticket) {
    uint32_t place = (uint32_t)ticket;
    operation *o = place < e->count ? &e->operations[place] : NULL;
    return o && o->state != FREE && !o->forgotten && o->generation == ticket >> 32 ? o : NULL;
}

/* The operation of a completion; NULL for contexts that are not ours, which some providers report with errors. */
static operation *find_context(endpoint *e, void *context) {
    uintptr_t offset = (uintptr_t)context - (uintptr_t)e->operations;
    if (offset >= e->count * sizeof(operation) || offset % sizeof(operation)) return NULL;
    operation *o = context;
    return o->state == FLYING ? o : NULL;
}

/* The next piece begins where the last one ended. */
static void cut_piece(endpoint *e, operation *o) {
    size_t most = e->fabric->info->ep_attr->max_msg_size;
    o->piece.local += o->piece.length;
    o->piece.remote += o->piece.length;
    o->piece.length = o->left < most ? o->left : most;
}

static void piece_done(endpoint *e, operation *o) {
    o->left -= o->piece.length;
    o->give_up = 0;
    cut_piece(e, o);
    if (o->left) make_ready(e, o);
    else finish(e, o, 0);
}

/* ---- talking to the provider ----------------------------------------------------------------------------------- */

/* Without the lock. A put completes only when its bytes are in the target's memory. */
static ssize_t post(const fabric_registrar *f, piece *p, void *context) {
    struct iovec local = {p->local, p->length};
    struct fi_rma_iov remote = {p->remote, p->length, p->rkey};
    struct fi_msg_rma message = {.msg_iov = &local, .desc = &p->descriptor, .iov_count = 1, .addr = p->peer,
                                 .rma_iov = &remote, .rma_iov_count = 1, .context = context};
    if (p->write) return fi_writemsg(f->ep, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
    return fi_readmsg(f->ep, &message, FI_COMPLETION);
}

/* Posts what is ready. The lock is held on entry and exit, and released in between. */
static void post_ready(endpoint *e) {
    if (now() < e->settled) return;
    operation *next = e->ready.first;
    empty(&e->ready);
    for (operation *o = next; o; o = o->next) o->state = FLYING;
    while (next) {
        operation *o = next;
        next = o->next; /* all now: once posted it may be done, and used again */
        piece p = o->piece;
        pthread_mutex_unlock(&e->lock);
        ssize_t result = post(e->fabric, &p, &o->context);
        pthread_mutex_lock(&e->lock);
        if (result == -FI_EAGAIN) make_ready(e, o);
        else if (result && !try_again(e, o, -result)) {
            snprintf(o->text, sizeof o->text, "not accepted: %s", fi_strerror((int)-result));
            finish(e, o, fabric_errno(result));
        }
    }
}

static bool take_error(endpoint *e) {
    struct fi_cq_err_entry entry;
    memset(&entry, 0, sizeof entry);
    if (fi_cq_readerr(e->fabric->cq, &entry, 0) != 1) return false;
    char buffer[80] = "";
    const char *detail = fi_cq_strerror(e->fabric->cq, entry.prov_errno, entry.err_data, buffer, sizeof buffer);
    pthread_mutex_lock(&e->lock);
    e->events++;
    e->settled = now() + SETTLING;
    operation *o = find_context(e, entry.op_context);
    if (o && !try_again(e, o, entry.err)) {
        snprintf(o->text, sizeof o->text, "%s (provider error %d: %s)", fi_strerror(entry.err), entry.prov_errno,
                 detail ? detail : "unknown");
        finish(e, o, entry.err ? fabric_errno(entry.err) : -EIO);
    }
    pthread_mutex_unlock(&e->lock);
    return true;
}

/* The leader's: takes all completions there are, which also is what moves a manual-progress provider. */
static void take_completions(endpoint *e) {
    for (;;) {
        struct fi_cq_entry entries[16];
        ssize_t n = fi_cq_read(e->fabric->cq, entries, 16);
        if (n == -FI_EAVAIL && take_error(e)) continue;
        if (n <= 0) return;
        pthread_mutex_lock(&e->lock);
        for (ssize_t i = 0; i < n; i++) {
            operation *o = find_context(e, entries[i].op_context);
            if (o) piece_done(e, o);
            e->events++;
        }
        pthread_mutex_unlock(&e->lock);
    }
}

static void nap(endpoint *e, int64_t longest) {
    struct fid *fid = &e->fabric->cq->fid;
    if (e->fabric->wait_fd >= 0 && fi_trywait(e->fabric->fabric, &fid, 1) == -FI_EAGAIN) return; /* work is there */
    int64_t cap = e->fabric->wait_fd >= 0 ? NAP_WITH_FD : NAP_WITHOUT_FD;
    struct timespec t = {0, longest < cap ? longest : cap};
    struct pollfd p = {.fd = e->fabric->wait_fd, .events = POLLIN};
    ppoll(&p, e->fabric->wait_fd >= 0, &t, NULL);
}

/* One round towards `until`, with the lock held on entry and exit: posts, takes completions, sleeps if there were none.
 * Returns early rather than late; the caller looks whether what it waits for has come. */
static void round_until(endpoint *e, int64_t until) {
    if (e->led) {
        struct timespec t = {until / 1000000000, until % 1000000000};
        pthread_cond_timedwait(&e->changed, &e->lock, &t);
        return;
    }
    e->led = true;
    post_ready(e);
    uint64_t before = e->events;
    pthread_mutex_unlock(&e->lock);
    take_completions(e);
    pthread_mutex_lock(&e->lock);
    int64_t left = until - now();
    if (e->events == before && left > 0) {
        if (e->ready.first && left > NAP_WITHOUT_FD) left = NAP_WITHOUT_FD; /* the provider was full: soon again */
        pthread_mutex_unlock(&e->lock);
        nap(e, left);
        take_completions(e);
        pthread_mutex_lock(&e->lock);
    }
    e->led = false;
    pthread_cond_broadcast(&e->changed);
}

/* ---- the interface --------------------------------------------------------------------------------------------- */

static const char *provider_name(const endpoint *e) {
    return e->fabric->info->fabric_attr->prov_name;
}

static int start(void *self, bool write, uint64_t peer, void *local, uint64_t lkey, size_t length, uint64_t remote,
                 uint64_t rkey, uint64_t *ticket) {
    endpoint *e = ((fabric_registrar *)self)->endpoint;
    const char *what = write ? "put" : "get";
    bool needs_lkey = e->fabric->info->domain_attr->mr_mode & FI_MR_LOCAL;
    pthread_mutex_lock(&e->lock);
    if (peer >= e->peer_count || !length || (needs_lkey && !lkey)) {
        size_t peers = e->peer_count;
        pthread_mutex_unlock(&e->lock);
        fabric_host->set_error("fabric: %s of %zu bytes with peer %llu of %zu, lkey %#llx: it takes a peer from "
                               "jemhooks_fabric_connect(), at least 1 byte%s", what, length, (unsigned long long)peer,
                               peers, (unsigned long long)lkey,
                               needs_lkey ? ", and with this provider the lkey of the local memory" : "");
        return -EINVAL;
    }
    operation *o = e->free;
    if (!o) {
        pthread_mutex_unlock(&e->lock);
        fabric_host->set_error("fabric: %s of %zu bytes: all %u tickets are outstanding; wait for some, or open the "
                               "registrar with a larger max_outstanding", what, length, e->count);
        return -ENOBUFS;
    }
    e->free = o->next;
    e->outstanding++;
    o->forgotten = false;
    o->give_up = 0;
    o->left = o->length = length;
    o->piece = (piece){write, e->peers[peer], local, needs_lkey ? (void *)(uintptr_t)lkey : NULL, remote, rkey, 0};
    cut_piece(e, o);
    *ticket = (uint64_t)o->generation << 32 | (uint64_t)(o - e->operations);
    make_ready(e, o);
    post_ready(e);
    pthread_mutex_unlock(&e->lock);
    return 0;
}

int endpoint_put(void *self, uint64_t peer, const void *local, uint64_t lkey, size_t length, uint64_t remote,
                 uint64_t rkey, uint64_t *ticket) {
    return start(self, true, peer, (void *)local, lkey, length, remote, rkey, ticket);
}

int endpoint_get(void *self, uint64_t peer, void *local, uint64_t lkey, size_t length, uint64_t remote,
                 uint64_t rkey, uint64_t *ticket) {
    return start(self, false, peer, local, lkey, length, remote, rkey, ticket);
}

static int no_ticket(const char *what, uint64_t ticket) {
    fabric_host->set_error("fabric: %s: ticket %#llx is not outstanding; each is good for one result", what,
                           (unsigned long long)ticket);
    return -EINVAL;
}

static int no_timeout(const char *what, int timeout_ms) {
    fabric_host->set_error("fabric: %s: timeout of %d ms; it must be 0 or more, for a dead peer may never be noticed",
                           what, timeout_ms);
    return -EINVAL;
}

int endpoint_wait(void *self, uint64_t ticket, int timeout_ms) {
    endpoint *e = ((fabric_registrar *)self)->endpoint;
    if (timeout_ms < 0) return no_timeout("wait", timeout_ms);
    int64_t until = now() + (int64_t)timeout_ms * 1000000;
    pthread_mutex_lock(&e->lock);
    operation *o = find_ticket(e, ticket);
    for (bool looked = false; o && o->state != DONE && (!looked || now() < until); looked = true) {
        round_until(e, until);
        o = find_ticket(e, ticket);
    }
    if (!o) {
        pthread_mutex_unlock(&e->lock);
        return no_ticket("wait", ticket);
    }
    bool done = o->state == DONE, manual = e->fabric->info->domain_attr->data_progress != FI_PROGRESS_AUTO;
    piece p = o->piece;
    size_t length = o->length, left = o->left;
    int error = done ? o->error : -ETIMEDOUT;
    char text[sizeof o->text];
    memcpy(text, o->text, sizeof text);
    if (done) recycle(e, o);
    pthread_mutex_unlock(&e->lock);
    const char *what = p.write ? "put" : "get";
    if (!done)
        fabric_host->set_error("fabric: %s of %zu bytes, provider %s: %zu bytes not done after %d ms; the peer is "
                               "slow, gone%s; the transfer is still under way and uses its memory: wait again, or "
                               "forget it", what, length, provider_name(e), left, timeout_ms,
                               manual ? ", or not calling jemhooks_fabric_progress()" : ", or stopped");
    else if (error)
        fabric_host->set_error("fabric: %s of %zu bytes at remote address %#llx with rkey %#llx, provider %s: %s", what,
                               length, (unsigned long long)p.remote, (unsigned long long)p.rkey, provider_name(e),
                               text);
    return error;
}

int endpoint_forget(void *self, uint64_t ticket) {
    endpoint *e = ((fabric_registrar *)self)->endpoint;
    pthread_mutex_lock(&e->lock);
    operation *o = find_ticket(e, ticket);
    if (o) {
        o->forgotten = true;
        if (o->state == DONE) recycle(e, o);
        else if (o->state == READY) { /* not the provider's: out of the list at once */
            operation *next = e->ready.first;
            for (empty(&e->ready); next;) {
                operation *each = next;
                next = each->next;
                make_ready(e, each);
            }
        }
    }
    pthread_mutex_unlock(&e->lock);
    return o ? 0 : no_ticket("forget", ticket);
}

int endpoint_progress(void *self, int timeout_ms) {
    endpoint *e = ((fabric_registrar *)self)->endpoint;
    if (timeout_ms < 0) return no_timeout("progress", timeout_ms);
    int64_t until = now() + (int64_t)timeout_ms * 1000000;
    pthread_mutex_lock(&e->lock);
    do round_until(e, until);
    while (now() < until);
    pthread_mutex_unlock(&e->lock);
    return 0;
}

int endpoint_connect(void *self, const void *address, size_t length, uint64_t *peer) {
    endpoint *e = ((fabric_registrar *)self)->endpoint;
    if (!fabric_is_address(e->fabric, address, length)) {
        fabric_host->set_error("fabric: connecting to an address of %zu bytes: not one that provider %s gives; pass "
                               "what the peer's jemhooks_fabric_address() returned, and use the same provider on both "
                               "sides", length, provider_name(e));
        return -EINVAL;
    }
    pthread_mutex_lock(&e->lock);
    fi_addr_t *peers = realloc(e->peers, (e->peer_count + 1) * sizeof *peers);
    int result = peers ? 1 : -FI_ENOMEM;
    if (peers) e->peers = peers;
    if (result == 1) result = fi_av_insert(e->fabric->av, address, 1, &e->peers[e->peer_count], 0, NULL);
    if (result == 1) *peer = e->peer_count++;
    pthread_mutex_unlock(&e->lock);
    if (result == 1) return 0;
    fabric_host->set_error("fabric: fi_av_insert of an address of %zu bytes, provider %s: %s", length, provider_name(e),
                           result < 0 ? fi_strerror(-result) : "not an address");
    return result < 0 ? fabric_errno(result) : -EINVAL;
}

uint32_t endpoint_outstanding(endpoint *e) {
    pthread_mutex_lock(&e->lock);
    uint32_t outstanding = e->outstanding;
    pthread_mutex_unlock(&e->lock);
    return outstanding;
}

/* ---- opening and closing --------------------------------------------------------------------------------------- */

int endpoint_open(fabric_registrar *f, unsigned max_outstanding) {
    endpoint *e = calloc(1, sizeof *e);
    operation *operations = calloc(max_outstanding, sizeof *operations);
    if (!e || !operations) {
        free(e);
        free(operations);
        fabric_host->set_error("opening registrar fabric: no memory for %u outstanding transfers", max_outstanding);
        return -ENOMEM;
    }
    f->endpoint = e;
    e->fabric = f;
    e->operations = operations;
    e->count = e->outstanding = max_outstanding;
    empty(&e->ready);
    for (uint32_t i = max_outstanding; i--;) recycle(e, &operations[i]);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&e->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&e->lock, NULL);
    return 0;
}

void endpoint_close(endpoint *e) {
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    free(e->peers);
    free(e->operations);
    free(e);
}
