/* fabric.c - the registrar "fabric": a libfabric domain and its memory regions. Transfers are in fabric_endpoint.c.
 *
 * Providers differ in who chooses keys, in what a remote address means and in what must be bound to what; mr_mode says
 * so, and everything that depends on it is in fabric_register().
 * Concurrency: the domain is opened with FI_THREAD_SAFE; the only state that changes here is next_key, an atomic.    */
#include <rdma/fi_cm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "fabric.h"
#include "module.h"

#define ACCEPTED_MR_MODE \
    (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT | FI_MR_RAW)

const jemhooks_host *fabric_host;

/* A registration that has a packed key: the first byte's remote address, then libfabric's raw key. */
typedef struct packed_key {
    uint64_t base;
    unsigned char raw[];
} packed_key;

int fabric_errno(int64_t error) {
    int64_t e = error < 0 ? -error : error;
    if (e == FI_ENOKEY) return -ENOKEY;
    return e < FI_ERRNO_OFFSET ? (int)-e : -EIO; /* above are libfabric's own */
}

static int fail(const fabric_registrar *f, const char *call, size_t length, int64_t error) {
    fabric_host->set_error("fabric: %s of %zu bytes with provider %s: %s", call, length,
                           f->info->fabric_attr->prov_name, fi_strerror((int)(error < 0 ? -error : error)));
    return fabric_errno(error);
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* FI_WRITE and FI_READ make it a local buffer as well: the source of a put, the destination of a get. */
static uint64_t fabric_access(unsigned access) {
    uint64_t flags = FI_WRITE;
    if (access & (JEMHOOKS_LOCAL_WRITE | JEMHOOKS_REMOTE_WRITE)) flags |= FI_READ;
    if (access & JEMHOOKS_REMOTE_READ) flags |= FI_REMOTE_READ;
    if (access & JEMHOOKS_REMOTE_WRITE) flags |= FI_REMOTE_WRITE;
    return flags;
}

/* Keys are never used twice, so that one from before a deregistration never opens what was registered after it. */
static int choose_key(fabric_registrar *f, uint64_t *key) {
    *key = atomic_fetch_add(&f->next_key, 1);
    if (*key <= f->last_key) return 0;
    fabric_host->set_error("fabric: provider %s has keys of %zu bytes, and all have been used once; open a new "
                           "registrar", f->info->fabric_attr->prov_name, f->info->domain_attr->mr_key_size);
    return -ENOSPC;
}

static int pack_key(fabric_registrar *f, struct fid_mr *region, jemhooks_mr *mr) {
    size_t room = f->info->domain_attr->mr_key_size;
    packed_key *packed = malloc(sizeof *packed + room);
    if (!packed) return -FI_ENOMEM;
    int result = fi_mr_raw_attr(region, &packed->base, packed->raw, &room, 0);
    if (result) {
        free(packed);
        return result;
    }
    mr->remote_base = packed->base;
    mr->packed = packed;
    mr->packed_length = sizeof *packed + room;
    return 0;
}

static int fabric_register(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    fabric_registrar *f = self;
    uint64_t mode = (uint64_t)f->info->domain_attr->mr_mode, key = 0;
    if (access & (JEMHOOKS_REMOTE_ATOMIC | JEMHOOKS_ON_DEMAND)) {
        fabric_host->set_error("fabric: registering %zu bytes: neither atomics nor on-demand paging are offered; leave "
                               "JEMHOOKS_REMOTE_ATOMIC and JEMHOOKS_ON_DEMAND out", length);
        return -EOPNOTSUPP;
    }
    if (!(mode & FI_MR_PROV_KEY)) {
        int result = choose_key(f, &key);
        if (result) return result;
    }
    struct fid_mr *region;
    int result = fi_mr_reg(f->domain, address, length, fabric_access(access), 0, key, 0, &region, NULL);
    if (result) return fail(f, "fi_mr_reg", length, result);
    if (mode & FI_MR_ENDPOINT) {
        result = fi_mr_bind(region, &f->ep->fid, 0);
        if (!result) result = fi_mr_enable(region);
    }
    mr->remote_base = mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)address : 0;
    if (!result && mode & FI_MR_RAW) result = pack_key(f, region, mr);
    if (result) {
        fi_close(&region->fid);
        return fail(f, "setting up an MR", length, result);
    }
    mr->lkey = (uint64_t)(uintptr_t)fi_mr_desc(region);
    mr->rkey = fi_mr_key(region);
    mr->handle = region;
    return 0;
}

