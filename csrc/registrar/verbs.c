/* verbs.c - the registrar "verbs": memory regions of an ibverbs protection domain, its own or the caller's.
 * Concurrency: nothing changes once it is open, and libibverbs registers from any thread.                            */
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdlib.h>

#include "jemhooks_verbs.h"
#include "memlock.h"
#include "module.h"

static const jemhooks_host *host;

typedef struct verbs_registrar {
    struct ibv_context *context; /* its own only with own_pd */
    struct ibv_pd *pd;
    bool own_pd;
    struct ibv_device_attr attributes;
    bool on_demand;
} verbs_registrar;

static const char *name_of(const verbs_registrar *v) {
    return ibv_get_device_name(v->context->device);
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

static unsigned verbs_access(unsigned access) {
    unsigned flags = 0;
    if (access & (JEMHOOKS_LOCAL_WRITE | JEMHOOKS_REMOTE_WRITE | JEMHOOKS_REMOTE_ATOMIC)) flags |= IBV_ACCESS_LOCAL_WRITE;
    if (access & JEMHOOKS_REMOTE_READ) flags |= IBV_ACCESS_REMOTE_READ;
    if (access & JEMHOOKS_REMOTE_WRITE) flags |= IBV_ACCESS_REMOTE_WRITE;
    if (access & JEMHOOKS_REMOTE_ATOMIC) flags |= IBV_ACCESS_REMOTE_ATOMIC;
    if (access & JEMHOOKS_RELAXED_ORDERING) flags |= IBV_ACCESS_RELAXED_ORDERING;
    if (access & JEMHOOKS_ON_DEMAND) flags |= IBV_ACCESS_ON_DEMAND;
    return flags;
}

static int check_access(const verbs_registrar *v, size_t length, unsigned access) {
    const char *lacks = access & JEMHOOKS_ON_DEMAND && !v->on_demand ? "on-demand paging; leave JEMHOOKS_ON_DEMAND out"
                        : access & JEMHOOKS_REMOTE_ATOMIC && v->attributes.atomic_cap == IBV_ATOMIC_NONE
                            ? "atomic operations; leave JEMHOOKS_REMOTE_ATOMIC out" : NULL;
    if (!lacks) return 0;
    host->set_error("verbs: registering %zu bytes: device %s has no %s", length, name_of(v), lacks);
    return -EOPNOTSUPP;
}

static int explain_register(const verbs_registrar *v, int error, const void *address, size_t length, unsigned access) {
    char memlock[128];
    if (error == ENOMEM)
        host->set_error("verbs: ibv_reg_mr of %zu bytes on device %s: %s; %s (whole huge pages count); raise it (ulimit -l), "
                        "grant CAP_IPC_LOCK, or use a smaller region_max; the device has %d MRs at most", length, name_of(v),
                        strerror(error), memlock_text(memlock, sizeof memlock), v->attributes.max_mr);
    else if (error == EFAULT)
        host->set_error("verbs: ibv_reg_mr of %zu bytes at %p on device %s: %s: not all of it is mapped, and writable where the "
                        "access asks for it, or it is a file's memory, which the kernel does not pin for long; use anonymous "
                        "memory or a memfd", length, address, name_of(v), strerror(error));
    else
        host->set_error("verbs: ibv_reg_mr of %zu bytes at %p on device %s with access %#x: %s%s", length, address, name_of(v),
                        access, strerror(error), error == EINVAL || error == EOPNOTSUPP ?
                        "; the device refuses these access flags or this length" : "");
    return -error;
}

static int verbs_register(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    verbs_registrar *v = self;
    int result = check_access(v, length, access);
    if (result) return result;
    struct ibv_mr *region = ibv_reg_mr(v->pd, address, length, verbs_access(access));
    if (!region) return explain_register(v, errno ? errno : EIO, address, length, verbs_access(access));
    mr->lkey = region->lkey;
    mr->rkey = region->rkey;
    mr->handle = region;
    return 0;
}

static int verbs_deregister(void *self, jemhooks_mr *mr) {
    verbs_registrar *v = self;
    int error = ibv_dereg_mr(mr->handle);
    if (error)
        host->set_error("verbs: ibv_dereg_mr of rkey %#llx on device %s: %s%s", (unsigned long long)mr->rkey, name_of(v),
                        strerror(error), error == EBUSY || error == EINVAL ? "; deallocate memory windows that are bound to it first" : "");
    return -error;
}

static void verbs_limits(void *self, jemhooks_limits *limits) {
    const verbs_registrar *v = self;
    limits->max_mr_size = v->attributes.max_mr_size;
    limits->max_mr = v->attributes.max_mr > 0 ? (uint64_t)v->attributes.max_mr : 0;
}

static void verbs_close(void *self) {
    verbs_registrar *v = self;
    if (v->own_pd) {
        ibv_dealloc_pd(v->pd);
        ibv_close_device(v->context);
    }
    free(v);
}

static int verbs_info(void *self, jemhooks_verbs_info *info) {
    const verbs_registrar *v = self;
    size_t size = info->size;
    if (size < sizeof(size_t)) {
        host->set_error("verbs: info->size is %zu; set it to sizeof(jemhooks_verbs_info)", size);
        return -EINVAL;
    }
    jemhooks_verbs_info ours = {.size = size, .context = v->context, .pd = v->pd, .max_mr_size = v->attributes.max_mr_size,
        .max_mr = (uint64_t)v->attributes.max_mr, .atomics = v->attributes.atomic_cap != IBV_ATOMIC_NONE,
        .on_demand = v->on_demand, .fork = (int32_t)ibv_is_fork_initialized(), .ports = v->attributes.phys_port_cnt};
    snprintf(ours.device, sizeof ours.device, "%s", name_of(v));
    memcpy(info, &ours, size < sizeof ours ? size : sizeof ours);
    return 0;
}

/* ---- opening --------------------------------------------------------------------------------------------------- */

static bool has_active_port(struct ibv_context *context) {
    struct ibv_device_attr attributes;
    struct ibv_port_attr port;
    if (ibv_query_device(context, &attributes)) return false;
    for (int i = 1; i <= attributes.phys_port_cnt; i++)
        if (!ibv_query_port(context, (uint8_t)i, &port) && port.state == IBV_PORT_ACTIVE) return true;
    return false;
}

/* The names in the list, for an error text. */
static const char *names(struct ibv_device **list, int count, char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "", ibv_get_device_name(list[i]));
    return text;
}

