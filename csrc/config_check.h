/* config_check.h - what an arena is made with. */
#ifndef JH_CONFIG_CHECK_H
#define JH_CONFIG_CHECK_H

#include "space.h"

/* The config of arena `name`: 0 or an error, recorded. */
int jh_config_check(const char *name, const jemhooks_config *c);
/* A forked child shares its parent's network objects and must not touch them: are all of these its own? 0 or an error, recorded. */
int jh_check_own(const jh_space *s);
/* Can the prepared allocator take a piece of fixed memory? 0 or an error, recorded. */
int jh_check_pieces(const jh_space *s);
/* Makes regions as large as every registrar takes and its budgets bear, once the allocator is prepared: 0 or an error, recorded. */
int jh_space_fit(jh_space *s);

#endif
