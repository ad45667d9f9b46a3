# The C test programs: each its own executable, over what they share. Included by csrc/CMakeLists.txt.
add_library(test_check OBJECT ${CMAKE_CURRENT_LIST_DIR}/check.c)
target_compile_definitions(test_check PUBLIC _GNU_SOURCE)
target_compile_options(test_check PUBLIC ${warnings})
target_link_libraries(test_check PUBLIC jemhooks Threads::Threads)
foreach(name ahead budget contract events failing fixed forking lifetime lookup registration storm windows)
  add_executable(test_${name} ${CMAKE_CURRENT_LIST_DIR}/${name}.c)
  target_link_libraries(test_${name} PRIVATE test_check)
endforeach()
target_sources(test_contract PRIVATE ${CMAKE_CURRENT_LIST_DIR}/placement.c)
if(TARGET PkgConfig::VERBS) # runs in the guest of ci/vm
  add_executable(test_verbs ${CMAKE_CURRENT_LIST_DIR}/verbs.c)
  target_link_libraries(test_verbs PRIVATE test_check PkgConfig::VERBS)
endif()
