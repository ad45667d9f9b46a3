# What every allocator that is a library of the system needs to know of it.

# Its directory goes into the rpath, unless the linker looks there anyway: allocator_rpath.
macro(allocator_lies_in directory)
  set(allocator_rpath)
  if(NOT "${directory}" STREQUAL "" AND NOT "${directory}" IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
    set(allocator_rpath "${directory}")
  endif()
endmacro()

# Links a shared library of `code` with it, by the header in `include_dirs`; stops with `message` and what the linker said if that
# cannot be done.
function(allocator_links code include_dirs libraries message)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/allocator_links.c)
  file(WRITE ${source} "${code}")
  try_compile(allocator_can_be_linked ${CMAKE_CURRENT_BINARY_DIR}/allocator_links ${source} OUTPUT_VARIABLE said
              CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${include_dirs}"
              COMPILE_DEFINITIONS -fPIC LINK_OPTIONS -shared -Wl,-z,defs LINK_LIBRARIES ${libraries} -lpthread -ldl -lm)
  if(NOT allocator_can_be_linked)
    message(FATAL_ERROR "jemhooks: ${message} What the compiler said:\n${said}")
  endif()
  unset(allocator_can_be_linked CACHE)
endfunction()
