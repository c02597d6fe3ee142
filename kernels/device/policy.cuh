// A policy objective of one row, from the target's log-probability and the entropy.

#ifndef LMHEAD_KERNELS_DEVICE_POLICY_CUH_
#define LMHEAD_KERNELS_DEVICE_POLICY_CUH_

#include "kernels/device/numeric.cuh"
#include "kernels/row_types.h"
#include "kernels/token_loss.h"

namespace lmhead::kernels::device {

// The objective and its derivatives.
struct PolicyTerm {
  float value;
  float logprob_grad;
  float entropy_grad;
  float old_policy_kl;
  bool clipped;
};

// weight * value, where a weight of 0 leaves even an infinite value out.
__device__ __forceinline__ float Weighted(float weight, float value) {
  return weight == 0.0f ? 0.0f : weight * value;
}

__device__ __forceinline__ PolicyTerm CoefficientPolicy(const RowPolicy& row, float logprob,
                                                        float entropy) {
  PolicyTerm term{};
  term.logprob_grad = row.logprob_grad;
  term.entropy_grad = row.entropy_grad;
  term.value = Weighted(row.logprob_grad, logprob) + row.entropy_grad * entropy;
  return term;
}

// The penalty for leaving the reference policy: exp(d) - d - 1, d = reference_logprob - logprob.
__device__ __forceinline__ void AddReferenceKl(float coefficient, float distance,
                                               PolicyTerm* term) {
  if (isinf(distance)) {  // A masked target: nothing brings it back.
    term->value += coefficient * distance;
    return;
  }
  term->value += coefficient * (expm1f(distance) - distance);
  term->logprob_grad -= coefficient * expm1f(distance);
}

// Where the unclipped branch is the smaller one or equal, it has the gradient.
__device__ __forceinline__ PolicyTerm ClippedPolicy(const PolicySpec& spec, const RowPolicy& row,
                                                    float logprob, float entropy) {
  PolicyTerm term{};
  const float log_ratio = logprob - row.old_logprob;
  const float ratio = expf(log_ratio);
  const float surrogate = Weighted(row.advantage, ratio);
  const float held = fminf(fmaxf(ratio, 1.0f - spec.clip_low), 1.0f + spec.clip_high);
  const float clamped = held * row.advantage;
  term.value = -fminf(surrogate, clamped);
  term.clipped = surrogate > clamped;
  if (spec.dual_clip > 1.0f && row.advantage < 0.0f) {
    const float most = -spec.dual_clip * row.advantage;
    term.clipped = term.clipped || term.value > most;
    term.value = fminf(term.value, most);
  }
  term.logprob_grad = term.clipped ? 0.0f : -surrogate;
  term.old_policy_kl = expm1f(log_ratio) - log_ratio;
  if (spec.entropy_coefficient != 0.0f) {
    term.entropy_grad = -spec.entropy_coefficient;
    term.value += term.entropy_grad * entropy;
  }
  if (spec.reference_kl_coefficient != 0.0f) {
    AddReferenceKl(spec.reference_kl_coefficient, row.reference_logprob - logprob, &term);
  }
  return term;
}

__device__ __forceinline__ PolicyTerm PolicyOf(const PolicyOptions& options, int64_t row,
                                               float logprob, float entropy) {
  const RowPolicy& policy = options.rows[row];
  if (options.spec.kind == PolicyKind::kCoefficients) {
    return CoefficientPolicy(policy, logprob, entropy);
  }
  return ClippedPolicy(options.spec, policy, logprob, entropy);
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_POLICY_CUH_
