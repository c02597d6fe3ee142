// From the statistics of whole rows to losses, per-token outputs and the constants of the gradient.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_TOKEN_LOSS_H_
#define LMHEAD_KERNELS_TOKEN_LOSS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_types.h"

namespace lmhead::kernels {

struct TokenLossOptions {
  float label_smoothing = 0.0f;
  float z_loss = 0.0f;
  const float* class_weights = nullptr;  // [vocab_size], or null for ones.
  int64_t vocab_size = 0;
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  bool entropy = false;  // stats.entropy_sum is there; else the entropy is 0.
};

// Fills losses[row] and, unless `grads` is null, grads[row]. Rows with nonfinite[row] set have zero
// outputs and no gradient; ignored rows have lse, entropy and argmax, and no gradient.
// REQUIRES: `stats` covers the whole vocabulary.
cudaError_t LaunchTokenLoss(int64_t num_rows, const RowInput* rows, const RowStats* stats,
                            const uint8_t* nonfinite, const TokenLossOptions& options,
                            RowLoss* losses, RowGrad* grads, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_TOKEN_LOSS_H_
