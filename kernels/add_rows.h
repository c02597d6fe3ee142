// Rows added to rows of a float32 matrix: gradients that come from outside.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_ADD_ROWS_H_
#define LMHEAD_KERNELS_ADD_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lmhead::kernels {

// matrix[row_ids[i]] += rows[i] for num_rows rows of `cols` elements. REQUIRES: ids are distinct.
cudaError_t LaunchAddRows(const float* rows, const int32_t* row_ids, int64_t num_rows, int64_t cols,
                          float* matrix, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_ADD_ROWS_H_
