# jemalloc, the system's.
include(${CMAKE_CURRENT_LIST_DIR}/library.cmake)
pkg_check_modules(JEMALLOC jemalloc)
if(NOT JEMALLOC_FOUND)
  message(FATAL_ERROR "jemhooks needs jemalloc, 5.0.1 or later, or 4.1 to 4.5, with its header; pkg-config finds none. "
                      "Install libjemalloc-dev (Debian, Ubuntu), jemalloc-devel (Fedora, RHEL) or jemalloc (Homebrew, Spack), or "
                      "set PKG_CONFIG_PATH.")
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+\\.[0-9]+" version "${JEMALLOC_VERSION}")
if(version AND NOT version STREQUAL "0.0.0" AND (version VERSION_LESS 4.1 OR version VERSION_EQUAL 5.0.0))
  message(FATAL_ERROR "jemhooks needs jemalloc 5.0.1 or later, or 4.1 to 4.5; pkg-config finds ${JEMALLOC_VERSION} in "
                      "${JEMALLOC_LIBDIR}. Install a newer libjemalloc-dev, or point PKG_CONFIG_PATH at one.")
endif()
if(NOT JEMALLOC_LIBDIR)
  pkg_get_variable(JEMALLOC_LIBDIR jemalloc libdir)
endif()
set(allocator_sources)
foreach(name chunk_hooks ctl extent_hooks growth heap shard tcache)
  list(APPEND allocator_sources allocator/jemalloc/${name}.c)
endforeach()
set(allocator_include_dirs ${JEMALLOC_INCLUDE_DIRS})
set(allocator_libraries ${JEMALLOC_LINK_LIBRARIES}) # by their paths
set(allocator_pkgconfig jemalloc)
set(allocator_libs "-L${JEMALLOC_LIBDIR} -ljemalloc")
allocator_lies_in("${JEMALLOC_LIBDIR}")
set(allocator_found "jemalloc ${JEMALLOC_VERSION} in ${JEMALLOC_LIBDIR}")

# A header of one jemalloc and the library of another, with another prefix, or one that no shared library can take in: say so now.
allocator_links("#define JEMALLOC_NO_DEMANGLE
#include <jemalloc/jemalloc.h>
int jh_test(void) { void *p = je_mallocx(1, 0); je_dallocx(p, 0); return je_mallctl(\"epoch\", 0, 0, 0, 0); }
" "${JEMALLOC_INCLUDE_DIRS}" "${JEMALLOC_LINK_LIBRARIES}"
  "a shared library cannot be linked with the jemalloc ${JEMALLOC_VERSION} in ${JEMALLOC_LIBDIR} by its header in \
${JEMALLOC_INCLUDEDIR}. If symbols are undefined, header and library have different prefixes (je_ or none): use those of one \
installation. If it says to recompile with -fPIC, only a static jemalloc was found: install the shared one, or libjemalloc_pic.a.")
