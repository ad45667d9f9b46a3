# mimalloc 2, the system's; Debian's has no pkg-config file.
include(${CMAKE_CURRENT_LIST_DIR}/library.cmake)
find_path(mimalloc_include mimalloc.h NO_CACHE PATH_SUFFIXES mimalloc-2.0 mimalloc-2.1)
find_library(mimalloc mimalloc NO_CACHE)
if(NOT mimalloc OR NOT mimalloc_include)
  message(FATAL_ERROR "JEMHOOKS_ALLOCATOR=mimalloc needs libmimalloc with its header, which is not found. Install libmimalloc-dev "
                      "(Debian, Ubuntu), mimalloc-devel (Fedora) or mimalloc (Homebrew), or set CMAKE_PREFIX_PATH.")
endif()
file(STRINGS ${mimalloc_include}/mimalloc.h version REGEX "^#define MI_MALLOC_VERSION ")
string(REGEX MATCH "[0-9]+" version "${version}")
if(version LESS 209 OR NOT version LESS 300)
  message(FATAL_ERROR "JEMHOOKS_ALLOCATOR=mimalloc needs mimalloc 2.0.9 or later, but not version 3, which has no block of 32 MiB or "
                      "more, and none aligned to more than 64 KiB, in memory that it is given; ${mimalloc_include}/mimalloc.h is of "
                      "version ${version}. Install mimalloc 2 (Debian 12's libmimalloc-dev), or take tbbmalloc.")
endif()
get_filename_component(libdir ${mimalloc} DIRECTORY)
set(allocator_sources allocator/mimalloc.c allocator/closed.c)
set(allocator_include_dirs ${mimalloc_include})
set(allocator_libraries ${mimalloc})
set(allocator_libs "-L${libdir} -lmimalloc")
allocator_lies_in(${libdir})
set(allocator_found "mimalloc in ${libdir}")
allocator_links("#include <mimalloc.h>
mi_heap_t *jh_test(void) {
    mi_arena_id_t id;
    return mi_manage_os_memory_ex(0, 0, true, false, true, -1, true, &id) ? mi_heap_new_in_arena(id) : 0;
}
" ${mimalloc_include} ${mimalloc}
  "a shared library cannot be linked with heaps in arenas of ${mimalloc}, by the header in ${mimalloc_include}; it must be a shared \
library of that mimalloc.")
