// One row copied to every row of a matrix: the bias under a product that adds to what is there.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_FILL_ROWS_H_
#define LMHEAD_KERNELS_FILL_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

// The first num_cols elements of each row of `matrix` become those of `row`, which has its dtype.
cudaError_t LaunchFillRows(const void* row, int64_t num_cols, MatrixView matrix,
                           cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_FILL_ROWS_H_
