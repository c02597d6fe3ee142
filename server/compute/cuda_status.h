// CUDA error codes as statuses. For the files of this folder that call CUDA.

#ifndef LMHEAD_SERVER_COMPUTE_CUDA_STATUS_H_
#define LMHEAD_SERVER_COMPUTE_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace lmhead {

inline absl::Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
}

}  // namespace lmhead

// Leaves the function with the status of a failed call.
#define LMHEAD_RETURN_IF_ERROR(expression)                                  \
  do {                                                                      \
    if (absl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)
#define LMHEAD_RETURN_IF_CUDA_ERROR(call) \
  LMHEAD_RETURN_IF_ERROR(::lmhead::CudaStatus((call), #call))

#endif  // LMHEAD_SERVER_COMPUTE_CUDA_STATUS_H_
