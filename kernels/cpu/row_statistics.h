// How the running statistics of rows are rescaled: for the files of this folder.

#ifndef LMHEAD_KERNELS_CPU_ROW_STATISTICS_H_
#define LMHEAD_KERNELS_CPU_ROW_STATISTICS_H_

#include <limits>

#include "kernels/cpu/divergence.h"
#include "kernels/cpu/row_passes.h"

namespace lmhead::cpu {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Makes the sums relative to `new_max`. REQUIRES: it is above the present maximum.
void RaiseMax(float new_max, RowStatistics* stats);
void RaiseMax(float new_max, float* max, double* sum_exp);
void RaiseStudentMax(Divergence divergence, float new_max, DivergenceStatistics* stats);
void RaiseTeacherMax(Divergence divergence, float new_max, DivergenceStatistics* stats);

// weight * value, where a weight of 0 leaves even an infinite value out.
inline double Weighted(double weight, double value) { return weight == 0.0 ? 0.0 : weight * value; }

// What label smoothing gives to every class, before class weights.
inline float SmoothingShare(const RowConfig& config) {
  return config.cross_entropy_weight * config.label_smoothing /
         static_cast<float>(config.vocab_size);
}

}  // namespace lmhead::cpu

#endif  // LMHEAD_KERNELS_CPU_ROW_STATISTICS_H_
