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

// What a policy recipe's chunk says of a row; what the recipe does not ask for is 0.
struct RowPolicy {
  float logprob_grad = 0.0f;
  float entropy_grad = 0.0f;
  float old_logprob = 0.0f;
  float advantage = 0.0f;
  float reference_logprob = 0.0f;
  float padding[3] = {};
};
static_assert(sizeof(RowPolicy) == 32);

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

// Statistics of a row's student logits u and teacher logits v, both at the temperature of the
// divergence, over the ids that it is taken over. Two of them merge into one.
struct PairStats {
  float student_max;
  float student_sum_exp;  // Sum of exp(u - student_max).
  float teacher_max;
  float teacher_sum_exp;  // Sum of exp(v - teacher_max).
  // Forward KL: sum of exp(v - teacher_max) ((v - teacher_max) - (u - student_max)); reverse KL:
  // the same with the sides exchanged; else 0. Infinite where the divergence is.
  float cross_sum;
  // The teacher's ids that the student does not have.
  float tail_max;
  float tail_sum_exp;
  float padding;
};
static_assert(sizeof(PairStats) == 32);

// What the k ids of a top-k teacher and the student's u add up to in a row.
struct TopkStats {
  float outside_max;      // Over the ids outside the k.
  float outside_sum_exp;  // Sum of exp(u - outside_max) there.
  float total_max;        // Over all ids.
  float total_sum_exp;
  float mass;       // Sum of q over the k.
  float cross_sum;  // Sum over the k of q (log q - (u - total_max)).
  float padding[2];
};
static_assert(sizeof(TopkStats) == 32);

// What became of a row: the per-token outputs and the terms of the chunk's sums. The four parts of
// the loss have the recipe's weights in them.
struct RowLoss {
  enum State : int32_t { kIgnored = 0, kValid = 1, kNonfinite = 2 };

  float cross_entropy;  // 0 unless valid, like the other parts and logprob.
  float z_loss;
  float divergence;
  float policy;
  float logprob;
  float lse;
  float entropy;
  float class_weight;  // Of the target; 0 unless valid, like the next two.
  float dropped_teacher_mass;
  float old_policy_kl;
  int32_t argmax;
  int32_t state;
  int32_t clipped;  // 1 where a clip left the policy's ratio without gradient.
  int32_t padding[3];
};
static_assert(sizeof(RowLoss) == 64);

// What the gradient pass needs of a row: dz_j = exp(z_j - logits_max) * (prob_scale
// + entropy_scale * (z_j - logits_max)) - class weight_j * uniform_grad, times
// 1 - (z2 / softcap)^2, except at the target.
struct RowGrad {
  float logits_max;
  float prob_scale;
  float uniform_grad;
  float target_grad;  // The finished gradient of the target's logit.
  float inverse_temperature;
  int32_t target;   // -1: none.
  int32_t is_zero;  // The whole row's gradient is zero.
  float entropy_scale;
};
static_assert(sizeof(RowGrad) == 32);

// What the gradient pass needs of a row's divergence besides, P = exp(u - student_max),
// Q = exp(v - teacher_max), before the softcap's derivative:
//   forward KL  student_scale P - teacher_scale Q
//   reverse KL  student_scale P ((u - student_max) - (v - teacher_max) + offset)
//   JSD         student_scale P (-log(1 + beta (exp(d) - 1)) + offset),
//               d = (v - teacher_max) - (u - student_max) + log_ratio
//   top-k       student_scale P outside the k ids, and at id k, whose teacher has probability q_k,
//               inside_scale exp(u - inside_max) - teacher_scale q_k
struct RowDivergenceGrad {
  float student_max;
  float student_scale;
  float teacher_max;
  float teacher_scale;
  float offset;
  float log_ratio;
  float inside_max;
  float inside_scale;
};
static_assert(sizeof(RowDivergenceGrad) == 32);

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
