// The gradient of the logits, in place of the logits.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_GRAD_LOGITS_H_
#define LMHEAD_KERNELS_GRAD_LOGITS_H_

#include <cuda_runtime_api.h>

#include "kernels/row_types.h"
#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

// Overwrites columns [0, tile.cols) of each row with the gradient of the objective with respect to
// what the matrix product gave. Rows with is_zero become exactly zero, whatever they held. What
// lies past tile.cols in the last 16 bytes becomes anything. `class_weights` is [vocab_size] when
// there is label smoothing with class weights, else null; `entropy` tells whether rows may have an
// entropy_scale. REQUIRES: not both.
// REQUIRES: as LaunchShardStats; class weights can be read to the next multiple of 32 bytes past
// their end.
cudaError_t LaunchGradLogits(MatrixView logits, VocabTile tile, const RowGrad* rows,
                             const LogitTransform& transform, const float* class_weights,
                             bool entropy, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_GRAD_LOGITS_H_
