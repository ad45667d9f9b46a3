/* version.c - what this library is and how it was configured. Constants; no state. */
#include "config.h"
#include "jemhooks.h"

const char *jemhooks_version(void) {
    return JH_VERSION;
}

const char *jemhooks_build_config(void) {
    return JH_BUILD_CONFIG;
}
