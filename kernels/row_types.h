// What the row kernels pass to each other: one small record a row, in device memory.
//
// A row is one token. Host code fills RowInput and reads RowLoss; the rest stays on the device.
// All records are read and written whole, so their sizes are multiples of 16 bytes.

#ifndef LMHEAD_KERNELS_ROW_TYPES_H_
#define LMHEAD_KERNELS_ROW_TYPES_H_

#include <cstdint>

namespace lmhead::kernels {

// What the caller says of a row.
struct RowInput {
  int32_t target = -1;            // Vocabulary id, or -1 where ignored.
  float grad_coefficient = 0.0f;  // token_weight * grad_scale.
  float inverse_temperature = 1.0f;
  int32_t padding = 0;
};
static_assert(sizeof(RowInput) == 16);

// Statistics of a row over the vocabulary columns seen so far. Two of them merge into one.
struct RowStats {
  float logits_max;
  float sum_exp;            // Sum of exp(z - logits_max).
  float target_logit;       // 0 where the target is in none of the columns.
  float entropy_sum;        // Sum of exp(z - logits_max) * (z - logits_max).
  double smoothing_sum;     // Sum of class weight * z over columns that are not masked.
  double smoothing_weight;  // Sum of class weight over the same columns.
  int32_t argmax;           // Vocabulary id, the lowest among equals.
  int32_t padding[3];
};
static_assert(sizeof(RowStats) == 48);

// What became of a row: the per-token outputs and the terms of the chunk's sums.
struct RowLoss {
  enum State : int32_t { kIgnored = 0, kValid = 1, kNonfinite = 2 };

  float cross_entropy;  // 0 unless valid, like z_loss and logprob.
  float logprob;
  float lse;
  float entropy;
  int32_t argmax;
  float z_loss;
  float class_weight;  // Of the target; 0 unless valid.
  int32_t state;
};
static_assert(sizeof(RowLoss) == 32);

// What the gradient pass needs of a row: dz_j = exp(z_j - logits_max) * prob_scale
// - class weight_j * uniform_grad, times 1 - (z2 / softcap)^2, except at the target.
struct RowGrad {
  float logits_max;
  float prob_scale;
  float uniform_grad;
  float target_grad;  // The finished gradient of the target's logit.
  float inverse_temperature;
  int32_t target;   // -1: none.
  int32_t is_zero;  // The whole row's gradient is zero.
  int32_t padding;
};
static_assert(sizeof(RowGrad) == 32);

// From the accumulator of the matrix product to the final logit (docs/NUMERICS.md):
// z = softcap * tanh(logit_scale * z0 / softcap) / temperature. A z0 of -inf, which comes from the
// bias, masks the column, whatever follows.
struct LogitTransform {
  float logit_scale = 1.0f;
  float softcap = 0.0f;  // 0 means none.
};

// Whether logits need more than a multiplication that keeps their order.
constexpr bool NeedsTransform(const LogitTransform& transform) {
  return transform.softcap != 0.0f || transform.logit_scale <= 0.0f;
}

// A run of vocabulary columns of all rows of a batch.
struct VocabTile {
  int64_t start = 0;  // Vocabulary id of column 0.
  int64_t cols = 0;
};

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_ROW_TYPES_H_
