// The libraries that a GPU computes with, by their file names, for those that use them and for
// those that ask whether they are there. UNAVAILABLE with what was looked for and what the loader
// said.

#ifndef LMHEAD_SERVER_LIBRARY_NVIDIA_LIBRARIES_H_
#define LMHEAD_SERVER_LIBRARY_NVIDIA_LIBRARIES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/library/dynamic_library.h"

namespace lmhead {

absl::StatusOr<DynamicLibrary> OpenCublasLt();
absl::StatusOr<DynamicLibrary> OpenNccl();

// "2.28.9", for what ncclGetVersion answers.
std::string NcclVersionText(int version);
// UNAVAILABLE when this one is too old for the service.
absl::Status CheckNcclVersion(int version);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_LIBRARY_NVIDIA_LIBRARIES_H_
