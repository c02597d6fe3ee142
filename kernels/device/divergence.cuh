// A divergence of one row, from its statistics: value, dropped mass and constants of the gradient.

#ifndef LMHEAD_KERNELS_DEVICE_DIVERGENCE_CUH_
#define LMHEAD_KERNELS_DEVICE_DIVERGENCE_CUH_

#include "kernels/device/numeric.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/row_types.h"
#include "kernels/token_loss.h"

namespace lmhead::kernels::device {

struct DivergenceResult {
  float value = 0.0f;  // Without weight.
  float dropped_teacher_mass = 0.0f;
  RowDivergenceGrad grad = {};  // All 0 where there is no gradient.
};

// KL(q || p) = sum q ((v - mv) - (u - mu)) - log Sv + log Su.
__device__ __forceinline__ void ForwardKl(const PairStats& stats, float scale,
                                          DivergenceResult* result) {
  result->value = stats.cross_sum / stats.teacher_sum_exp - logf(stats.teacher_sum_exp) +
                  logf(stats.student_sum_exp);
  result->grad.student_max = stats.student_max;
  result->grad.teacher_max = stats.teacher_max;
  result->grad.student_scale = scale / stats.student_sum_exp;
  result->grad.teacher_scale = scale / stats.teacher_sum_exp;
}

// KL(p || q), likewise. The gradient p (log p - log q - KL) needs no normaliser: they cancel.
__device__ __forceinline__ void ReverseKl(const PairStats& stats, float teacher_log_sum,
                                          float scale, DivergenceResult* result) {
  const float mean = stats.cross_sum / stats.student_sum_exp;
  result->value = mean - logf(stats.student_sum_exp) + teacher_log_sum;
  if (!isfinite(result->value)) return;
  result->grad.student_max = stats.student_max;
  result->grad.teacher_max = stats.teacher_max;
  result->grad.student_scale = scale / stats.student_sum_exp;
  result->grad.offset = -mean;
}

__device__ __forceinline__ void JensenShannon(const PairStats& stats, const float* sums,
                                              float teacher_log_sum, float tail_mass, float beta,
                                              float scale, DivergenceResult* result) {
  // At an id that only the teacher has, m is beta q.
  const float teacher_sum = sums[1] - tail_mass * logf(beta);
  result->value = beta * teacher_sum + (1.0f - beta) * sums[0];
  result->grad.student_max = stats.student_max;
  result->grad.teacher_max = stats.teacher_max;
  result->grad.student_scale = scale * (1.0f - beta) / stats.student_sum_exp;
  result->grad.offset = -sums[0];
  result->grad.log_ratio = logf(stats.student_sum_exp) - teacher_log_sum;
}

// `scale` is what the divergence's gradient with respect to u is multiplied by.
__device__ __forceinline__ DivergenceResult PairDivergence(const DivergenceOptions& options,
                                                           int64_t row, float scale) {
  DivergenceResult result;
  const PairStats stats = options.pairs[row];
  const float with_tail = TeacherLogSumWithTail(stats);
  const bool has_tail = stats.tail_sum_exp != 0.0f;
  const float tail_mass =
      has_tail ? expf(stats.tail_max + logf(stats.tail_sum_exp) - stats.teacher_max - with_tail)
               : 0.0f;
  const bool common = options.vocabulary == TeacherVocabulary::kCommon;
  if (common) result.dropped_teacher_mass = tail_mass;
  if (stats.student_max == MinusInfinity() || stats.teacher_max == MinusInfinity()) {
    if (common && has_tail) result.dropped_teacher_mass = 1.0f;
    result.value = INFINITY;
    return result;
  }
  const float teacher_log_sum = common ? logf(stats.teacher_sum_exp) : with_tail;
  switch (options.kind) {
    case Divergence::kForwardKl:
      ForwardKl(stats, scale, &result);
      break;
    case Divergence::kReverseKl:
      ReverseKl(stats, teacher_log_sum, scale, &result);
      break;
    default:
      JensenShannon(stats, options.jsd_sums + 2 * row, teacher_log_sum, common ? 0.0f : tail_mass,
                    options.beta, scale, &result);
  }
  return result;
}

__device__ __forceinline__ DivergenceResult TopkDivergence(const DivergenceOptions& options,
                                                           int64_t row, float scale) {
  DivergenceResult result;
  const TopkStats stats = options.topk[row];
  const float mass = stats.mass;
  const float missing = fmaxf(0.0f, 1.0f - mass);
  result.dropped_teacher_mass = missing;
  if (stats.total_max == MinusInfinity()) {
    result.value = INFINITY;
    return result;
  }
  const bool renormalise = options.topk_mass == TopkMass::kRenormalise;
  const float log_sum = logf(stats.total_sum_exp);
  result.value = stats.cross_sum + mass * log_sum;
  if (renormalise) result.value = result.value / mass - logf(mass);
  // What p is multiplied by at every id, and q at the k.
  const bool has_bucket = options.topk_mass == TopkMass::kTail && options.ids_outside;
  const float kept = renormalise || has_bucket ? 1.0f : mass;
  RowDivergenceGrad& grad = result.grad;
  grad.inside_max = stats.total_max;
  grad.inside_scale = scale * kept / stats.total_sum_exp;
  grad.teacher_scale = renormalise ? scale / mass : scale;
  const bool all_inside = stats.outside_max == MinusInfinity();
  // Relative to the largest id outside: however little of p is there, its parts are known.
  const float outside = all_inside ? 0.0f : expf(stats.outside_max - stats.total_max);
  grad.student_max = all_inside ? 0.0f : stats.outside_max;
  grad.student_scale = scale * kept * outside / stats.total_sum_exp;
  if (!has_bucket || missing == 0.0f) return result;
  if (all_inside) {
    result.value = INFINITY;
    return result;
  }
  const float log_outside =
      (stats.outside_max - stats.total_max) + logf(stats.outside_sum_exp) - log_sum;
  result.value += missing * (logf(missing) - log_outside);
  grad.student_scale -= scale * missing / stats.outside_sum_exp;
  return result;
}

__device__ __forceinline__ DivergenceResult DivergenceOf(const DivergenceOptions& options,
                                                         int64_t row, float scale) {
  return options.kind == Divergence::kTopkForwardKl ? TopkDivergence(options, row, scale)
                                                    : PairDivergence(options, row, scale);
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_DIVERGENCE_CUH_
