/* ucx.c - the adapter "ucx": tells UCX's registration caches, through UCM, that a range is about to go.
 * UCM patches libc and so sees most of what we do; it sees nothing where its hooks are off (an application that reports
 * unmapping itself, UCX_MEM_MMAP_HOOK_MODE=none), nor pages that go by fallocate.
 * A notice drops the cached registrations that overlap the range. It allocates nothing and waits only for UCM's own short
 * locks, so it may be given inside our hooks.
 * Concurrency: `unmapped` is set once, before anything is told.                                                      */
#include <dlfcn.h>
#include <stddef.h>

#include "adapter.h"

#define EXPORT __attribute__((visibility("default")))

static void (*unmapped)(void *address, size_t length); /* ucm_vm_munmap() of ucm/api/ucm.h */

/* Only of a UCX that is loaded already: another one has no cache. */
static int start(const jemhooks_host *host) {
    void *ucm = dlopen("libucm.so.0", RTLD_NOW | RTLD_NOLOAD);
    void *found = ucm ? dlsym(ucm, "ucm_vm_munmap") : NULL;
    if (!found) {
        host->set_error("%s; load UCX first", ucm ? "this libucm has no ucm_vm_munmap()" : "no libucm.so.0 is loaded in this process");
        return -ELIBACC;
    }
    *(void **)&unmapped = found;
    return 0;
}

static void tell(uint64_t base, uint64_t length) {
    if (unmapped) unmapped((void *)(uintptr_t)base, length);
}

EXPORT const jh_adapter jemhooks_adapter = {start, tell};
