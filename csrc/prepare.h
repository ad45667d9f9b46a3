/* prepare.h - the next region of a space, made ready before it is needed. */
#ifndef JH_PREPARE_H
#define JH_PREPARE_H

#include "space.h"

/* Starts a thread that does it; `age` is called now and then, to let free memory age. 0 or an error, recorded. */
int jh_prepare_start(jh_space *s, void (*age)(jh_space *s));
/* Returns when all that is wanted now is ready, or cannot be made so. */
void jh_prepare_wait(jh_space *s);
/* Holds the thread off its work, and lets it go on. */
void jh_prepare_pause(jh_space *s);
void jh_prepare_resume(jh_space *s);
/* Ends it; it must be paused. All four: nothing to do if there is none. */
void jh_prepare_end(jh_space *s);

#endif
