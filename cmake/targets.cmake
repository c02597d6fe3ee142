# lmhead_library(NAME [SRCS…] [DEPS…]) and lmhead_test(NAME SRCS… [DEPS…] [LABELS…] [ENV…]), with the project's flags.

add_library(lmhead_flags INTERFACE)
target_include_directories(lmhead_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(lmhead_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers -fno-math-errno>)
if(LMHEAD_SANITIZE)
  target_compile_options(lmhead_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${LMHEAD_SANITIZE} -fno-omit-frame-pointer>)
  target_link_options(lmhead_flags INTERFACE -fsanitize=${LMHEAD_SANITIZE})
endif()

function(lmhead_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SRCS})
  target_link_libraries(${name} PUBLIC lmhead_flags ${ARG_DEPS})
endfunction()

function(lmhead_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SRCS;DEPS;LABELS;ENV" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE lmhead_flags ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}" ENVIRONMENT "${ARG_ENV}")
endfunction()
