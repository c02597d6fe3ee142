# `cmake --install BUILD --prefix DIR`, and the Debian packages of `cpack` (make package; docs/PACKAGING.md):
#
#   lmhead          bin/lmhead, bin/lmhead-bench, share/lmhead: dashboard, rules, unit, API, licences; manuals in share/doc, man pages
#   liblmhead0      lib/liblmhead.so.0: the C interface, for programs that were built with it
#   liblmhead-dev   lib/liblmhead.so, include/lmhead/lmhead.h, lib/pkgconfig/lmhead.pc: the C interface, to build with
#
# Component server is installed by both, client by `cmake --install` alone, those that end in _debian by the packages alone: there a library
# lies in the folder of its architecture. The portable folder is a package of its own kind (cmake/portable.cmake).

if(LMHEAD_PORTABLE)
  return()
endif()

install(FILES deploy/grafana/lmhead.json DESTINATION share/lmhead/grafana COMPONENT server)
install(FILES deploy/prometheus/rules.yaml DESTINATION share/lmhead/prometheus COMPONENT server)
install(FILES deploy/systemd/lmhead.service DESTINATION share/lmhead/systemd COMPONENT server)
install(FILES README.md CHANGELOG.md DESTINATION share/doc/lmhead COMPONENT server)
install(DIRECTORY docs/ DESTINATION share/doc/lmhead/docs COMPONENT server FILES_MATCHING PATTERN "*.md")
install(DIRECTORY proto/lmhead DESTINATION share/lmhead/proto COMPONENT server FILES_MATCHING PATTERN "*.proto")
# Of what is compiled in; the shared libraries bring their own.
set(header_only nlohmann-json3-dev libspdlog-dev libfmt-dev libxxhash-dev)
if(LMHEAD_HAVE_CUDA)
  list(APPEND header_only cuda-cudart-dev-${CUDAToolkit_VERSION_MAJOR}-${CUDAToolkit_VERSION_MINOR})
endif()
foreach(package ${header_only})
  install(FILES /usr/share/doc/${package}/copyright DESTINATION share/lmhead/licenses RENAME ${package}
    COMPONENT server OPTIONAL)
endforeach()

