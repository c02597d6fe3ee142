// Device code of kernels/fill_rows.h.

#ifndef LMHEAD_KERNELS_DEVICE_FILL_ROWS_CUH_
#define LMHEAD_KERNELS_DEVICE_FILL_ROWS_CUH_

#include <cstdint>

namespace lmhead::kernels::device {

// One block a row.
template <typename T>
__global__ void FillRowsKernel(const T* from, int64_t num_cols, T* matrix, int64_t row_stride) {
  T* const row = matrix + blockIdx.x * row_stride;
  for (int64_t col = threadIdx.x; col < num_cols; col += blockDim.x) row[col] = from[col];
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_FILL_ROWS_CUH_
