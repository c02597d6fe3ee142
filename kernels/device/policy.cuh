// A policy objective of one row, from the target's log-probability and the entropy.

#ifndef LMHEAD_KERNELS_DEVICE_POLICY_CUH_
#define LMHEAD_KERNELS_DEVICE_POLICY_CUH_

#include "kernels/device/numeric.cuh"
#include "kernels/row_types.h"
#include "kernels/token_loss.h"

namespace lmhead::kernels::device {

// The objective and its derivatives. In double: a ratio makes a relative error of the rounding of a
// log-probability, and there is one a row.
struct PolicyTerm {
  double value;
  double logprob_grad;
  double entropy_grad;
  double old_policy_kl;
  bool clipped;
};

// weight * value, where a weight of 0 leaves even an infinite value out.
template <typename Real>
__device__ __forceinline__ Real Weighted(Real weight, Real value) {
  return weight == Real(0) ? Real(0) : weight * value;
}

__device__ __forceinline__ PolicyTerm CoefficientPolicy(const RowPolicy& row, double logprob,
                                                        double entropy) {
  PolicyTerm term{};
  term.logprob_grad = row.logprob_grad;
  term.entropy_grad = row.entropy_grad;
  term.value = Weighted(term.logprob_grad, logprob) + term.entropy_grad * entropy;
  return term;
}

// The penalty for leaving the reference policy: exp(d) - d - 1, d = reference_logprob - logprob.
__device__ __forceinline__ void AddReferenceKl(double coefficient, double distance,
                                               PolicyTerm* term) {
  if (isinf(distance)) {  // A masked target: nothing brings it back.
    term->value += coefficient * distance;
    return;
  }
  term->value += coefficient * (expm1(distance) - distance);
  term->logprob_grad -= coefficient * expm1(distance);
}

// Where the unclipped branch is the smaller one or equal, it has the gradient.
__device__ __forceinline__ PolicyTerm ClippedPolicy(const PolicySpec& spec, const RowPolicy& row,
                                                    double logprob, double entropy) {
  PolicyTerm term{};
  const double advantage = row.advantage;
  const double log_ratio = logprob - row.old_logprob;
  const double ratio = exp(log_ratio);
  const double surrogate = Weighted(advantage, ratio);
  const double held = fmin(fmax(ratio, 1.0 - spec.clip_low), 1.0 + spec.clip_high);
  const double clamped = held * advantage;
  term.value = -fmin(surrogate, clamped);
  term.clipped = surrogate > clamped;
  if (spec.dual_clip > 1.0f && advantage < 0.0) {
    const double most = -spec.dual_clip * advantage;
    term.clipped = term.clipped || term.value > most;
    term.value = fmin(term.value, most);
  }
  term.logprob_grad = term.clipped ? 0.0 : -surrogate;
  term.old_policy_kl = expm1(log_ratio) - log_ratio;
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
                                               double logprob, double entropy) {
  const RowPolicy& policy = options.rows[row];
  if (options.spec.kind == PolicyKind::kCoefficients) {
    return CoefficientPolicy(policy, logprob, entropy);
  }
  return ClippedPolicy(options.spec, policy, logprob, entropy);
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_POLICY_CUH_
