#include "kernels/column_sums.h"
#include "kernels/device/column_sums.cuh"
#include "kernels/launch.h"

namespace lmhead::kernels {

cudaError_t LaunchAddColumnSums(ConstMatrixView matrix, int64_t num_cols, float* sums,
                                cudaStream_t stream) {
  if (num_cols > matrix.cols) return cudaErrorInvalidValue;
  return DispatchLogitsDType(matrix.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t strip = device::kWarpSize * device::Vector<T>::kCount;
    device::AddColumnSumsKernel<<<static_cast<unsigned>(CeilDiv(num_cols, strip)),
                                  device::kColumnWarps * device::kWarpSize, 0, stream>>>(
        static_cast<const T*>(matrix.data), matrix.rows, matrix.cols, num_cols, sums);
    return cudaGetLastError();
  });
}

}  // namespace lmhead::kernels
