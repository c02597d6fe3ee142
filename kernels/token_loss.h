// From the statistics of whole rows to losses, per-token outputs and the constants of the gradient.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_TOKEN_LOSS_H_
#define LMHEAD_KERNELS_TOKEN_LOSS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_types.h"
#include "proto/types/loss_recipe.h"

namespace lmhead::kernels {

// A policy objective instead of cross entropy.
struct PolicyOptions {
  const RowPolicy* rows = nullptr;  // Null: there is no policy.
  PolicySpec spec;
};

// A divergence beside cross entropy.
struct DivergenceOptions {
  RowDivergenceGrad* grads = nullptr;  // [num_rows], filled in. Null: there is no divergence.
  Divergence kind = Divergence::kForwardKl;
  TopkMass topk_mass = TopkMass::kNone;
  TeacherVocabulary vocabulary = TeacherVocabulary::kEqual;
  float beta = 0.0f;                 // Of JSD.
  float weight = 1.0f;               // divergence_weight, and kl_temperature^2 if so.
  float inverse_temperature = 1.0f;  // 1 / kl_temperature
  bool ids_outside = true;           // Top-k: there are ids outside the k.
  const PairStats* pairs = nullptr;  // Of a teacher head, whole vocabulary.
  const float* jsd_sums = nullptr;   // [num_rows, 2], LaunchJsdSums.
  const TopkStats* topk = nullptr;   // Of a top-k teacher.
};

struct TokenLossOptions {
  float label_smoothing = 0.0f;
  float z_loss = 0.0f;
  const float* class_weights = nullptr;  // [vocab_size], or null for ones.
  int64_t vocab_size = 0;
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  bool entropy = false;               // stats.entropy_sum is there; else the entropy is 0.
  float cross_entropy_weight = 1.0f;  // Of cross entropy and z-loss, when there is a divergence.
  PolicyOptions policy;
  DivergenceOptions divergence;
};

// Fills losses[row] and, unless `grads` is null, grads[row]. Rows with nonfinite[row] set have zero
// outputs and no gradient; ignored rows have lse, entropy and argmax, and no gradient.
// REQUIRES: statistics cover the whole vocabulary.
cudaError_t LaunchTokenLoss(int64_t num_rows, const RowInput* rows, const RowStats* stats,
                            const uint8_t* nonfinite, const TokenLossOptions& options,
                            RowLoss* losses, RowGrad* grads, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_TOKEN_LOSS_H_
