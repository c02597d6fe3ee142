// Element type conversions of dense matrices, rounding to nearest, ties to even.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_CONVERT_H_
#define LMHEAD_KERNELS_CONVERT_H_

#include <cuda_runtime_api.h>

#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

// Writes `from` to `to` in to's dtype. REQUIRES: the same shape; the two do not overlap.
cudaError_t LaunchConvert(ConstMatrixView from, MatrixView to, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_CONVERT_H_
