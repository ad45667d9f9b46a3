/* pool.h - the structs of regions and gaps. For hooks, too. */
#ifndef JH_POOL_H
#define JH_POOL_H

#include "space.h"

/* NULL: no memory for it. */
jh_region *jh_pool_take_region(void);
void jh_pool_return_region(jh_region *r);
jh_gap *jh_pool_take_gap(void);
void jh_pool_return_gap(jh_gap *g);
/* The region with this public half. */
jh_region *jh_pool_region_of(const jemhooks_region *hot);

#endif
