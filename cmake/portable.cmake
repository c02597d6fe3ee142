# LMHEAD_PORTABLE: one folder, build/portable/bin, that runs on a bare system of glibc 2.36 or later with or without CUDA.
#
#   bin/lmhead          the one executable; it acts by the name it is called by
#   bin/lmhead-bench    links to it
#   bin/lmhead-tests    (not with LMHEAD_TESTS=OFF, as for a release archive)
#   bin/golden/         the golden cases, with the tests
#   bin/lib/            the shared objects that have no archive: oneDNN, Gloo, prometheus-cpp and what they need
#
# One executable, because each would carry gRPC, protobuf and abseil again. They come from the system's archives, which
# suit only executables (their thread-local code is not for shared objects). CUDA's runtime is static; cuBLAS and the
# driver are opened when a GPU is used. The libraries in lib/ are found by DT_RPATH, which unlike DT_RUNPATH also holds
# for what they need themselves.

# One linker script that names the archives as one group: they need each other in circles.
pkg_check_modules(LMHEAD_ARCHIVES REQUIRED grpc++ protobuf openssl absl_status absl_statusor absl_strings
  absl_str_format absl_synchronization absl_time absl_flags absl_flags_parse absl_flags_usage absl_flat_hash_map
  absl_random_random)
set(archives)
foreach(name grpc++_reflection ${LMHEAD_ARCHIVES_STATIC_LIBRARIES})
  find_library(LMHEAD_ARCHIVE_${name} lib${name}.a)
  mark_as_advanced(LMHEAD_ARCHIVE_${name})
  if(LMHEAD_ARCHIVE_${name})
    list(APPEND archives ${LMHEAD_ARCHIVE_${name}})
  endif()
endforeach()
list(REMOVE_DUPLICATES archives)
list(FILTER archives EXCLUDE REGEX "/lib(pthread|dl|rt|m|c)\\.a$")
list(JOIN archives " " archives)
file(WRITE ${CMAKE_BINARY_DIR}/archives.ld "GROUP ( ${archives} )\n")

foreach(target lmhead_absl lmhead_protobuf lmhead_grpc lmhead_grpc_reflection lmhead_crypto)
  target_link_libraries(${target} INTERFACE ${CMAKE_BINARY_DIR}/archives.ld)
endforeach()
# No archive of it in the system: compiled in, and so is fmt, by every file that logs.
set_target_properties(spdlog::spdlog_header_only PROPERTIES
  INTERFACE_LINK_LIBRARIES "Threads::Threads;fmt::fmt-header-only")
target_link_libraries(lmhead_spdlog INTERFACE spdlog::spdlog_header_only)
find_library(LMHEAD_ARCHIVE_xxhash libxxhash.a REQUIRED)
set_target_properties(PkgConfig::xxhash PROPERTIES INTERFACE_LINK_LIBRARIES ${LMHEAD_ARCHIVE_xxhash})

# The executable, empty at first: lmhead_executable() and lmhead_test() add to it.
add_executable(lmhead ${CMAKE_BINARY_DIR}/portable_main.cc ${PROJECT_SOURCE_DIR}/cmake/portable/no_xds.cc)
target_link_libraries(lmhead PRIVATE ${CMAKE_BINARY_DIR}/archives.ld)
target_link_options(lmhead PRIVATE -Wl,--disable-new-dtags -Wl,--gc-sections -Wl,--as-needed -s)
set_target_properties(lmhead PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/lib")

# Its names, its carried libraries, and the check of what it still needs. Called last, from the root.
function(lmhead_portable_finish)
  if(LMHEAD_TESTS)
    lmhead_executable(lmhead-tests SRCS cmake/portable/tests_main.cc DEPS GTest::gmock)
    set(copy_golden COMMAND ${CMAKE_COMMAND} -E copy_directory ${PROJECT_SOURCE_DIR}/tests/golden golden)
    add_test(NAME lmhead-tests COMMAND ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/lmhead-tests)
  endif()
  get_property(names GLOBAL PROPERTY LMHEAD_PORTABLE_NAMES)
  set(declarations)
  set(table)
  foreach(name ${names})
    string(MAKE_C_IDENTIFIER ${name} function)
    string(APPEND declarations "int ${function}_main(int argc, char** argv);\n")
    string(APPEND table "    {\"${name}\", ${function}_main},\n")
  endforeach()
  configure_file(${PROJECT_SOURCE_DIR}/cmake/portable/main.cc.in ${CMAKE_BINARY_DIR}/portable_main.cc @ONLY)
  list(REMOVE_ITEM names lmhead)
  set(links)
  foreach(name ${names})
    list(APPEND links COMMAND ln -f lmhead ${name})
  endforeach()
  add_custom_command(TARGET lmhead POST_BUILD
    ${links} ${copy_golden}
    COMMAND ${PROJECT_SOURCE_DIR}/cmake/portable/carry.sh $<TARGET_FILE:lmhead>
    WORKING_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY} VERBATIM)
  install(DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/ DESTINATION bin USE_SOURCE_PERMISSIONS)
endfunction()
