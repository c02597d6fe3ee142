#include "server/library/nvidia_libraries.h"

namespace lmhead {
namespace {

// By the loader's own search first, then where NVIDIA's packages put them.
constexpr const char* kCublasLtFiles[] = {
    "libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13", "libcublasLt.so.12",
    "/usr/local/cuda/lib64/libcublasLt.so.12"};
constexpr const char* kNcclFiles[] = {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2",
                                      "/usr/local/cuda/lib/libnccl.so.2"};

}  // namespace

absl::StatusOr<DynamicLibrary> OpenCublasLt() {
  return DynamicLibrary::Open("cuBLASLt", kCublasLtFiles);
}

absl::StatusOr<DynamicLibrary> OpenNccl() { return DynamicLibrary::Open("NCCL", kNcclFiles); }

}  // namespace lmhead
