/* place.h - puts mappings where no stranger's mapping shares a slot of the page map with them. */
#ifndef JH_PLACE_H
#define JH_PLACE_H

#include <stddef.h>
#include <stdint.h>

/* Where the calling thread would have its next mapping, if nothing is there; NULL: anywhere. */
extern _Thread_local void *jh_place_at;

/* `length` bytes, readable and writable, on `alignment` and on 2 MiB at least, with the flags for mmap. NULL with errno. */
void *jh_place(size_t length, size_t alignment, int flags, int fd, uint64_t offset);
/* Unmaps it, with the address space behind its end. */
void jh_displace(void *base, size_t length);

/* Is there such a page size here: 0 (ordinary pages), 2 MiB or 1 GiB? 0 or an error, recorded. */
int jh_check_huge(const char *what, size_t page_size);
/* What mmap and memfd_create want to know of it, beside MAP_HUGETLB and MFD_HUGETLB. */
unsigned jh_huge_flags(size_t page_size);

#endif
