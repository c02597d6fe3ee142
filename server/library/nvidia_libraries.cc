#include "server/library/nvidia_libraries.h"

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

// By the loader's own search first, then where NVIDIA's packages put them.
constexpr const char* kCublasLtFiles[] = {
    "libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13", "libcublasLt.so.12",
    "/usr/local/cuda/lib64/libcublasLt.so.12"};
constexpr const char* kNcclFiles[] = {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2",
                                      "/usr/local/cuda/lib/libnccl.so.2"};

// The first with non-blocking communicators that every call may be used with.
constexpr int kLeastNcclVersion = 21800;

}  // namespace

absl::StatusOr<DynamicLibrary> OpenCublasLt() {
  return DynamicLibrary::Open("cuBLASLt", kCublasLtFiles);
}

absl::StatusOr<DynamicLibrary> OpenNccl() { return DynamicLibrary::Open("NCCL", kNcclFiles); }

std::string NcclVersionText(int version) {
  const int major = version < 10000 ? 1000 : 10000;  // Before and since 2.9.
  return absl::StrCat(version / major, ".", version % major / 100, ".", version % 100);
}

absl::Status CheckNcclVersion(int version) {
  if (version >= kLeastNcclVersion) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("NCCL has version ", NcclVersionText(version),
                                             ", wanted ", NcclVersionText(kLeastNcclVersion),
                                             " or later"));
}

}  // namespace lmhead