static int fabric_deregister(void *self, jemhooks_mr *mr) {
    fabric_registrar *f = self;
    struct fid_mr *region = mr->handle;
    int result = fi_close(&region->fid);
    if (result) {
        fabric_host->set_error("fabric: fi_close of the MR with key %#llx, provider %s: %s",
                               (unsigned long long)mr->rkey, f->info->fabric_attr->prov_name, fi_strerror(-result));
        return fabric_errno(result);
    }
    free((void *)mr->packed);
    return 0;
}

static void fabric_limits(void *self, jemhooks_limits *limits) {
    const fabric_registrar *f = self;
    limits->max_mr_size = 0; /* libfabric does not tell */
    limits->max_mr = f->info->domain_attr->mr_cnt;
}

/* ---- what the interface has besides transfers ------------------------------------------------------------------ */

static int fabric_info(void *self, jemhooks_fabric_info *info) {
    fabric_registrar *f = self;
    const struct fi_domain_attr *domain = f->info->domain_attr;
    size_t size = info->size;
    if (size < sizeof(size_t)) {
        fabric_host->set_error("fabric: info->size is %zu; set it to sizeof(jemhooks_fabric_info)", size);
        return -EINVAL;
    }
    uint64_t mode = (uint64_t)domain->mr_mode;
    jemhooks_fabric_info ours = {.size = size, .mr_mode = mode, .max_msg_size = f->info->ep_attr->max_msg_size,
        .mr_key_size = domain->mr_key_size, .max_mr = domain->mr_cnt, .version = fi_version(),
        .manual_progress = domain->data_progress != FI_PROGRESS_AUTO,
        .virtual_addresses = (mode & FI_MR_VIRT_ADDR) != 0, .packed_keys = (mode & FI_MR_RAW) != 0,
        .max_outstanding = f->max_outstanding, .outstanding = endpoint_outstanding(f->endpoint)};
    snprintf(ours.provider, sizeof ours.provider, "%s", f->info->fabric_attr->prov_name);
    snprintf(ours.domain, sizeof ours.domain, "%s", domain->name);
    memcpy(info, &ours, size < sizeof ours ? size : sizeof ours);
    return 0;
}

static int fabric_address(void *self, void *buffer, size_t *length) {
    fabric_registrar *f = self;
    size_t room = *length;
    int result = fi_getname(&f->ep->fid, buffer, length);
    if (!result) return 0;
    fabric_host->set_error("fabric: fi_getname with room for %zu bytes, provider %s: %s; it takes %zu", room,
                           f->info->fabric_attr->prov_name, fi_strerror(-result), *length);
    return result == -FI_ETOOSMALL ? -ENOSPC : fabric_errno(result);
}

static int check_packed(const fabric_registrar *f) {
    if (f->info->domain_attr->mr_mode & FI_MR_RAW) return 0;
    fabric_host->set_error("fabric: provider %s has no packed keys; pass the peer's rkey as it is",
                           f->info->fabric_attr->prov_name);
    return -EOPNOTSUPP;
}

static int fabric_map_key(void *self, const void *packed, size_t length, uint64_t *rkey) {
    fabric_registrar *f = self;
    int result = check_packed(f);
    if (result) return result;
    if (length <= sizeof(packed_key)) {
        fabric_host->set_error("fabric: a packed key of %zu bytes is too short; pass what jemhooks_packed_key() gave "
                               "the peer", length);
        return -EINVAL;
    }
    packed_key head;
    memcpy(&head, packed, sizeof head); /* the peer's bytes may lie anywhere */
    uint8_t *raw = (uint8_t *)(uintptr_t)packed + sizeof head;
    result = fi_mr_map_raw(f->domain, head.base, raw, length - sizeof head, rkey, 0);
    return result ? fail(f, "fi_mr_map_raw", length, result) : 0;
}

static int fabric_unmap_key(void *self, uint64_t rkey) {
    fabric_registrar *f = self;
    int result = check_packed(f);
    if (result) return result;
    result = fi_mr_unmap_key(f->domain, rkey);
    return result ? fail(f, "fi_mr_unmap_key", sizeof rkey, result) : 0;
}

/* ---- opening and closing --------------------------------------------------------------------------------------- */

