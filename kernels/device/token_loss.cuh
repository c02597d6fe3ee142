// Device code of kernels/token_loss.h.

#ifndef LMHEAD_KERNELS_DEVICE_TOKEN_LOSS_CUH_
#define LMHEAD_KERNELS_DEVICE_TOKEN_LOSS_CUH_

#include <cstdint>

#include "kernels/device/divergence.cuh"
#include "kernels/device/numeric.cuh"
#include "kernels/device/policy.cuh"
#include "kernels/row_types.h"
#include "kernels/token_loss.h"

namespace lmhead::kernels::device {

// The weights of a valid row's loss: q_j = hard [j = t] + uniform * class weight_j.
struct TargetWeights {
  float hard;         // (1 - e) w_t
  float uniform;      // e / V
  float uniform_sum;  // uniform * sum of class weights that are not masked.
};

__device__ __forceinline__ double TargetLogprob(const RowStats& stats) {
  if (stats.target_logit == MinusInfinity()) return MinusInfinity();  // Masked.
  const double above = static_cast<double>(stats.target_logit) - stats.logits_max;
  return fmin(0.0, above - log(static_cast<double>(stats.sum_exp)));
}

__device__ __forceinline__ double EntropyOf(const RowStats& stats) {
  const double sum_exp = stats.sum_exp;
  return fmax(0.0, log(sum_exp) - stats.entropy_sum / sum_exp);
}

// 1 - (z2 / softcap)^2 of the target.
__device__ __forceinline__ float TargetSoftcapDerivative(const RowStats& stats,
                                                         const RowInput& input, float softcap) {
  if (softcap == 0.0f) return 1.0f;
  if (stats.target_logit == MinusInfinity()) return 0.0f;
  const float t = stats.target_logit / (input.inverse_temperature * softcap);
  return 1.0f - t * t;
}

// What the gradients with respect to z are multiplied by to become those of the product's output.
__device__ __forceinline__ float GradScale(const RowInput& input, const TokenLossOptions& options) {
  return input.grad_coefficient * options.logit_scale * input.inverse_temperature;
}

__device__ __forceinline__ RowGrad StartRowGrad(const RowStats& stats, const RowInput& input) {
  RowGrad grad{};
  grad.logits_max = stats.logits_max;
  grad.inverse_temperature = input.inverse_temperature;
  grad.target = input.target;
  return grad;
}

__device__ __forceinline__ TargetWeights WeightsOf(const RowStats& stats, float class_weight,
                                                   const TokenLossOptions& options) {
  TargetWeights q{};
  q.hard = (1.0f - options.label_smoothing) * class_weight;
  if (options.label_smoothing != 0.0f) {
    q.uniform = options.label_smoothing / static_cast<float>(options.vocab_size);
    q.uniform_sum = q.uniform * static_cast<float>(stats.smoothing_weight);
  }
  return q;
}

__device__ __forceinline__ void AddCrossEntropyLoss(const RowStats& stats, const TargetWeights& q,
                                                    const TokenLossOptions& options,
                                                    RowLoss* loss) {
  float cross_entropy = q.hard != 0.0f ? -q.hard * loss->logprob : 0.0f;
  if (q.uniform_sum != 0.0f) {
    // In double: lse and the mean of z may be large and nearly equal.
    const double lse = static_cast<double>(stats.logits_max) + logf(stats.sum_exp);
    cross_entropy +=
        static_cast<float>(q.uniform * (stats.smoothing_weight * lse - stats.smoothing_sum));
  }
  loss->cross_entropy = Weighted(options.cross_entropy_weight, cross_entropy);
  loss->z_loss = Weighted(options.cross_entropy_weight * options.z_loss, loss->lse * loss->lse);
}

__device__ __forceinline__ RowGrad CrossEntropyGrad(const RowStats& stats, const RowInput& input,
                                                    const TargetWeights& q, const RowLoss& loss,
                                                    const TokenLossOptions& options) {
  const float z_term = options.z_loss != 0.0f ? 2.0f * options.z_loss * loss.lse : 0.0f;
  const float prob_weight = q.hard + q.uniform_sum + z_term;
  const float scale = GradScale(input, options) * options.cross_entropy_weight;
  RowGrad grad = StartRowGrad(stats, input);
  grad.prob_scale = scale * prob_weight / stats.sum_exp;
  grad.uniform_grad = scale * q.uniform;
  // hard * (p - 1) + ..., with p - 1 formed without cancellation. A masked target has p = 0.
  float own = q.hard * expm1f(loss.logprob) + (q.uniform_sum + z_term) * expf(loss.logprob);
  if (stats.target_logit != MinusInfinity()) own -= q.uniform * loss.class_weight;
  grad.target_grad = scale * own * TargetSoftcapDerivative(stats, input, options.softcap);
  return grad;
}

// dz_j = logprob_grad ([j = t] - p_j) - entropy_grad p_j (log p_j + entropy)
__device__ __forceinline__ RowGrad PolicyGrad(const RowStats& stats, const RowInput& input,
                                              const PolicyTerm& term, const RowLoss& loss,
                                              const TokenLossOptions& options) {
  const float scale = GradScale(input, options);
  const float log_sum = logf(stats.sum_exp);
  RowGrad grad = StartRowGrad(stats, input);
  grad.prob_scale =
      -scale * (term.logprob_grad + term.entropy_grad * (loss.entropy - log_sum)) / stats.sum_exp;
  grad.entropy_scale = -scale * term.entropy_grad / stats.sum_exp;
  float own = -term.logprob_grad * expm1f(loss.logprob);
  if (stats.target_logit != MinusInfinity()) {
    own -= term.entropy_grad * expf(loss.logprob) * (loss.logprob + loss.entropy);
  }
  grad.target_grad = scale * own * TargetSoftcapDerivative(stats, input, options.softcap);
  return grad;
}

// A row with a target: its loss and, where it has one, its gradient.
__device__ __forceinline__ void ValidRow(int64_t row, const RowInput& input, const RowStats& stats,
                                         const TokenLossOptions& options, RowLoss* loss,
                                         RowGrad* grad) {
  const bool has_grad = stats.logits_max != MinusInfinity() && input.grad_coefficient != 0.0f;
  loss->state = RowLoss::kValid;
  const double logprob = TargetLogprob(stats);
  loss->logprob = static_cast<float>(logprob);
  loss->class_weight =
      options.class_weights != nullptr ? options.class_weights[input.target] : 1.0f;
  if (options.policy.rows != nullptr) {
    const double entropy = options.entropy && loss->lse != MinusInfinity() ? EntropyOf(stats) : 0.0;
    const PolicyTerm term = PolicyOf(options.policy, row, logprob, entropy);
    loss->policy = static_cast<float>(term.value);
    loss->old_policy_kl = static_cast<float>(term.old_policy_kl);
    loss->clipped = term.clipped ? 1 : 0;
    if (has_grad) *grad = PolicyGrad(stats, input, term, *loss, options);
    return;
  }
  const TargetWeights q = WeightsOf(stats, loss->class_weight, options);
  AddCrossEntropyLoss(stats, q, options, loss);
  if (has_grad) *grad = CrossEntropyGrad(stats, input, q, *loss, options);
  const DivergenceOptions& divergence = options.divergence;
  if (divergence.grads == nullptr) return;
  const float scale = input.grad_coefficient * options.logit_scale * divergence.weight *
                      divergence.inverse_temperature;
  const DivergenceResult result = DivergenceOf(divergence, row, scale);
  loss->divergence = Weighted(divergence.weight, result.value);
  loss->dropped_teacher_mass = result.dropped_teacher_mass;
  divergence.grads[row] = result.grad;
}

// One thread a row.
__global__ void TokenLossKernel(int64_t num_rows, const RowInput* rows, const RowStats* all_stats,
                                const uint8_t* nonfinite, TokenLossOptions options, RowLoss* losses,
                                RowGrad* grads) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= num_rows) return;
  const RowInput input = rows[row];
  const RowStats stats = all_stats[row];
  RowLoss loss{};
  RowGrad grad{};
  grad.target = -1;
  grad.is_zero = 1;
  if (nonfinite[row] != 0) {
    loss.state = RowLoss::kNonfinite;
  } else {
    const bool all_masked = stats.logits_max == MinusInfinity();
    loss.lse = all_masked ? MinusInfinity() : stats.logits_max + logf(stats.sum_exp);
    loss.argmax = stats.argmax;
    if (options.entropy && !all_masked) {
      loss.entropy = static_cast<float>(EntropyOf(stats));
    }
    if (input.target >= 0) ValidRow(row, input, stats, options, &loss, &grad);
  }
  losses[row] = loss;
  if (grads != nullptr) grads[row] = grad;
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_TOKEN_LOSS_CUH_
