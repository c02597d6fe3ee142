// NVIDIA's libraries by their file names, for those that compute with them and for those that ask
// whether they are there. UNAVAILABLE with what was looked for and what the loader said.

#ifndef LMHEAD_SERVER_LIBRARY_NVIDIA_LIBRARIES_H_
#define LMHEAD_SERVER_LIBRARY_NVIDIA_LIBRARIES_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/library/dynamic_library.h"

namespace lmhead {

absl::StatusOr<DynamicLibrary> OpenCublasLt();
absl::StatusOr<DynamicLibrary> OpenNccl();

// Of ncclGetVersion: the first with non-blocking communicators that every call may be used with.
inline constexpr int kLeastNcclVersion = 21800;
// "2.18.0"
std::string NcclVersionText(int version);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_LIBRARY_NVIDIA_LIBRARIES_H_
