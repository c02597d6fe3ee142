# Every dependency of the project, found once, under the names that the project links:
#   lmhead_absl, lmhead_protobuf, lmhead_grpc, lmhead_grpc_reflection, lmhead_crypto, lmhead_spdlog, lmhead_dnnl, lmhead_gloo;
#   prometheus-cpp::pull, nlohmann_json::nlohmann_json, PkgConfig::xxhash, GTest::gmock.
# They are the system's shared libraries, or with LMHEAD_PORTABLE its archives where it has them (cmake/portable.cmake).

find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED COMPONENTS core pull)
find_package(OpenMP REQUIRED)
find_package(spdlog CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(GTest CONFIG REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
find_program(GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)

if(NOT LMHEAD_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES ${LMHEAD_CUDA_ARCHITECTURES})
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know that nvcc has it.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)  # After enable_language: its own first test does not know the flag yet.
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    find_package(CUDAToolkit REQUIRED)
    find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})  # Optional; opened at run time.
    set(LMHEAD_HAVE_CUDA ON)
  elseif(LMHEAD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LMHEAD_CUDA=ON, but no CUDA compiler was found: install the CUDA toolkit or set CUDACXX")
  endif()
endif()
if(NOT LMHEAD_HAVE_CUDA)
  set(LMHEAD_HAVE_CUDA OFF)
endif()
message(STATUS "lmhead: CUDA ${LMHEAD_HAVE_CUDA}, portable ${LMHEAD_PORTABLE}, sanitizers '${LMHEAD_SANITIZE}'")

add_library(lmhead_absl INTERFACE)
add_library(lmhead_protobuf INTERFACE)
add_library(lmhead_grpc INTERFACE)
add_library(lmhead_grpc_reflection INTERFACE)
add_library(lmhead_crypto INTERFACE)  # OpenSSL's, as gRPC has it.
add_library(lmhead_spdlog INTERFACE)
if(LMHEAD_PORTABLE)
  include(cmake/portable.cmake)
else()
  target_link_libraries(lmhead_absl INTERFACE absl::status absl::statusor absl::strings absl::str_format
    absl::synchronization absl::time absl::flags absl::flags_parse absl::flags_usage absl::flat_hash_map
    absl::random_random)
  target_link_libraries(lmhead_protobuf INTERFACE protobuf::libprotobuf)
  target_link_libraries(lmhead_grpc INTERFACE gRPC::grpc++)
  target_link_libraries(lmhead_grpc_reflection INTERFACE gRPC::grpc++_reflection)
  target_link_libraries(lmhead_crypto INTERFACE OpenSSL::Crypto)
  target_link_libraries(lmhead_spdlog INTERFACE spdlog::spdlog)
endif()
target_link_libraries(lmhead_protobuf INTERFACE Threads::Threads)
target_link_libraries(lmhead_grpc INTERFACE lmhead_protobuf lmhead_absl)
target_link_libraries(lmhead_grpc_reflection INTERFACE lmhead_grpc)

# oneDNN by hand: its package file asks for an OpenCL development package that a CPU user does not need.
find_path(DNNL_INCLUDE_DIR dnnl.hpp REQUIRED)
find_library(DNNL_LIBRARY dnnl REQUIRED)
add_library(lmhead_dnnl INTERFACE)
target_include_directories(lmhead_dnnl SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
target_link_libraries(lmhead_dnnl INTERFACE ${DNNL_LIBRARY} lmhead_openmp)

# Gloo by hand as well: its package file names a target without a namespace, and no archive exists.
find_path(GLOO_INCLUDE_DIR gloo/context.h REQUIRED)
find_library(GLOO_LIBRARY gloo REQUIRED)
add_library(lmhead_gloo INTERFACE)
target_include_directories(lmhead_gloo SYSTEM INTERFACE ${GLOO_INCLUDE_DIR})
target_link_libraries(lmhead_gloo INTERFACE ${GLOO_LIBRARY})

# Our parallel loops. The thread sanitizer does not see what libgomp orders: under it they are plain loops, and only
# oneDNN has threads of its own.
add_library(lmhead_openmp INTERFACE)
if(LMHEAD_SANITIZE STREQUAL "thread")
  target_link_libraries(lmhead_openmp INTERFACE ${OpenMP_gomp_LIBRARY})
  target_compile_options(lmhead_openmp INTERFACE -Wno-unknown-pragmas)
else()
  target_link_libraries(lmhead_openmp INTERFACE OpenMP::OpenMP_CXX)
endif()
