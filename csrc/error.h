/* error.h - the thread's last failure. */
#ifndef JH_ERROR_H
#define JH_ERROR_H

#include "jemhooks.h"

/* Records a failure of this thread and returns -err; also sets errno. Never called from a hook. */
int jh_fail(int kind, int err, const char *format, ...) __attribute__((format(printf, 3, 4), cold));
/* What the registrar said through jemhooks_set_error() since the last jh_detail_clear(); "" if nothing. */
const char *jh_detail(void);
void jh_detail_clear(void);

#endif
