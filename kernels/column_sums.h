// The gradient of the bias: column sums of the gradient of the logits.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_COLUMN_SUMS_H_
#define LMHEAD_KERNELS_COLUMN_SUMS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

// sums[col] += the float32 sum of column col over all rows, for col in [0, num_cols). The
// order of additions is the same in every run. REQUIRES: as LaunchShardStats of `matrix`.
cudaError_t LaunchAddColumnSums(ConstMatrixView matrix, int64_t num_cols, float* sums,
                                cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_COLUMN_SUMS_H_