static char *copy(const char *s) {
    return s && *s ? strdup(s) : NULL;
}

/* What we need and what we can live with. */
static struct fi_info *hints_for(const jemhooks_fabric_config *config) {
    struct fi_info *h = fi_allocinfo();
    if (!h) return NULL;
    h->caps = FI_MSG | FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    h->mode = FI_CONTEXT | FI_CONTEXT2;
    h->ep_attr->type = FI_EP_RDM;
    h->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    h->domain_attr->threading = FI_THREAD_SAFE;
    h->domain_attr->mr_mode = (int)ACCEPTED_MR_MODE;
    h->domain_attr->name = copy(config->domain);
    h->fabric_attr->prov_name = copy(config->provider);
    return h;
}

/* All that would do, libfabric's first choice first. */
static int find_providers(const jemhooks_fabric_config *config, struct fi_info **list) {
    const char *node = config->node && *config->node ? config->node : NULL;
    const char *service = config->service && *config->service ? config->service : NULL;
    struct fi_info *hints = hints_for(config);
    if (!hints) {
        fabric_host->set_error("opening registrar fabric: no memory for libfabric's hints");
        return -ENOMEM;
    }
    int result = fi_getinfo(FI_VERSION(1, 17), node, service, node || service ? FI_SOURCE : 0, hints, list);
    fi_freeinfo(hints);
    if (!result) return 0;
    fabric_host->set_error("opening registrar fabric: fi_getinfo for provider %s, node %s, service %s, domain %s: %s; "
                           "needed are reliable datagrams (FI_EP_RDM) with RMA and FI_DELIVERY_COMPLETE; `fi_info -t "
                           "FI_EP_RDM -c FI_RMA` lists what this host has, and shm wants an empty node",
                           config->provider ? config->provider : "any", node ? node : "any", service ? service : "any",
                           config->domain ? config->domain : "any", fi_strerror(-result));
    return fabric_errno(result);
}

static void start_keys(fabric_registrar *f) {
    size_t size = f->info->domain_attr->mr_key_size;
    f->last_key = size < 8 && size ? ((uint64_t)1 << 8 * size) - 1 : UINT64_MAX - 1; /* UINT64_MAX: FI_KEY_NOTAVAIL */
    uint64_t start = 0;
    if (getrandom(&start, sizeof start, 0) != (ssize_t)sizeof start) start = (uint64_t)getpid() << 20;
    atomic_init(&f->next_key, start & f->last_key >> 1); /* the whole upper half is still to come */
}

static void close_objects(fabric_registrar *f) {
    if (f->ep) fi_close(&f->ep->fid);
    if (f->endpoint) endpoint_close(f->endpoint);
    if (f->av) fi_close(&f->av->fid);
    if (f->cq) fi_close(&f->cq->fid);
    if (f->domain) fi_close(&f->domain->fid);
    if (f->fabric) fi_close(&f->fabric->fid);
    if (f->info) fi_freeinfo(f->info);
    f->ep = NULL, f->endpoint = NULL, f->av = NULL, f->cq = NULL, f->domain = NULL, f->fabric = NULL, f->info = NULL;
}

static void fabric_close(void *self) {
    fabric_registrar *f = self;
    if (getpid() != f->owner) return; /* in a forked child: closing would end the parent's connections */
    close_objects(f);
    free(f);
}

static const jemhooks_fabric_interface interface = {
    .size = sizeof interface, .info = fabric_info, .address = fabric_address, .connect = endpoint_connect,
    .map_key = fabric_map_key, .unmap_key = fabric_unmap_key, .put = endpoint_put, .get = endpoint_get,
    .wait = endpoint_wait, .forget = endpoint_forget, .progress = endpoint_progress};
static const jemhooks_registrar_ops fabric_ops = {sizeof fabric_ops, "fabric", fabric_register, fabric_deregister,
                                                  fabric_limits, fabric_close, &interface, 0, 0, 0};

/* With a file descriptor to sleep on, where the provider has one. */
static int open_queue(fabric_registrar *f) {
    struct fi_cq_attr attr = {.size = f->max_outstanding, .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_FD};
    if (!fi_cq_open(f->domain, &attr, &f->cq, NULL)) {
        if (!fi_control(&f->cq->fid, FI_GETWAIT, &f->wait_fd)) return 0;
        fi_close(&f->cq->fid);
    }
    f->cq = NULL;
    f->wait_fd = -1;
    attr.wait_obj = FI_WAIT_NONE;
    return fi_cq_open(f->domain, &attr, &f->cq, NULL);
}

