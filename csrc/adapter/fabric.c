/* fabric.c - the adapter "fabric": a memory monitor that libfabric's registration caches import in place of their own.
 * libfabric's own monitor patches libc, and misses what does not go through it; and it cannot be had beside another one. So
 * the caches keep only what we can speak for: registrations of memory in our regions. Any other is made and ended as if there
 * were no cache, which is slower, and right.
 * libfabric crashes when an imported monitor is closed under a cache, so ours never is; and when it is told anything before
 * fi_getinfo(), so that comes first.
 * Concurrency: libfabric calls `subscribe` and `valid` under its lock, which telling takes, too: they only look at the page
 * map. Telling frees nothing, allocates nothing and calls no provider, so it may be done inside our hooks.            */
#include <rdma/fabric.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

#define EXPORT __attribute__((visibility("default")))
#define VERSION FI_VERSION(1, 13) /* of the monitor's interface */

static const jemhooks_host *host;

static bool ours(const void *address, size_t length) {
    const jemhooks_region *r = host->find_region(address);
    return r && length && host->find_region((const char *)address + (length - 1)) == r;
}

static int on_start(struct fid_mem_monitor *monitor) {
    (void)monitor;
    return 0;
}

static void on_stop(struct fid_mem_monitor *monitor) {
    (void)monitor;
}

/* Not 0: the registration is not kept. */
static int on_subscribe(struct fid_mem_monitor *monitor, const void *address, size_t length) {
    (void)monitor;
    return ours(address, length) ? 0 : -FI_ENOSYS;
}

static void on_unsubscribe(struct fid_mem_monitor *monitor, const void *address, size_t length) {
    (void)monitor, (void)address, (void)length;
}

static bool on_valid(struct fid_mem_monitor *monitor, const void *address, size_t length) {
    (void)monitor;
    return ours(address, length);
}

static struct fi_ops_mem_monitor ops = {sizeof ops, on_start, on_stop, on_subscribe, on_unsubscribe, on_valid};
static struct fid_mem_monitor monitor = {.fid.fclass = FI_CLASS_MEM_MONITOR, .export_ops = &ops};

static int start(const jemhooks_host *the_host) {
    const char *wanted = getenv("FI_MR_CACHE_MONITOR");
    struct fi_info *info = NULL;
    host = the_host;
    if (monitor.import_ops) return 0;
    if (wanted && !strcmp(wanted, "disabled")) {
        host->set_error("FI_MR_CACHE_MONITOR=disabled says that libfabric is to cache nothing, so there is nothing to notify");
        return -EINVAL;
    }
    if (!fi_getinfo(VERSION, NULL, NULL, 0, NULL, &info)) fi_freeinfo(info);
    int result = fi_import(VERSION, "mr_cache", NULL, 0, 0, &monitor.fid, NULL);
    if (!result) return 0;
    if (result == -FI_EBUSY) {
        host->set_error("another memory monitor is in use: that of another library, or libfabric's own, in a domain that is open; notify "
                        "it before the first fi_domain()");
        return -EBUSY;
    }
    host->set_error("fi_import of a memory monitor: %s", fi_strerror(-result));
    return result > -FI_ERRNO_OFFSET ? result : -EIO;
}

static void tell(uint64_t base, uint64_t length) {
    if (monitor.import_ops) monitor.import_ops->notify(&monitor, (const void *)(uintptr_t)base, length);
}

EXPORT const jh_adapter jemhooks_adapter = {start, tell};
