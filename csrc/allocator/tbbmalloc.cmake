# The scalable allocator of oneTBB; it has no pkg-config file of its own, but lies beside libtbb.
include(${CMAKE_CURRENT_LIST_DIR}/library.cmake)
pkg_check_modules(TBB QUIET tbb)
find_library(tbbmalloc tbbmalloc HINTS ${TBB_LIBDIR} NO_CACHE)
if(NOT tbbmalloc)
  message(FATAL_ERROR "JEMHOOKS_ALLOCATOR=tbbmalloc needs libtbbmalloc, which is not found. Install libtbb-dev (Debian, Ubuntu), "
                      "tbb-devel (Fedora, RHEL) or tbb (Homebrew), or set CMAKE_LIBRARY_PATH.")
endif()
get_filename_component(libdir ${tbbmalloc} DIRECTORY)
set(allocator_sources allocator/tbbmalloc.c allocator/closed.c)
set(allocator_libraries ${tbbmalloc})
set(allocator_libs "-L${libdir} -ltbbmalloc")
allocator_lies_in(${libdir})
set(allocator_found "tbbmalloc in ${libdir}")
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/tbbmalloc.c names REGEX "RML\\(\"")
set(code)
foreach(name IN LISTS names) # those that it calls
  string(REGEX REPLACE ".*RML\\(\"([^\"]*)\".*" "_ZN3rml\\1" name "${name}")
  string(APPEND code "int ${name}(void);\nint jh${name}(void) { return ${name}(); }\n")
endforeach()
allocator_links("${code}" "" ${tbbmalloc}
  "a shared library cannot be linked with memory pools of ${tbbmalloc}; it must be a shared library of oneTBB 2021 or later.")