/* Up to the enabled endpoint; what failed is left in *call. */
static int open_objects(fabric_registrar *f, const char **call) {
    struct fi_av_attr attr = {.type = f->info->domain_attr->av_type};
    int result;
    *call = "fi_fabric";
    if ((result = fi_fabric(f->info->fabric_attr, &f->fabric, NULL))) return result;
    *call = "fi_domain";
    if ((result = fi_domain(f->fabric, f->info, &f->domain, NULL))) return result;
    *call = "fi_cq_open";
    if ((result = open_queue(f))) return result;
    *call = "fi_av_open";
    if ((result = fi_av_open(f->domain, &attr, &f->av, NULL))) return result;
    *call = "fi_endpoint";
    if ((result = fi_endpoint(f->domain, f->info, &f->ep, NULL))) return result;
    *call = "fi_ep_bind";
    if ((result = fi_ep_bind(f->ep, &f->cq->fid, FI_TRANSMIT | FI_RECV))) return result;
    if ((result = fi_ep_bind(f->ep, &f->av->fid, 0))) return result;
    *call = "fi_enable";
    return fi_enable(f->ep);
}

/* libfabric reads as many bytes as its addresses have, whatever it is given. */
bool fabric_is_address(const fabric_registrar *f, const char *address, size_t length) {
    if (f->info->addr_format == FI_ADDR_STR) return length && !address[length - 1];
    size_t own = 0;
    fi_getname(&f->ep->fid, NULL, &own);
    return length == own;
}

static int open_endpoint(fabric_registrar *f, const char *node, bool explain) {
    const char *call;
    int result = open_objects(f, &call);
    if (!result) return endpoint_open(f, f->max_outstanding);
    if (explain)
        fabric_host->set_error("opening registrar fabric: %s with provider %s, node %s: %s; the node must be an address of "
                               "this host; if it is, this provider does not work here: name another", call,
                               f->info->fabric_attr->prov_name, node && *node ? node : "any", fi_strerror(-result));
    return fabric_errno(result);
}

/* libfabric's first choice; where no provider is named, the first that can be used at all (libfabric lists verbs over Soft-RoCE,
 * whose queues are then too short for it). */
static int open_first(fabric_registrar *f, const struct fi_info *list, const jemhooks_fabric_config *config) {
    int result = -ENODATA;
    bool again = true;
    for (const struct fi_info *i = list; i && again; i = i->next) {
        f->info = fi_dupinfo(i);
        if (!f->info) {
            fabric_host->set_error("opening registrar fabric: no memory for libfabric's info");
            return -ENOMEM;
        }
        start_keys(f);
        result = open_endpoint(f, config->node, i == list);
        if (result) close_objects(f);
        again = result && !config->provider && result != -EADDRINUSE && result != -EADDRNOTAVAIL && result != -EMFILE;
    }
    return result;
}

MODULE_EXPORT jemhooks_module_open jemhooks_registrar_module;

int jemhooks_registrar_module(const jemhooks_host *host, const void *config, const jemhooks_registrar_ops **ops,
                              void **self) {
    fabric_host = host;
    jemhooks_fabric_config ours = JEMHOOKS_FABRIC_CONFIG_INIT;
    int result = module_config(host, "fabric", &ours, sizeof ours, config);
    if (result) return result;
    if (!ours.max_outstanding || ours.max_outstanding > 65536) {
        host->set_error("opening registrar fabric: max_outstanding %u; it must be 1 to 65536", ours.max_outstanding);
        return -EINVAL;
    }
    fabric_registrar *f = calloc(1, sizeof *f);
    if (!f) {
        host->set_error("opening registrar fabric: no memory for its %zu bytes", sizeof *f);
        return -ENOMEM;
    }
    f->owner = getpid();
    f->max_outstanding = ours.max_outstanding;
    struct fi_info *list = NULL;
    result = find_providers(&ours, &list);
    if (!result) result = open_first(f, list, &ours);
    fi_freeinfo(list);
    if (result) {
        fabric_close(f);
        return result;
    }
    *ops = &fabric_ops;
    *self = f;
    return 0;
}