# The packed form of a file: manuals and changelogs are installed so. -n leaves the time out: the same input gives the same file.
find_program(LMHEAD_GZIP gzip REQUIRED)
function(lmhead_gzip input output)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${input})
  execute_process(COMMAND ${LMHEAD_GZIP} -9nc ${input} OUTPUT_FILE ${output} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

foreach(page lmhead lmhead-bench)
  lmhead_gzip(${PROJECT_SOURCE_DIR}/deploy/man/${page}.1 ${PROJECT_BINARY_DIR}/${page}.1.gz)
  install(FILES ${PROJECT_BINARY_DIR}/${page}.1.gz DESTINATION share/man/man1 COMPONENT server)
endforeach()

# A copy of lmhead.pc for libraries in that folder of the prefix; the prefix is found from where the file lies.
function(lmhead_pkg_config libdir component)
  set(LMHEAD_LIBDIR ${libdir})
  string(REGEX REPLACE "[^/]+" ".." LMHEAD_TO_PREFIX ${libdir}/pkgconfig)
  configure_file(client/c/lmhead.pc.in ${component}/lmhead.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${component}/lmhead.pc DESTINATION ${libdir}/pkgconfig COMPONENT ${component} ${ARGN})
endfunction()

lmhead_pkg_config(lib client)

# --- Debian packages ---

set(debian ${PROJECT_SOURCE_DIR}/deploy/debian)
set(debian_libdir lib/${CMAKE_LIBRARY_ARCHITECTURE})  # Below the prefix, which is /usr.
# Who answers for the packages: say it when you build them for others.
set(CPACK_PACKAGE_CONTACT "lmhead <lmhead@localhost>" CACHE STRING "Maintainer of the packages")

install(FILES deploy/systemd/lmhead.service DESTINATION lib/systemd/system COMPONENT server_debian EXCLUDE_FROM_ALL)
install(FILES ${debian}/lmhead.sysusers DESTINATION lib/sysusers.d RENAME lmhead.conf COMPONENT server_debian
  EXCLUDE_FROM_ALL)
install(FILES ${debian}/lmhead.default DESTINATION ../etc/default RENAME lmhead COMPONENT server_debian EXCLUDE_FROM_ALL)

install(TARGETS lmhead_shared LIBRARY DESTINATION ${debian_libdir} NAMELINK_SKIP COMPONENT library_debian EXCLUDE_FROM_ALL)
install(TARGETS lmhead_shared LIBRARY DESTINATION ${debian_libdir} NAMELINK_ONLY COMPONENT dev_debian EXCLUDE_FROM_ALL)
install(FILES client/c/lmhead.h DESTINATION include/lmhead COMPONENT dev_debian EXCLUDE_FROM_ALL)
lmhead_pkg_config(${debian_libdir} dev_debian EXCLUDE_FROM_ALL)

# What Debian wants in every package.
string(TIMESTAMP LMHEAD_CHANGELOG_DATE "%a, %d %b %Y %H:%M:%S +0000" UTC)
function(lmhead_debian_documents package component)
  set(LMHEAD_PACKAGE ${package})
  configure_file(${debian}/changelog.in ${component}/changelog @ONLY)
  lmhead_gzip(${PROJECT_BINARY_DIR}/${component}/changelog ${PROJECT_BINARY_DIR}/${component}/changelog.gz)
  install(FILES ${PROJECT_BINARY_DIR}/${component}/changelog.gz ${debian}/copyright DESTINATION share/doc/${package}
    COMPONENT ${component} EXCLUDE_FROM_ALL)
  install(FILES ${debian}/${package}.lintian-overrides DESTINATION share/lintian/overrides RENAME ${package}
    COMPONENT ${component} EXCLUDE_FROM_ALL)
endfunction()

lmhead_debian_documents(lmhead server_debian)
lmhead_debian_documents(liblmhead0 library_debian)
lmhead_debian_documents(liblmhead-dev dev_debian)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL server server_debian library_debian dev_debian)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
# A program needs the library that it was built with, or a newer one: the number of liblmhead.so changes with what breaks programs.
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_DEBIAN_LMHEAD_PACKAGE_NAME lmhead)
set(CPACK_DEBIAN_LMHEAD_PACKAGE_SECTION net)
set(CPACK_DEBIAN_LMHEAD_DESCRIPTION "LM head of a trainer as a gRPC service
Keeps lm_head.weight, takes hidden states chunk by chunk, answers losses and
their gradients, and applies the optimizer; the logits are never stored.")
# The user of the unit is made by systemd-sysusers.
set(CPACK_DEBIAN_LMHEAD_PACKAGE_DEPENDS "systemd | systemd-standalone-sysusers | systemd-sysusers")
if(LMHEAD_HAVE_CUDA)
  # Opened at run time, when a GPU is used; NVIDIA's packages.
  set(CPACK_DEBIAN_LMHEAD_PACKAGE_SUGGESTS "libcublas-${CUDAToolkit_VERSION_MAJOR}-${CUDAToolkit_VERSION_MINOR}, libnccl2")
endif()
set(CPACK_DEBIAN_LMHEAD_PACKAGE_CONTROL_EXTRA
  ${debian}/conffiles ${debian}/postinst ${debian}/prerm ${debian}/postrm)

set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME liblmhead0)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_LIBRARY_DESCRIPTION "C interface of lmhead's client, shared library
lmhead is a gRPC service that computes the LM head's loss for a trainer. This
library is the client, for trainers in any language that can call C.")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONTROL_EXTRA ${debian}/triggers)

set(CPACK_DEBIAN_DEV_PACKAGE_NAME liblmhead-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "liblmhead0 (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_DEV_DESCRIPTION "C interface of lmhead's client, to build with
lmhead is a gRPC service that computes the LM head's loss for a trainer. Here
are the header and the pkg-config file of its client, whose manual they are.")

include(CPack)
foreach(group lmhead library dev)
  cpack_add_component_group(${group})
endforeach()
cpack_add_component(server GROUP lmhead)
cpack_add_component(server_debian GROUP lmhead)
cpack_add_component(library_debian GROUP library)
cpack_add_component(dev_debian GROUP dev)
