/* populate.h - puts memory behind a range before somebody waits for it. */
#ifndef JH_POPULATE_H
#define JH_POPULATE_H

#include <stddef.h>

/* From here on it pays to populate by several threads what a registrar would populate by one. */
#define JH_LARGE ((size_t)64 << 20)

/* Makes every page of a range on 2 MiB resident, as far as there is memory; large ranges in slices, by several threads. What
 * is resident is not changed. */
void jh_populate(void *base, size_t length);

#endif
