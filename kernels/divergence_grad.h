// The gradient of a loss with a divergence in it, in place of the student's logits.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_DIVERGENCE_GRAD_H_
#define LMHEAD_KERNELS_DIVERGENCE_GRAD_H_

#include <cuda_runtime_api.h>

#include "kernels/pair_stats.h"
#include "kernels/row_types.h"

namespace lmhead::kernels {

struct DivergenceGradOptions {
  Divergence divergence = Divergence::kForwardKl;
  float beta = 0.0f;  // Of JSD.
  // Columns from here on have no part in the divergence.
  int64_t divergence_cols = 0;
  bool cross_entropy = false;            // There is a cross-entropy part, which `rows` describes.
  const float* class_weights = nullptr;  // [vocab_size], as LaunchGradLogits.
};

// Overwrites columns [0, tile.cols) of each of the student's rows with the gradient of the loss
// with respect to what the matrix product gave. Of kTopkForwardKl, this is the part of the ids
// outside the k alone (LaunchTopkGrads writes the rest), and there is no teacher: its view is null.
// Otherwise as LaunchGradLogits.
cudaError_t LaunchDivergenceGrad(const LogitsPair& pair, const DivergenceGradOptions& options,
                                 const RowGrad* rows, const RowDivergenceGrad* divergence_rows,
                                 cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_DIVERGENCE_GRAD_H_
