// Device code of kernels/hidden_rows.h.

#ifndef LMHEAD_KERNELS_DEVICE_HIDDEN_ROWS_CUH_
#define LMHEAD_KERNELS_DEVICE_HIDDEN_ROWS_CUH_

#include <cstdint>

#include "kernels/device/convert.cuh"

namespace lmhead::kernels::device {

// One block a row.
template <typename In, typename Out>
__global__ void LoadHiddenRowsKernel(const In* all_from, Out* all_to, int64_t cols, bool keep_flags,
                                     uint8_t* nonfinite) {
  const int64_t row = blockIdx.x;
  const In* const from = all_from + row * cols;
  Out* const to = all_to + row * cols;
  bool finite = true;
  ConvertElements(from, to, cols, threadIdx.x, blockDim.x,
                  [&](Out value) { finite = finite && isfinite(ToFloat(value)); });
  const bool any_nonfinite = __syncthreads_or(!finite);
  if (any_nonfinite) {
    for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) to[col] = FromFloat<Out>(0.0f);
  }
  if (threadIdx.x == 0 && (any_nonfinite || !keep_flags)) nonfinite[row] = any_nonfinite ? 1 : 0;
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_HIDDEN_ROWS_CUH_