/* Opens the named device, or else the first with an active port. */
static int open_device(const char *wanted, struct ibv_context **context) {
    int count = 0, error = 0;
    char text[256];
    errno = 0;
    struct ibv_device **list = ibv_get_device_list(&count);
    if (!list || !count) {
        error = list || errno == ENOSYS ? ENODEV : errno; /* ENOSYS: the kernel has no RDMA loaded */
        host->set_error("opening registrar verbs: this host has no RDMA device (%s); load its driver, or make a Soft-RoCE one: "
                        "rdma link add rxe0 type rxe netdev eth0", list ? "none is listed" : strerror(errno));
        if (list) ibv_free_device_list(list);
        return -error;
    }
    struct ibv_context *found = NULL;
    const char *tried = NULL;
    for (int i = 0; i < count && !found; i++) {
        const char *name = ibv_get_device_name(list[i]);
        if (wanted && strcmp(wanted, name)) continue;
        errno = 0;
        found = ibv_open_device(list[i]);
        if (!found) error = errno ? errno : EIO, tried = name;
        else if (!wanted && !has_active_port(found)) {
            ibv_close_device(found);
            found = NULL;
        }
    }
    if (found) error = 0;
    else if (error)
        host->set_error("opening registrar verbs: ibv_open_device of %s: %s%s", tried, strerror(error), error == EACCES ||
                        error == EPERM ? "; this user may not open its /dev/infiniband/uverbs file: change its permissions" : "");
    else {
        error = ENODEV;
        if (wanted)
            host->set_error("opening registrar verbs: no device is named %s; this host has %s", wanted,
                            names(list, count, text, sizeof text));
        else host->set_error("opening registrar verbs: no device has an active port (%s); name one, or bring its link up",
                             names(list, count, text, sizeof text));
    }
    ibv_free_device_list(list);
    *context = found;
    return -error;
}

static int own_domain(verbs_registrar *v, const char *device) {
    int result = open_device(device, &v->context);
    if (result) return result;
    errno = 0;
    v->pd = ibv_alloc_pd(v->context);
    if (v->pd) {
        v->own_pd = true;
        return 0;
    }
    result = errno ? -errno : -EIO;
    host->set_error("opening registrar verbs: ibv_alloc_pd on device %s: %s", name_of(v), strerror(-result));
    ibv_close_device(v->context);
    return result;
}

static int given_domain(verbs_registrar *v, struct ibv_pd *pd, const char *device) {
    v->pd = pd;
    v->context = pd->context;
    if (!device || !strcmp(device, name_of(v))) return 0;
    host->set_error("opening registrar verbs: the protection domain is of device %s, not of %s; leave one of them out",
                    name_of(v), device);
    return -EINVAL;
}

static int query(verbs_registrar *v) {
    int error = ibv_query_device(v->context, &v->attributes);
    if (error) {
        host->set_error("opening registrar verbs: ibv_query_device of %s: %s", name_of(v), strerror(error));
        return -error;
    }
    struct ibv_device_attr_ex more = {0};
    v->on_demand = !ibv_query_device_ex(v->context, NULL, &more) && more.odp_caps.general_caps & IBV_ODP_SUPPORT;
    return 0;
}

static const jemhooks_verbs_interface interface = {sizeof interface, verbs_info};
static const jemhooks_registrar_ops verbs_ops = {sizeof verbs_ops, "verbs", verbs_register, verbs_deregister, verbs_limits,
                                                 verbs_close, &interface, 0, 1, 2};

MODULE_EXPORT jemhooks_module_open jemhooks_registrar_module;

int jemhooks_registrar_module(const jemhooks_host *h, const void *config, const jemhooks_registrar_ops **ops, void **self) {
    host = h;
    jemhooks_verbs_config ours = JEMHOOKS_VERBS_CONFIG_INIT;
    int result = module_config(host, "verbs", &ours, sizeof ours, config);
    if (result) return result;
    verbs_registrar *v = calloc(1, sizeof *v);
    if (!v) {
        host->set_error("opening registrar verbs: no memory");
        return -ENOMEM;
    }
    const char *device = ours.device && *ours.device ? ours.device : NULL;
    result = ours.pd ? given_domain(v, ours.pd, device) : own_domain(v, device);
    if (!result && (result = query(v)) && v->own_pd) {
        ibv_dealloc_pd(v->pd);
        ibv_close_device(v->context);
    }
    if (result) {
        free(v);
        return result;
    }
    *ops = &verbs_ops;
    *self = v;
    return 0;
}
