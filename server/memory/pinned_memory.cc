#include "server/memory/pinned_memory.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"

namespace lmhead {
namespace {

bool IsNoGpu(cudaError_t error) {
  return error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver;
}

}  // namespace

absl::Status PinHostMemory(int device, void* data, int64_t bytes) {
  cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess && !IsNoGpu(error)) {
    cudaGetLastError();
    return absl::UnavailableError(
        absl::StrCat("GPU ", device, " cannot be used: ", cudaGetErrorString(error)));
  }
  if (error == cudaSuccess) {
    error = cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterPortable);
  }
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // Reported here, not by a later launch.
  if (IsNoGpu(error)) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the system did not pin ", bytes, " bytes of host memory (",
                   cudaGetErrorString(error), "; `ulimit -l` may be too low)"));
}

void UnpinHostMemory(int device, void* data) {
  cudaSetDevice(device);
  cudaHostUnregister(data);
  cudaGetLastError();  // Memory that was not pinned, or a device that is lost: nothing to undo.
}

}  // namespace lmhead
