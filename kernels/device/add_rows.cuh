// Device code of kernels/add_rows.h.

#ifndef LMHEAD_KERNELS_DEVICE_ADD_ROWS_CUH_
#define LMHEAD_KERNELS_DEVICE_ADD_ROWS_CUH_

#include <cstdint>

namespace lmhead::kernels::device {

// One block a row.
__global__ void AddRowsKernel(const float* rows, const int32_t* row_ids, int64_t cols,
                              float* matrix) {
  const int64_t row = blockIdx.x;
  float* const to = matrix + row_ids[row] * cols;
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) to[col] += rows[row * cols + col];
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_ADD_ROWS_CUH_
