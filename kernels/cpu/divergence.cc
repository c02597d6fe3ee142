#include "kernels/cpu/divergence.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cpu/row_statistics.h"

namespace lmhead::cpu {
namespace {

// d objective / du is that many times d objective / dz, beside what every gradient is times.
double GradWeight(const DivergenceConfig& config, float temperature) {
  return config.weight * temperature / config.kl_temperature;
}

// A divergence is not negative; rounding may make it so. NaN stays.
double NotNegative(double value) { return value < 0.0 ? 0.0 : value; }

// Infinite, or NaN when there was one among the logits.
double WithoutLogits(const DivergenceStatistics& stats) {
  return kInfinity + stats.student_sum_exp + stats.teacher_sum_exp;
}

bool HasLogits(const DivergenceStatistics& stats) {
  return stats.student_max > -kInfinity && stats.teacher_max > -kInfinity;
}

// Padded vocabularies: the ids that only the teacher has are in its normaliser.
void FoldBeyond(const DivergenceConfig& config, DivergenceState* state) {
  DivergenceStatistics& stats = state->stats;
  if (config.vocabulary != TeacherVocabulary::kPad || stats.beyond_max == -kInfinity) return;
  if (stats.beyond_max > stats.teacher_max) {
    RaiseTeacherMax(config.divergence, stats.beyond_max, &stats);
  }
  const double beyond =
      stats.beyond_sum_exp * std::exp(static_cast<double>(stats.beyond_max) - stats.teacher_max);
  stats.teacher_sum_exp += beyond;
  state->beyond_mass = beyond / stats.teacher_sum_exp;
}

void Normalise(const DivergenceConfig& config, DivergenceState* state) {
  FoldBeyond(config, state);
  const DivergenceStatistics& stats = state->stats;
  state->has_gradient = HasLogits(stats);
  if (!state->has_gradient) return;
  state->log_norm_ratio =
      static_cast<float>(std::log(stats.student_sum_exp) - std::log(stats.teacher_sum_exp));
}

// The teacher's mass where the student has no id, by its whole softmax. Padded, nothing is dropped.
double DroppedMass(const DivergenceConfig& config, const DivergenceStatistics& stats) {
  if (config.vocabulary == TeacherVocabulary::kPad || stats.beyond_max == -kInfinity) return 0.0;
  const double max = std::max(stats.beyond_max, stats.teacher_max);
  const double beyond = stats.beyond_sum_exp * std::exp(stats.beyond_max - max);
  return beyond / (beyond + stats.teacher_sum_exp * std::exp(stats.teacher_max - max));
}

double FinishKl(const DivergenceConfig& config, double grad_weight, DivergenceState* state) {
  Normalise(config, state);
  const DivergenceStatistics& stats = state->stats;
  if (!state->has_gradient) return WithoutLogits(stats);
  const double log_norm_ratio = std::log(stats.student_sum_exp) - std::log(stats.teacher_sum_exp);
  state->p_factor = static_cast<float>(grad_weight / stats.student_sum_exp);
  if (config.divergence == Divergence::kForwardKl) {
    state->q_factor = static_cast<float>(grad_weight / stats.teacher_sum_exp);
    return NotNegative(stats.joint_sum / stats.teacher_sum_exp + log_norm_ratio);
  }
  const double value = NotNegative(stats.joint_sum / stats.student_sum_exp - log_norm_ratio);
  state->offset = static_cast<float>(value);
  state->has_gradient = std::isfinite(value);
  return value;
}

double FinishJsd(const DivergenceConfig& config, double grad_weight, DivergenceState* state) {
  const DivergenceStatistics& stats = state->stats;
  if (!state->has_gradient) return WithoutLogits(stats);
  const double beta = config.jsd_beta;
  const double of_student = NotNegative(state->mixture.student / stats.student_sum_exp);
  const double of_teacher = NotNegative(state->mixture.teacher / stats.teacher_sum_exp -
                                        state->beyond_mass * std::log(beta));
  state->p_factor = static_cast<float>((1.0 - beta) * grad_weight / stats.student_sum_exp);
  state->offset = static_cast<float>(of_student);
  return beta * of_teacher + (1.0 - beta) * of_student;
}

double FinishTopk(const DivergenceConfig& config, double dropped_mass, double grad_weight,
                  DivergenceState* state) {
  const DivergenceStatistics& stats = state->stats;
  const double max = std::max(stats.student_max, stats.listed_max);
  state->has_gradient = max > -kInfinity;
  if (!state->has_gradient) return kInfinity + stats.student_sum_exp + stats.listed_sum_exp;
  const double outside_scale = std::exp(stats.student_max - max);
  const double listed_scale = std::exp(stats.listed_max - max);
  const double sum_exp =
      Weighted(outside_scale, stats.student_sum_exp) + Weighted(listed_scale, stats.listed_sum_exp);
  const double log_sum = std::log(sum_exp);

  const double mass = state->teacher_mass;
  const bool renormalise = config.topk_mass == TopkMass::kRenormalise;
  const bool has_tail = config.topk_mass == TopkMass::kTail && !config.whole_vocabulary;
  // The teacher's mass in the value, which its gradient goes with.
  const double kept = renormalise || has_tail ? 1.0 : mass;
  const double tail = has_tail ? dropped_mass : 0.0;

  // Sum of q (log q - log p) over the list.
  double value = state->teacher_sum_logprob - stats.listed_sum_logit +
                 Weighted(mass, max - stats.listed_max + log_sum);
  if (renormalise) value = NotNegative(value / mass - std::log(mass));
  const double log_outside = stats.student_max - max + std::log(stats.student_sum_exp) - log_sum;
  value += Weighted(tail, std::log(tail) - log_outside);

  const double outside_tail = tail == 0.0 ? 0.0 : tail / stats.student_sum_exp;
  const double outside_factor = kept * outside_scale / sum_exp - outside_tail;
  state->p_factor = stats.student_max == -kInfinity
                        ? 0.0f  // Nothing is outside.
                        : static_cast<float>(grad_weight * outside_factor);
  state->listed_p_factor = grad_weight * kept * listed_scale / sum_exp;
  state->listed_q_factor = renormalise ? grad_weight / mass : grad_weight;
  return value;
}

// Of cross entropy, as `grad` has it: before what all gradients are times.
double CrossEntropyGrad(const RowConfig& config, const RowState& row, const TeacherEntry& entry) {
  const bool masked = entry.logit == -kInfinity;
  double dz = 0.0;
  if (!masked && row.probability_factor != 0.0f) {
    dz = row.probability_factor * std::exp(static_cast<double>(entry.logit) - row.stats.logits_max);
  }
  if (!masked && config.label_smoothing != 0.0f) {
    const float weight = config.class_weights != nullptr ? config.class_weights[entry.id] : 1.0f;
    dz -= weight * SmoothingShare(config);
  }
  return entry.id == row.target ? dz - row.target_mass : dz;
}

// Entries with ids in the tile.
template <typename Entry>
std::span<Entry> EntriesIn(VocabTile tile, std::span<Entry> entries) {
  const auto below = [](const TeacherEntry& entry, int64_t id) { return entry.id < id; };
  const auto first = std::lower_bound(entries.begin(), entries.end(), tile.start, below);
  const auto last = std::lower_bound(first, entries.end(), tile.start + tile.cols, below);
  return {first, last};
}

}  // namespace

void RaiseStudentMax(Divergence divergence, float new_max, DivergenceStatistics* stats) {
  if (stats->student_max > -kInfinity) {
    const double shift = static_cast<double>(stats->student_max) - new_max;
    const double scale = std::exp(shift);
    if (divergence == Divergence::kForwardKl) stats->joint_sum -= shift * stats->teacher_sum_exp;
    if (divergence == Divergence::kReverseKl) {
      stats->joint_sum = Weighted(scale, stats->joint_sum + shift * stats->student_sum_exp);
    }
    stats->student_sum_exp *= scale;
  }
  stats->student_max = new_max;
}

void RaiseTeacherMax(Divergence divergence, float new_max, DivergenceStatistics* stats) {
  if (stats->teacher_max > -kInfinity) {
    const double shift = static_cast<double>(stats->teacher_max) - new_max;
    const double scale = std::exp(shift);
    if (divergence == Divergence::kReverseKl) stats->joint_sum -= shift * stats->student_sum_exp;
    if (divergence == Divergence::kForwardKl) {
      stats->joint_sum = Weighted(scale, stats->joint_sum + shift * stats->teacher_sum_exp);
    }
    stats->teacher_sum_exp *= scale;
  }
  stats->teacher_max = new_max;
}

void BeginDivergence(DivergenceState* state) {
  *state = {.stats = {.student_max = -kInfinity,
                      .teacher_max = -kInfinity,
                      .beyond_max = -kInfinity,
                      .listed_max = -kInfinity}};
}

void BeginEntries(std::span<const int32_t> ids, std::span<const float> logprobs,
                  TeacherEntry* entries, DivergenceState* state) {
  for (size_t i = 0; i < ids.size(); ++i) entries[i] = {ids[i], logprobs[i], -kInfinity};
  std::sort(entries, entries + ids.size(),
            [](const TeacherEntry& a, const TeacherEntry& b) { return a.id < b.id; });
  for (size_t i = 0; i < ids.size(); ++i) {
    const double logprob = entries[i].logprob;
    const double mass = std::exp(logprob);
    state->teacher_mass += mass;
    state->teacher_sum_logprob += Weighted(mass, logprob);
  }
}

void AccumulateOutside(const RowPasses& passes, VocabTile tile, float scale,
                       std::span<TeacherEntry> entries, float* logits, DivergenceState* state) {
  const std::span<TeacherEntry> listed = EntriesIn(tile, entries);
  for (TeacherEntry& entry : listed) {
    entry.logit = std::exchange(logits[entry.id - tile.start], -kInfinity);
  }
  passes.accumulate_exp(logits, tile.cols, scale, &state->stats.student_max,
                        &state->stats.student_sum_exp);
  for (const TeacherEntry& entry : listed) logits[entry.id - tile.start] = entry.logit;
}

void AccumulateListed(VocabTile range, float scale, std::span<const TeacherEntry> entries,
                      DivergenceStatistics* stats) {
  const std::span<const TeacherEntry> listed = EntriesIn(range, entries);
  for (const TeacherEntry& entry : listed) {
    stats->listed_max = std::max(stats->listed_max, entry.logit * scale);
  }
  const double max = stats->listed_max > -kInfinity ? stats->listed_max : 0.0;
  for (const TeacherEntry& entry : listed) {
    const double x = entry.logit * scale - max;
    const double mass = std::exp(static_cast<double>(entry.logprob));
    stats->listed_sum_exp += std::exp(x);
    stats->listed_mass += mass;
    stats->listed_sum_logit += Weighted(mass, x);
  }
}

void MergeDivergence(Divergence divergence, const DivergenceStatistics& part,
                     DivergenceStatistics* into) {
  DivergenceStatistics other = part;
  const auto align = [](float mine, float others, auto raise_mine, auto raise_others) {
    if (others > mine) raise_mine(others);
    if (mine > others) raise_others(mine);
  };
  align(
      into->student_max, other.student_max,
      [&](float max) { RaiseStudentMax(divergence, max, into); },
      [&](float max) { RaiseStudentMax(divergence, max, &other); });
  align(
      into->teacher_max, other.teacher_max,
      [&](float max) { RaiseTeacherMax(divergence, max, into); },
      [&](float max) { RaiseTeacherMax(divergence, max, &other); });
  align(
      into->beyond_max, other.beyond_max,
      [&](float max) { RaiseMax(max, &into->beyond_max, &into->beyond_sum_exp); },
      [&](float max) { RaiseMax(max, &other.beyond_max, &other.beyond_sum_exp); });
  const auto raise_listed = [](float max, DivergenceStatistics* stats) {
    if (stats->listed_max > -kInfinity) {
      const double shift = static_cast<double>(stats->listed_max) - max;
      stats->listed_sum_logit += Weighted(stats->listed_mass, shift);
    }
    RaiseMax(max, &stats->listed_max, &stats->listed_sum_exp);
  };
  align(
      into->listed_max, other.listed_max, [&](float max) { raise_listed(max, into); },
      [&](float max) { raise_listed(max, &other); });
  into->student_sum_exp += other.student_sum_exp;
  into->teacher_sum_exp += other.teacher_sum_exp;
  into->beyond_sum_exp += other.beyond_sum_exp;
  into->joint_sum += other.joint_sum;
  into->listed_sum_exp += other.listed_sum_exp;
  into->listed_mass += other.listed_mass;
  into->listed_sum_logit += other.listed_sum_logit;
}

void PrepareMixture(const DivergenceConfig& config, DivergenceState* state) {
  Normalise(config, state);
}

DivergenceOutputs FinishDivergence(const DivergenceConfig& config, float temperature,
                                   DivergenceState* state) {
  const double grad_weight = GradWeight(config, temperature);
  DivergenceOutputs outputs;
  double value = 0.0;
  if (config.divergence == Divergence::kTopkForwardKl) {
    const double dropped = 1.0 - state->teacher_mass;
    outputs.dropped_teacher_mass = dropped > 0.0 ? dropped : 0.0;
    value = FinishTopk(config, outputs.dropped_teacher_mass, grad_weight, state);
  } else {
    outputs.dropped_teacher_mass = DroppedMass(config, state->stats);
    value = config.divergence == Divergence::kJsd ? FinishJsd(config, grad_weight, state)
                                                  : FinishKl(config, grad_weight, state);
  }
  outputs.divergence = Weighted(config.weight, value);
  return outputs;
}

void SetListedGrad(const RowConfig& config, const DivergenceConfig& divergence, VocabTile tile,
                   const RowState& row, const DivergenceState& state,
                   std::span<const TeacherEntry> entries, float* grad) {
  if (row.coefficient == 0.0f || !state.has_gradient) return;
  const float scale = row.temperature / divergence.kl_temperature;
  const double outer = static_cast<double>(row.coefficient) * config.logit_scale / row.temperature;
  for (const TeacherEntry& entry : EntriesIn(tile, entries)) {
    double dz = CrossEntropyGrad(config, row, entry);
    const bool masked = entry.logit == -kInfinity;
    if (!masked) {
      const double p = std::exp(static_cast<double>(entry.logit * scale) - state.stats.listed_max);
      const double q = std::exp(static_cast<double>(entry.logprob));
      dz += state.listed_p_factor * p - state.listed_q_factor * q;
    }
    if (config.softcap != 0.0f) {
      const double tanh = entry.logit * static_cast<double>(row.temperature) / config.softcap;
      dz = masked ? 0.0 : dz * (1.0 - tanh * tanh);
    }
    grad[entry.id - tile.start] = static_cast<float>(dz * outer);
  }
}

}  // namespace lmhead::cpu
