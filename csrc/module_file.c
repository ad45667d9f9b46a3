/* module_file.c - loads modules from the folder "jemhooks" beside the library.
 * A module is linked with its network's library, never with this one: were it, C++ libraries beneath it would bind
 * operator new to a privately loaded jemalloc. What it needs from here it gets as a jemhooks_host.
 * Concurrency: none of its own; modules stay loaded for good.                                                        */
#include "module_file.h"
#include "error.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *jh_file_of(const void *function) {
    Dl_info found;
    void *entry = NULL;
    if (!dladdr1(function, &found, &entry, RTLD_DL_SYMENT)) return NULL;
    const ElfW(Sym) *symbol = entry;
    return symbol && symbol->st_shndx == SHN_UNDEF ? NULL : found.dli_fname;
}

static int module_path(char *path, size_t size, const char *what, const char *kind) {
    int n;
#ifdef JH_MODULE_FOLDER /* the static library: its modules are where it was installed */
    n = snprintf(path, size, JH_MODULE_FOLDER "/jemhooks/%s_%s.so", what, kind);
#else
    Dl_info here;
    if (!dladdr((const void *)jh_module_symbol, &here) || !here.dli_fname) return -ENOENT;
    const char *slash = strrchr(here.dli_fname, '/');
    int folder = slash ? (int)(slash - here.dli_fname) : 1;
    n = snprintf(path, size, "%.*s/jemhooks/%s_%s.so", folder, slash ? here.dli_fname : ".", what, kind);
#endif
    return n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
}

void *jh_module_symbol(const char *what, const char *kind, const char *symbol) {
    char path[1024];
    if (module_path(path, sizeof path, what, kind) || access(path, F_OK))
        return jh_fail(JEMHOOKS_ERROR_LOAD, ENOENT, "%s %s: this jemhooks was built without it (%s); install its development package and "
                       "configure jemhooks again", what, kind, jemhooks_build_config()), NULL;
    void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!module)
        return jh_fail(JEMHOOKS_ERROR_LOAD, ELIBACC, "%s %s: its module cannot be loaded: %s; install the library that it names", what,
                       kind, dlerror()), NULL;
    void *found = dlsym(module, symbol);
    if (!found)
        jh_fail(JEMHOOKS_ERROR_LOAD, ELIBBAD, "%s %s: %s is not a jemhooks module: it lacks the symbol %s", what, kind, path, symbol);
    return found;
}
