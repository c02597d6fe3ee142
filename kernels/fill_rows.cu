#include "kernels/device/fill_rows.cuh"
#include "kernels/fill_rows.h"
#include "kernels/launch.h"

namespace lmhead::kernels {
namespace {

constexpr int kThreads = 256;

}  // namespace

cudaError_t LaunchFillRows(const void* row, int64_t num_cols, MatrixView matrix,
                           cudaStream_t stream) {
  if (num_cols > matrix.cols) return cudaErrorInvalidValue;
  return DispatchLogitsDType(matrix.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::FillRowsKernel<<<static_cast<unsigned>(matrix.rows), kThreads, 0, stream>>>(
        static_cast<const T*>(row), num_cols, static_cast<T*>(matrix.data), matrix.cols);
    return cudaGetLastError();
  });
}

}  // namespace lmhead::kernels
