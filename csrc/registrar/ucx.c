/* ucx.c - the registrar "ucx": memory handles and packed remote keys of a UCP context, its own or the caller's.
 * Concurrency: `lock` guards the count of registrations and whether the context is still there, and is held around UCX's
 * calls where the context has no lock of its own.                                                                    */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucm/api/ucm.h>
#include <ucp/api/ucp.h>
#include <ucs/debug/debug.h>

#include "jemhooks_ucx.h"
#include "memlock.h"
#include "module.h"

static const jemhooks_host *host;

typedef struct ucx_registrar {
    ucp_context_h context; /* NULL once detached */
    bool own;
    bool shared;           /* UCX itself locks */
    pthread_mutex_t lock;
    size_t live;
} ucx_registrar;

/* One registration. */
typedef struct handle {
    void *address;
    size_t length;
    ucp_mem_h memory;
    void *packed;
} handle;

static int ucx_errno(ucs_status_t status) {
    switch (status) {
    case UCS_ERR_NO_MEMORY: case UCS_ERR_EXCEEDS_LIMIT: return -ENOMEM;
    case UCS_ERR_INVALID_PARAM: case UCS_ERR_INVALID_ADDR: return -EINVAL;
    case UCS_ERR_UNSUPPORTED: case UCS_ERR_NOT_IMPLEMENTED: return -EOPNOTSUPP;
    case UCS_ERR_BUSY: return -EBUSY;
    case UCS_ERR_NO_DEVICE: return -ENODEV;
    default: return -EIO;
    }
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* Local access is what UCX itself needs to move the bytes. */
static unsigned ucx_protection(unsigned access) {
    unsigned prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE;
    if (access & (JEMHOOKS_REMOTE_READ | JEMHOOKS_REMOTE_ATOMIC)) prot |= UCP_MEM_MAP_PROT_REMOTE_READ;
    if (access & (JEMHOOKS_REMOTE_WRITE | JEMHOOKS_REMOTE_ATOMIC)) prot |= UCP_MEM_MAP_PROT_REMOTE_WRITE;
    return prot;
}

static int explain_map(ucs_status_t status, size_t length) {
    char memlock[128];
    /* UCX reports any refusal of ibv_reg_mr, that of locked memory included, as an I/O error. */
    if (status == UCS_ERR_NO_MEMORY || status == UCS_ERR_IO_ERROR)
        host->set_error("ucx: ucp_mem_map of %zu bytes: %s; %s; raise it (ulimit -l), grant CAP_IPC_LOCK, or use a smaller region_max",
                        length, ucs_status_string(status), memlock_text(memlock, sizeof memlock));
    else
        host->set_error("ucx: ucp_mem_map of %zu bytes: %s", length, ucs_status_string(status));
    return status == UCS_ERR_IO_ERROR ? -ENOMEM : ucx_errno(status);
}

/* With the lock, if it is needed. */
static int map(ucx_registrar *u, handle *h, unsigned access) {
    ucp_mem_map_params_t params = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                                                 UCP_MEM_MAP_PARAM_FIELD_PROT | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                                   .address = h->address, .length = h->length, .prot = ucx_protection(access),
                                   .flags = access & JEMHOOKS_ON_DEMAND ? UCP_MEM_MAP_NONBLOCK : 0};
    ucs_status_t status = ucp_mem_map(u->context, &params, &h->memory);
    return status == UCS_OK ? 0 : explain_map(status, h->length);
}

static int pack(ucx_registrar *u, handle *h, size_t *length) {
    ucs_status_t status = ucp_rkey_pack(u->context, h->memory, &h->packed, length);
    if (status == UCS_OK) return 0;
    host->set_error("ucx: ucp_rkey_pack for %zu bytes: %s", h->length, ucs_status_string(status));
    ucp_mem_unmap(u->context, h->memory);
    return ucx_errno(status);
}

static int map_and_pack(ucx_registrar *u, handle *h, unsigned access, size_t *packed_length) {
    if (u->shared) pthread_mutex_unlock(&u->lock);
    int rc = map(u, h, access);
    if (!rc) rc = pack(u, h, packed_length);
    if (u->shared) pthread_mutex_lock(&u->lock);
    return rc;
}

static int ucx_register(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr) {
    ucx_registrar *u = self;
    handle *h = malloc(sizeof *h);
    if (!h) {
        host->set_error("ucx: no memory for a handle");
        return -ENOMEM;
    }
    *h = (handle){.address = address, .length = length};
    pthread_mutex_lock(&u->lock);
    u->live++; /* first, so that the context is not detached meanwhile */
    int rc = -ESHUTDOWN;
    if (u->context) rc = map_and_pack(u, h, access, &mr->packed_length);
    else host->set_error("ucx: registering %zu bytes: the context has been detached; open another registrar", length);
    if (rc) u->live--;
    pthread_mutex_unlock(&u->lock);
    if (rc) {
        free(h);
        return rc;
    }
    mr->lkey = (uintptr_t)h->memory;
    mr->packed = h->packed;
    mr->handle = h;
    return 0;
}

