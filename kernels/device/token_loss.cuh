// Device code of kernels/token_loss.h.

#ifndef LMHEAD_KERNELS_DEVICE_TOKEN_LOSS_CUH_
#define LMHEAD_KERNELS_DEVICE_TOKEN_LOSS_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"
#include "kernels/row_types.h"
#include "kernels/token_loss.h"

namespace lmhead::kernels::device {

// The weights of a valid row's loss: q_j = hard [j = t] + uniform * class weight_j.
struct TargetWeights {
  float hard;         // (1 - e) w_t
  float uniform;      // e / V
  float uniform_sum;  // uniform * sum of class weights that are not masked.
};

__device__ __forceinline__ RowLoss ValidRowLoss(const RowStats& stats, const TargetWeights& q,
                                                float class_weight, float z_loss, RowLoss loss) {
  const float log_sum = logf(stats.sum_exp);
  const bool masked = stats.target_logit == MinusInfinity();
  loss.state = RowLoss::kValid;
  loss.class_weight = class_weight;
  loss.logprob =
      masked ? MinusInfinity() : fminf(0.0f, (stats.target_logit - stats.logits_max) - log_sum);
  loss.cross_entropy = q.hard != 0.0f ? -q.hard * loss.logprob : 0.0f;
  if (q.uniform_sum != 0.0f) {
    // In double: lse and the mean of z may be large and nearly equal.
    const double lse = static_cast<double>(stats.logits_max) + log_sum;
    loss.cross_entropy +=
        static_cast<float>(q.uniform * (stats.smoothing_weight * lse - stats.smoothing_sum));
  }
  loss.z_loss = z_loss != 0.0f ? z_loss * loss.lse * loss.lse : 0.0f;
  return loss;
}

__device__ __forceinline__ RowGrad ValidRowGrad(const RowStats& stats, const RowInput& input,
                                                const TargetWeights& q, const RowLoss& loss,
                                                float class_weight,
                                                const TokenLossOptions& options) {
  const float z_term = options.z_loss != 0.0f ? 2.0f * options.z_loss * loss.lse : 0.0f;
  const float prob_weight = q.hard + q.uniform_sum + z_term;
  const float scale = input.grad_coefficient * options.logit_scale * input.inverse_temperature;
  RowGrad grad{};
  grad.logits_max = stats.logits_max;
  grad.prob_scale = scale * prob_weight / stats.sum_exp;
  grad.uniform_grad = scale * q.uniform;
  grad.inverse_temperature = input.inverse_temperature;
  grad.target = input.target;
  // hard * (p - 1) + ..., with p - 1 formed without cancellation. A masked target has p = 0.
  const bool masked = stats.target_logit == MinusInfinity();
  float own = q.hard * expm1f(loss.logprob) + (q.uniform_sum + z_term) * expf(loss.logprob);
  if (!masked) own -= q.uniform * class_weight;
  float derivative = 1.0f;
  if (options.softcap != 0.0f) {
    const float t = stats.target_logit / (input.inverse_temperature * options.softcap);
    derivative = masked ? 0.0f : 1.0f - t * t;
  }
  grad.target_grad = scale * own * derivative;
  return grad;
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
      loss.entropy = fmaxf(0.0f, logf(stats.sum_exp) - stats.entropy_sum / stats.sum_exp);
    }
    if (input.target >= 0) {
      const float class_weight =
          options.class_weights != nullptr ? options.class_weights[input.target] : 1.0f;
      TargetWeights q{};
      q.hard = (1.0f - options.label_smoothing) * class_weight;
      if (options.label_smoothing != 0.0f) {
        q.uniform = options.label_smoothing / static_cast<float>(options.vocab_size);
        q.uniform_sum = q.uniform * static_cast<float>(stats.smoothing_weight);
      }
      loss = ValidRowLoss(stats, q, class_weight, options.z_loss, loss);
      if (!all_masked && input.grad_coefficient != 0.0f) {
        grad = ValidRowGrad(stats, input, q, loss, class_weight, options);
      }
    }
  }
  losses[row] = loss;
  if (grads != nullptr) grads[row] = grad;
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_TOKEN_LOSS_CUH_
