// Element type conversions of dense matrices, rounding to nearest, ties to even.
//
// Host-callable launchers: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_CONVERT_H_
#define LMHEAD_KERNELS_CONVERT_H_

#include <cuda_runtime_api.h>

#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

// Writes `from` to `to` in to's dtype. REQUIRES: the same shape; the two do not overlap.
cudaError_t LaunchConvert(ConstMatrixView from, MatrixView to, cudaStream_t stream);

// The first num_cols columns of each row. REQUIRES: both have as many rows and at least as many
// columns.
cudaError_t LaunchConvertColumns(ConstMatrixView from, MatrixView to, int64_t num_cols,
                                 cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_CONVERT_H_
