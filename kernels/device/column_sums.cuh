// Device code of kernels/column_sums.h.

#ifndef LMHEAD_KERNELS_DEVICE_COLUMN_SUMS_CUH_
#define LMHEAD_KERNELS_DEVICE_COLUMN_SUMS_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"

namespace lmhead::kernels::device {

constexpr int kColumnWarps = 16;

// One block a strip of 32 vectors; each warp sums every kColumnWarps-th row, lane by lane.
template <typename T>
__global__ void __launch_bounds__(kColumnWarps* kWarpSize)
    AddColumnSumsKernel(const T* matrix, int64_t num_rows, int64_t row_stride, int64_t num_cols,
                        float* sums) {
  constexpr int kCount = Vector<T>::kCount;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * kWarpSize + lane) * kCount;
  float partial[kCount] = {};
  if (col < num_cols) {
#pragma unroll 4
    for (int64_t row = warp; row < num_rows; row += kColumnWarps) {
      const Vector<T> vector = Vector<T>::Load(matrix + row * row_stride + col);
#pragma unroll
      for (int k = 0; k < kCount; ++k) partial[k] += ToFloat(vector.values[k]);
    }
  }
  __shared__ float partials[kColumnWarps][kCount][kWarpSize];
#pragma unroll
  for (int k = 0; k < kCount; ++k) partials[warp][k][lane] = partial[k];
  __syncthreads();
  for (int i = threadIdx.x; i < kWarpSize * kCount; i += blockDim.x) {
    const int64_t sum_col = static_cast<int64_t>(blockIdx.x) * kWarpSize * kCount + i;
    if (sum_col >= num_cols) break;
    float sum = 0.0f;
    for (int w = 0; w < kColumnWarps; ++w) sum += partials[w][i % kCount][i / kCount];
    sums[sum_col] += sum;
  }
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_COLUMN_SUMS_CUH_