static int ucx_deregister(void *self, jemhooks_mr *mr) {
    ucx_registrar *u = self;
    handle *h = mr->handle;
    if (!u->shared) pthread_mutex_lock(&u->lock);
    ucs_status_t status = ucp_mem_unmap(u->context, h->memory); /* while a region is registered there is a context */
    if (!u->shared) pthread_mutex_unlock(&u->lock);
    if (status != UCS_OK) {
        host->set_error("ucx: ucp_mem_unmap of %zu bytes at %p: %s", h->length, h->address, ucs_status_string(status));
        return ucx_errno(status);
    }
    if (!u->own) ucm_vm_munmap(h->address, h->length); /* the caller's context may keep it in its registration cache */
    ucp_rkey_buffer_release(h->packed);
    free(h);
    pthread_mutex_lock(&u->lock);
    u->live--;
    pthread_mutex_unlock(&u->lock);
    return 0;
}

static void ucx_close(void *self) {
    ucx_registrar *u = self;
    if (u->own && u->context) ucp_cleanup(u->context);
    pthread_mutex_destroy(&u->lock);
    free(u);
}

/* ---- what the interface has besides ------------------------------------------------------------------------------ */

static int ucx_info(void *self, jemhooks_ucx_info *info) {
    ucx_registrar *u = self;
    size_t size = info->size;
    unsigned major, minor, release;
    if (size < sizeof(size_t)) {
        host->set_error("ucx: info->size is %zu; set it to sizeof(jemhooks_ucx_info)", size);
        return -EINVAL;
    }
    pthread_mutex_lock(&u->lock);
    jemhooks_ucx_info ours = {.size = size, .context = u->context, .own = u->own, .shared = u->shared};
    pthread_mutex_unlock(&u->lock);
    ucp_get_version(&major, &minor, &release);
    snprintf(ours.version, sizeof ours.version, "%u.%u.%u", major, minor, release);
    memcpy(info, &ours, size < sizeof ours ? size : sizeof ours);
    return 0;
}

static int ucx_detach(void *self) {
    ucx_registrar *u = self;
    if (u->own) {
        host->set_error("ucx: the context is the registrar's own; close the registrar instead of detaching it");
        return -EINVAL;
    }
    pthread_mutex_lock(&u->lock);
    size_t live = u->live;
    if (!live) u->context = NULL;
    pthread_mutex_unlock(&u->lock);
    if (!live) return 0;
    host->set_error("ucx: %zu regions are still registered; call jemhooks_revoke() on each arena first", live);
    return -EBUSY;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

/* UCX takes them when it is loaded; whoever had them gets them back. */
static void release_signals(void) {
    static const int taken[] = {SIGILL, SIGBUS, SIGFPE, SIGSEGV};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        struct sigaction now;
        Dl_info whose;
        if (!sigaction(taken[i], NULL, &now) && dladdr(*(void **)&now.sa_sigaction, &whose) && whose.dli_fname &&
            strstr(whose.dli_fname, "/libucs."))
            ucs_debug_disable_signal(taken[i]);
    }
}

static int open_own(ucx_registrar *u) {
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME,
                           .features = UCP_FEATURE_RMA, .mt_workers_shared = 1, .name = "jemhooks"};
    ucp_config_t *config;
    release_signals();
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status == UCS_OK) {
        ucp_config_modify(config, "RCACHE_ENABLE", "n"); /* a version without the option has no such cache */
        status = ucp_init(&params, config, &u->context);
        ucp_config_release(config);
    }
    if (status == UCS_OK) return 0;
    u->context = NULL;
    host->set_error("opening registrar ucx: ucp_init: %s; `ucx_info -d` lists the transports that UCX_TLS and UCX_NET_DEVICES may name",
                    ucs_status_string(status));
    return ucx_errno(status);
}

static int check_given(ucx_registrar *u) {
    uintptr_t page = (uintptr_t)u->context & ~(uintptr_t)4095;
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_THREAD_MODE};
    if ((uintptr_t)u->context % sizeof(void *) || msync((void *)page, 4096, MS_ASYNC)) {
        host->set_error("opening registrar ucx: context %p is no ucp_context_h: there is no memory; pass what ucp_init() gave, before "
                        "ucp_cleanup()", (void *)u->context);
        return -EINVAL;
    }
    ucs_status_t status = ucp_context_query(u->context, &attr);
    if (status != UCS_OK) {
        host->set_error("opening registrar ucx: ucp_context_query of the given context: %s", ucs_status_string(status));
        return -EINVAL;
    }
    u->shared = attr.thread_mode == UCS_THREAD_MODE_MULTI;
    return 0;
}

static const jemhooks_ucx_interface interface = {sizeof interface, ucx_info, ucx_detach};
static const jemhooks_registrar_ops ucx_ops = {sizeof ucx_ops, "ucx", ucx_register, ucx_deregister, NULL, ucx_close, &interface, 0, 0, 0};

MODULE_EXPORT jemhooks_module_open jemhooks_registrar_module;

int jemhooks_registrar_module(const jemhooks_host *the_host, const void *config, const jemhooks_registrar_ops **ops, void **self) {
    host = the_host;
    jemhooks_ucx_config ours = JEMHOOKS_UCX_CONFIG_INIT;
    int rc = module_config(host, "ucx", &ours, sizeof ours, config);
    if (rc) return rc;
    ucx_registrar *u = calloc(1, sizeof *u);
    if (!u) {
        host->set_error("opening registrar ucx: no memory for its %zu bytes", sizeof *u);
        return -ENOMEM;
    }
    u->context = ours.context;
    u->own = u->shared = !ours.context;
    pthread_mutex_init(&u->lock, NULL);
    rc = u->own ? open_own(u) : check_given(u);
    if (rc) {
        u->own = false;
        ucx_close(u);
        return rc;
    }
    *ops = &ucx_ops;
    *self = u;
    return 0;
}
