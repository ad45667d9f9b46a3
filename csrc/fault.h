/* fault.h - breaking the hook contract on purpose, so that the tests can show that they would notice.
 * Only the test build (JEMHOOKS_FAULTS) contains any of it. The environment names what to break:
 * JEMHOOKS_FAULT=merge_across,purge_allowed breaks rules, JEMHOOKS_PAUSE=… waits 200 us at a critical place. */
#ifndef JH_FAULT_H
#define JH_FAULT_H

#ifdef JEMHOOKS_FAULTS
#include <stdbool.h>
bool jh_fault_named(const char *variable, const char *name);
void jh_fault_wait(void);
#define JH_FAULT(name) jh_fault_named("JEMHOOKS_FAULT", #name)
#define JH_PAUSE(name) (jh_fault_named("JEMHOOKS_PAUSE", #name) ? jh_fault_wait() : (void)0)
/* What must hold, whatever callers do. */
#define JH_ASSERT(condition) ((condition) ? (void)0 : __builtin_trap())
#else
#define JH_ASSERT(condition) ((void)(condition))
#define JH_FAULT(name) 0
#define JH_PAUSE(name) ((void)0)
#endif

#endif
