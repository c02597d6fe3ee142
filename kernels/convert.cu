#include <algorithm>

#include "kernels/convert.h"
#include "kernels/device/convert.cuh"
#include "kernels/launch.h"

namespace lmhead::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksMax = 2048;

}  // namespace

cudaError_t LaunchConvert(ConstMatrixView from, MatrixView to, cudaStream_t stream) {
  if (from.rows != to.rows || from.cols != to.cols) return cudaErrorInvalidValue;
  const int64_t count = from.rows * from.cols;
  if (count == 0) return cudaSuccess;
  const int64_t blocks = std::min(kBlocksMax, CeilDiv(count, kThreads * 4));
  return DispatchDType(from.dtype, [&](auto in) {
    return DispatchDType(to.dtype, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      device::ConvertKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
          static_cast<const In*>(from.data), static_cast<Out*>(to.data), count);
      return cudaGetLastError();
    });
  });
}

cudaError_t LaunchConvertColumns(ConstMatrixView from, MatrixView to, int64_t num_cols,
                                 cudaStream_t stream) {
  if (from.rows != to.rows || num_cols > from.cols || num_cols > to.cols) {
    return cudaErrorInvalidValue;
  }
  return DispatchDType(from.dtype, [&](auto in) {
    return DispatchDType(to.dtype, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      device::ConvertColumnsKernel<<<static_cast<unsigned>(from.rows), kThreads, 0, stream>>>(
          static_cast<const In*>(from.data), from.cols, static_cast<Out*>(to.data), to.cols,
          num_cols);
      return cudaGetLastError();
    });
  });
}

}  // namespace lmhead::kernels
