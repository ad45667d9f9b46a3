/* growing.h - a file of an arena's own, which grows by a region at a time. */
#ifndef JH_GROWING_H
#define JH_GROWING_H

#include "provider.h"

/* The tenant of an arena. */
typedef struct jh_growing jh_growing;

/* fd is the file's from now on, and closed if this fails. `flags`: MAP_SHARED and the like. 0 or -errno. */
int jh_growing_open(int fd, int flags, void **tenant);
/* For the ops of a provider; the file's memory goes when no process maps it any more. */
void jh_growing_leave(void *self, void *tenant);
int jh_growing_map(void *self, void *tenant, size_t alignment, jemhooks_mapping *m);
void jh_growing_unmap(void *self, void *tenant, const jemhooks_mapping *m);
int jh_growing_give_back(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length);
int jh_growing_reserve(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length);
int jh_growing_share(void *self, void *tenant, const jemhooks_mapping *m, int *fd, uint64_t *offset);

/* May this process make files so long? If not, trying would end it, by SIGXFSZ. */
bool jh_file_allowed(uint64_t length);
/* Makes a file so long. Longer than the process may make one: -EFBIG, and no signal. */
int jh_file_resize(int fd, uint64_t length);
/* Drops the bytes of a file, which then read as zero; and sees to it that there is room for them. 0 or -errno. */
int jh_file_punch(int fd, uint64_t offset, size_t length);
int jh_file_reserve(int fd, uint64_t offset, size_t length);

#endif
