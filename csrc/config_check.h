/* config_check.h - what an arena is made with. */
#ifndef JH_CONFIG_CHECK_H
#define JH_CONFIG_CHECK_H

#include "space.h"

/* The config of arena `name`: 0 or an error, recorded. */
int jh_config_check(const char *name, const jemhooks_config *c);
/* Makes regions as large as every registrar takes and its budgets bear: 0 or an error, recorded. */
int jh_space_fit(jh_space *s);

#endif
