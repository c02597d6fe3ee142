#include "kernels/device/hidden_rows.cuh"
#include "kernels/hidden_rows.h"
#include "kernels/launch.h"

namespace lmhead::kernels {
namespace {

constexpr int kThreads = 256;

}  // namespace

cudaError_t LaunchLoadHiddenRows(ConstMatrixView from, MatrixView to, bool keep_flags,
                                 uint8_t* nonfinite, cudaStream_t stream) {
  if (from.rows != to.rows || from.cols != to.cols) return cudaErrorInvalidValue;
  return DispatchDType(from.dtype, [&](auto in) {
    return DispatchLogitsDType(to.dtype, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      device::LoadHiddenRowsKernel<<<static_cast<unsigned>(from.rows), kThreads, 0, stream>>>(
          static_cast<const In*>(from.data), static_cast<Out*>(to.data), from.cols, keep_flags,
          nonfinite);
      return cudaGetLastError();
    });
  });
}

}  // namespace lmhead::kernels
