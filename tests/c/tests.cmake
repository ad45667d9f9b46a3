# The C test programs: each its own executable, over what they share. Included by csrc/CMakeLists.txt.
add_library(test_check OBJECT ${CMAKE_CURRENT_LIST_DIR}/check.c)
target_compile_definitions(test_check PUBLIC _GNU_SOURCE)
target_compile_options(test_check PUBLIC ${warnings})
target_link_libraries(test_check PUBLIC jemhooks Threads::Threads)
foreach(name contract)
  add_executable(test_${name} ${CMAKE_CURRENT_LIST_DIR}/${name}.c)
  target_link_libraries(test_${name} PRIVATE test_check)
endforeach()
