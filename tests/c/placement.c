/* placement.c - an mmap() and a munmap() in front of libc's, so that what only chance would bring is certain: regions
 * without a gap between them, the one case in which jemalloc could make one extent out of two regions.
 * A provider reserves a region as PROT_NONE with 2 MiB of room to align it, and then unmaps the room. Such a request,
 * and no other, is answered from a window of address space, at the place where the latest region ended; the room stays
 * the next region's. What is unmapped otherwise goes back to the window, so that no one else's mapping gets in between.
 * Concurrency: `lock` guards the place of the next region; any thread maps. `room` is the thread's own.              */
#include "placement.h"
#include "check.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
bool place_side_by_side(void) {
    return false;
}
#else
#define WINDOW ((size_t)64 << 30)
#define VISIBLE __attribute__((visibility("default")))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *window, *next;
static _Thread_local char *room; /* of the region that this thread is mapping; NULL: of none */

static void *map(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}

bool place_side_by_side(void) {
    char *space = map(NULL, WINDOW + SLOT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    must_have(space, "address space for regions");
    window = next = (char *)(((uintptr_t)space + SLOT - 1) & ~(SLOT - 1));
    return true;
}

VISIBLE void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    char *place = NULL;
    if (window && !address && protection == PROT_NONE && flags & MAP_NORESERVE && length > SLOT && !(length % SLOT)) {
        pthread_mutex_lock(&lock);
        if (length <= (size_t)(window + WINDOW - next)) {
            place = next;
            next += length - SLOT;
            room = next;
        }
        pthread_mutex_unlock(&lock);
    }
    return place ? place : map(address, length, protection, flags, fd, offset);
}

VISIBLE int munmap(void *address, size_t length) {
    bool of_room = address == room && length == SLOT;
    if (of_room) room = NULL;
    if (!window || (uintptr_t)address - (uintptr_t)window >= WINDOW) return (int)syscall(SYS_munmap, address, length);
    if (of_room) return 0;
    return map(address, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED
               ? -1
               : 0;
}
#endif
