// Hidden states as they arrived, made ready for the matrix products.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_HIDDEN_ROWS_H_
#define LMHEAD_KERNELS_HIDDEN_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

// Converts `from` to `to` row by row. nonfinite[row] becomes 1 where the row of `from` has a NaN or
// an infinity, and that row of `to` becomes zero; else 0, or with `keep_flags` what it was.
// A finite value that rounds to an infinity of the narrower type counts as one: it is flagged.
// REQUIRES: both have the same shape; `to` is float32 or bfloat16.
cudaError_t LaunchLoadHiddenRows(ConstMatrixView from, MatrixView to, bool keep_flags,
                                 uint8_t* nonfinite, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_HIDDEN_ROWS_H_
