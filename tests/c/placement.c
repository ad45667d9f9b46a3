/* placement.c - an mmap() in front of libc's, so that what only chance would bring is certain: regions without a gap
 * between them, the one case in which jemalloc could make one extent out of two regions.
 * A provider reserves a region as PROT_NONE with room to align it and frees the room around it afterwards; such a
 * request, and no other, is answered with the address at which the latest region ended.
 * Concurrency: `lock` guards the place of the next region; any thread maps.                                         */
#include "placement.h"
#include "check.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WINDOW ((size_t)64 << 30)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *next, *end;

static void *map(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}

void place_side_by_side(void) {
    char *window = map(NULL, WINDOW + SLOT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    must_have(window, "address space for regions");
    next = (char *)(((uintptr_t)window + SLOT - 1) & ~(SLOT - 1));
    end = next + WINDOW;
}

__attribute__((visibility("default"))) void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    bool region = !address && protection == PROT_NONE && flags & MAP_NORESERVE && length > SLOT && length < WINDOW / 4;
    void *place = NULL;
    if (region) {
        pthread_mutex_lock(&lock);
        if (next && length <= (size_t)(end - next)) {
            place = next;
            next += length - SLOT;
        }
        pthread_mutex_unlock(&lock);
    }
    return map(place ? place : address, length, protection, place ? flags | MAP_FIXED : flags, fd, offset);
}
