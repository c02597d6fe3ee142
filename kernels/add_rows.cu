#include "kernels/add_rows.h"
#include "kernels/device/add_rows.cuh"

namespace lmhead::kernels {
namespace {

constexpr int kThreads = 256;

}  // namespace

cudaError_t LaunchAddRows(const float* rows, const int32_t* row_ids, int64_t num_rows, int64_t cols,
                          float* matrix, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  device::AddRowsKernel<<<static_cast<unsigned>(num_rows), kThreads, 0, stream>>>(rows, row_ids,
                                                                                  cols, matrix);
  return cudaGetLastError();
}

}  // namespace lmhead::kernels
