// Device code of kernels/squared_norm.h.

#ifndef LMHEAD_KERNELS_DEVICE_SQUARED_NORM_CUH_
#define LMHEAD_KERNELS_DEVICE_SQUARED_NORM_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"

namespace lmhead::kernels::device {

constexpr int kNormThreads = 256;

// partials[block] = the block's share of the sum of squares.
__global__ void __launch_bounds__(kNormThreads)
    SquaredNormKernel(const float* values, int64_t count, double* partials) {
  double sum = 0.0;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kNormThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kNormThreads) {
    const double value = values[i];
    sum += value * value;
  }
  __shared__ double scratch[kNormThreads / kWarpSize];
  sum = BlockSum(sum, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// One block.
__global__ void __launch_bounds__(kNormThreads)
    AddPartialsKernel(const double* partials, int num_partials, bool add, double* result) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < num_partials; i += kNormThreads) sum += partials[i];
  __shared__ double scratch[kNormThreads / kWarpSize];
  sum = BlockSum(sum, scratch);
  if (threadIdx.x == 0) *result = add ? *result + sum : sum;
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_SQUARED_NORM_CUH_
