// NVIDIA's libraries by their file names, for those that compute with them and for those that ask
// whether they are there. UNAVAILABLE with what was looked for and what the loader said.

#ifndef LMHEAD_SERVER_LIBRARY_NVIDIA_LIBRARIES_H_
#define LMHEAD_SERVER_LIBRARY_NVIDIA_LIBRARIES_H_

#include "absl/status/statusor.h"
#include "server/library/dynamic_library.h"

namespace lmhead {

absl::StatusOr<DynamicLibrary> OpenCublasLt();
absl::StatusOr<DynamicLibrary> OpenNccl();

}  // namespace lmhead

#endif  // LMHEAD_SERVER_LIBRARY_NVIDIA_LIBRARIES_H_
