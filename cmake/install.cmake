# `cmake --install BUILD --prefix DIR`, and the Debian packages of `cpack` (make package; docs/PACKAGING.md):
#
#   lmhead          bin/lmhead, bin/lmhead-bench, share/lmhead: dashboard, rules, unit, manuals, licences
#   lmhead-client   lib/liblmhead.so, include/lmhead/lmhead.h, lib/pkgconfig/lmhead.pc: the C interface
#
# Components server and client are installed by both, server_debian and client_debian by the packages alone.
# The portable folder is a package of its own kind (cmake/portable.cmake).

if(LMHEAD_PORTABLE)
  return()
endif()

install(FILES deploy/grafana/lmhead.json DESTINATION share/lmhead/grafana COMPONENT server)
install(FILES deploy/prometheus/rules.yaml DESTINATION share/lmhead/prometheus COMPONENT server)
install(FILES deploy/systemd/lmhead.service DESTINATION share/lmhead/systemd COMPONENT server)
install(FILES README.md CHANGELOG.md DESTINATION share/lmhead/doc COMPONENT server)
install(DIRECTORY docs/ DESTINATION share/lmhead/doc/docs COMPONENT server FILES_MATCHING PATTERN "*.md")
# Of what is compiled in; the shared libraries bring their own.
set(header_only nlohmann-json3-dev libspdlog-dev libfmt-dev libxxhash-dev)
if(LMHEAD_HAVE_CUDA)
  list(APPEND header_only cuda-cudart-dev-${CUDAToolkit_VERSION_MAJOR}-${CUDAToolkit_VERSION_MINOR})
endif()
foreach(package ${header_only})
  install(FILES /usr/share/doc/${package}/copyright DESTINATION share/lmhead/licenses RENAME ${package}
    COMPONENT server OPTIONAL)
endforeach()

configure_file(client/c/lmhead.pc.in lmhead.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/lmhead.pc DESTINATION lib/pkgconfig COMPONENT client)

# --- Debian packages ---

set(debian ${PROJECT_SOURCE_DIR}/deploy/debian)
# The prefix is /usr.
install(FILES deploy/systemd/lmhead.service DESTINATION lib/systemd/system COMPONENT server_debian EXCLUDE_FROM_ALL)
install(FILES ${debian}/lmhead.sysusers DESTINATION lib/sysusers.d RENAME lmhead.conf COMPONENT server_debian
  EXCLUDE_FROM_ALL)
install(FILES ${debian}/lmhead.default DESTINATION ../etc/default RENAME lmhead COMPONENT server_debian EXCLUDE_FROM_ALL)
install(FILES ${debian}/copyright DESTINATION share/doc/lmhead COMPONENT server_debian EXCLUDE_FROM_ALL)
install(FILES ${debian}/copyright DESTINATION share/doc/lmhead-client COMPONENT client_debian EXCLUDE_FROM_ALL)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_PACKAGE_CONTACT "lmhead <lmhead@localhost>" CACHE STRING "Maintainer of the packages")
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL server server_debian client client_debian)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_DEBIAN_LMHEAD_PACKAGE_NAME lmhead)
set(CPACK_DEBIAN_LMHEAD_PACKAGE_SECTION net)
set(CPACK_DEBIAN_LMHEAD_DESCRIPTION "LM head of a trainer as a gRPC service
Keeps lm_head.weight, takes hidden states chunk by chunk, answers losses and their
gradients, and applies the optimizer; the logits are never stored.")
# The user of the unit is made by systemd-sysusers.
set(CPACK_DEBIAN_LMHEAD_PACKAGE_DEPENDS "systemd | systemd-standalone-sysusers | systemd-sysusers")
if(LMHEAD_HAVE_CUDA)
  # Opened at run time, when a GPU is used; NVIDIA's packages.
  set(CPACK_DEBIAN_LMHEAD_PACKAGE_SUGGESTS "libcublas-${CUDAToolkit_VERSION_MAJOR}-${CUDAToolkit_VERSION_MINOR}, libnccl2")
endif()
set(CPACK_DEBIAN_LMHEAD_PACKAGE_CONTROL_EXTRA
  ${debian}/conffiles ${debian}/postinst ${debian}/prerm ${debian}/postrm)

set(CPACK_DEBIAN_CLIENT_PACKAGE_NAME lmhead-client)
set(CPACK_DEBIAN_CLIENT_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_CLIENT_DESCRIPTION "C interface of lmhead's client
liblmhead, its header and its pkg-config file: for trainers in any language.")
set(CPACK_DEBIAN_CLIENT_PACKAGE_GENERATE_SHLIBS ON)

include(CPack)
cpack_add_component_group(lmhead)
cpack_add_component_group(client)
cpack_add_component(server GROUP lmhead)
cpack_add_component(server_debian GROUP lmhead)
cpack_add_component(client GROUP client)
cpack_add_component(client_debian GROUP client)
