#include "kernels/device/squared_norm.cuh"
#include "kernels/squared_norm.h"

namespace lmhead::kernels {

cudaError_t LaunchSquaredNorm(const float* values, int64_t count, bool add, double* partials,
                              double* result, cudaStream_t stream) {
  device::SquaredNormKernel<<<kSquaredNormBlocks, device::kNormThreads, 0, stream>>>(values, count,
                                                                                     partials);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  device::AddPartialsKernel<<<1, device::kNormThreads, 0, stream>>>(partials, kSquaredNormBlocks,
                                                                    add, result);
  return cudaGetLastError();
}

}  // namespace lmhead::kernels
