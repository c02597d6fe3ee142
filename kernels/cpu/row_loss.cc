// The scalar half of row_passes.h: what becomes of a row's statistics.

#include <algorithm>
#include <cmath>

#include "kernels/cpu/row_passes.h"
#include "kernels/cpu/row_statistics.h"

namespace lmhead::cpu {
namespace {

bool AllMasked(const RowStatistics& stats) {
  return stats.logits_max == -kInfinity && stats.sum_exp == 0.0;
}

// A policy's objective and its derivatives.
struct PolicyTerm {
  double value = 0.0;
  double logprob_grad = 0.0;
  double entropy_grad = 0.0;
};

// KL(old policy || policy) and the like by one sample: exp(d) - d - 1, exact where d is small.
double SampledKl(double d) { return std::isinf(d) ? std::fabs(d) : std::expm1(d) - d; }

PolicyTerm Clipped(const PolicySpec& spec, const PolicyInputs& inputs, RowOutputs* outputs) {
  PolicyTerm term;
  const double advantage = inputs.advantage;
  const double log_ratio = outputs->logprob - inputs.old_logprob;
  const double ratio = std::exp(log_ratio);
  const double surrogate = Weighted(advantage, ratio);
  const double clamped = std::clamp(ratio, 1.0 - spec.clip_low, 1.0 + spec.clip_high) * advantage;
  term.value = -std::min(surrogate, clamped);
  outputs->clipped = surrogate > clamped;
  if (spec.dual_clip > 1.0f && advantage < 0.0) {
    const double most = -spec.dual_clip * advantage;
    outputs->clipped = outputs->clipped || term.value > most;
    term.value = std::min(term.value, most);
  }
  term.logprob_grad = outputs->clipped ? 0.0 : -surrogate;
  outputs->old_policy_kl = SampledKl(log_ratio);

  term.entropy_grad = -spec.entropy_coefficient;
  term.value += Weighted(term.entropy_grad, outputs->entropy);
  if (spec.reference_kl_coefficient != 0.0f) {
    const double distance = inputs.reference_logprob - outputs->logprob;
    term.value += spec.reference_kl_coefficient * SampledKl(distance);
    // A masked target has no gradient: nothing brings it back.
    if (!std::isinf(distance)) {
      term.logprob_grad -= spec.reference_kl_coefficient * std::expm1(distance);
    }
  }
  return term;
}

PolicyTerm Objective(const PolicySpec& spec, const PolicyInputs& inputs, RowOutputs* outputs) {
  if (spec.kind == PolicyKind::kClipped) return Clipped(spec, inputs, outputs);
  PolicyTerm term = {.logprob_grad = inputs.logprob_grad, .entropy_grad = inputs.entropy_grad};
  term.value =
      Weighted(term.logprob_grad, outputs->logprob) + Weighted(term.entropy_grad, outputs->entropy);
  return term;
}

// d policy / dz_j = logprob_grad ([j = t] - p_j) - entropy_grad p_j (log p_j + entropy)
void FinishPolicy(const RowConfig& config, const PolicyInputs& inputs, RowState* row,
                  RowOutputs* outputs) {
  const PolicyTerm term = Objective(*config.policy, inputs, outputs);
  outputs->policy = term.value;
  const double sum_exp = row->stats.sum_exp;
  row->target_mass = static_cast<float>(-term.logprob_grad);
  row->probability_factor = static_cast<float>(-term.logprob_grad / sum_exp);
  row->entropy_factor = static_cast<float>(-term.entropy_grad / sum_exp);
  row->entropy_offset = static_cast<float>(outputs->entropy - outputs->log_sum);
}

void FinishCrossEntropy(const RowConfig& config, RowState* row, RowOutputs* outputs) {
  const RowStatistics& stats = row->stats;
  const double smoothing = config.label_smoothing;
  const double target_weight =
      config.class_weights != nullptr ? config.class_weights[row->target] : 1.0;
  const double target_mass = (1.0 - smoothing) * target_weight;
  const double smoothing_share = smoothing / static_cast<double>(config.vocab_size);
  const double mass = target_mass + smoothing_share * stats.sum_class_weight;
  const double cross_entropy =
      Weighted(target_mass, -outputs->logprob) +
      smoothing_share * (stats.sum_class_weight * outputs->log_sum - stats.sum_weighted_logit);

  const double weight = config.cross_entropy_weight;
  outputs->cross_entropy = Weighted(weight, cross_entropy);
  outputs->z_loss = Weighted(weight * config.z_loss, outputs->lse * outputs->lse);
  row->target_mass = static_cast<float>(weight * target_mass);
  row->probability_factor =
      AllMasked(stats) ? 0.0f
                       : static_cast<float>(weight * (mass + 2.0 * config.z_loss * outputs->lse) /
                                            stats.sum_exp);
}

}  // namespace

void RaiseMax(float new_max, float* max, double* sum_exp) {
  if (*max > -kInfinity) *sum_exp *= std::exp(static_cast<double>(*max) - new_max);
  *max = new_max;
}

void RaiseMax(float new_max, RowStatistics* stats) {
  if (stats->logits_max > -kInfinity) {  // Else the sums are those of no logit.
    const double shift = static_cast<double>(stats->logits_max) - new_max;
    const double scale = std::exp(shift);
    stats->sum_exp_logit = scale * (stats->sum_exp_logit + stats->sum_exp * shift);
    stats->sum_exp *= scale;
    stats->sum_weighted_logit += stats->sum_class_weight * shift;
  }
  stats->logits_max = new_max;
}

void BeginRow(RowState* row) {
  row->stats = {.logits_max = -kInfinity};
  row->target_mass = row->probability_factor = row->entropy_factor = row->entropy_offset = 0.0f;
}

void MergeStatistics(const RowStatistics& part, RowStatistics* into) {
  RowStatistics other = part;
  if (other.logits_max > into->logits_max) {
    into->argmax = other.argmax;
    RaiseMax(other.logits_max, into);
  } else if (other.logits_max < into->logits_max) {
    RaiseMax(into->logits_max, &other);
  }
  into->sum_exp += other.sum_exp;
  into->sum_exp_logit += other.sum_exp_logit;
  into->sum_class_weight += other.sum_class_weight;
  into->sum_weighted_logit += other.sum_weighted_logit;
}

double LogSumOf(const RowStatistics& stats) {
  return AllMasked(stats) ? 0.0 : std::log(stats.sum_exp);
}

double LogProbOf(const RowStatistics& stats, double log_sum, float logit) {
  if (AllMasked(stats)) return -kInfinity;
  const double logprob = static_cast<double>(logit) - stats.logits_max - log_sum;
  return logprob > 0.0 ? 0.0 : logprob;
}

RowOutputs FinishRow(const RowConfig& config, const PolicyInputs& policy, RowState* row) {
  RowOutputs outputs;
  if (!row->finite) return outputs;
  const RowStatistics& stats = row->stats;
  outputs.log_sum = LogSumOf(stats);
  outputs.lse = stats.logits_max + outputs.log_sum;
  if (!AllMasked(stats) && config.entropy) {
    const double entropy = outputs.log_sum - stats.sum_exp_logit / stats.sum_exp;
    outputs.entropy = entropy < 0.0 ? 0.0 : entropy;
  }
  if (!row->valid) return outputs;

  outputs.logprob = LogProbOf(stats, outputs.log_sum, stats.target_logit);
  if (config.policy != nullptr) {
    FinishPolicy(config, policy, row, &outputs);
  } else {
    FinishCrossEntropy(config, row, &outputs);
  }
  return outputs;
}

}  // namespace lmhead::cpu
