// What the kernels over a student's and a teacher's logits share: loading both sides of a vector of
// columns, and the transform of each.

#ifndef LMHEAD_KERNELS_DEVICE_PAIR_CUH_
#define LMHEAD_KERNELS_DEVICE_PAIR_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"
#include "kernels/row_types.h"

namespace lmhead::kernels::device {

// One side of the pair.
struct PairSide {
  const void* logits;
  int32_t cols;  // Columns from here on are masked.
  float logit_scale;
  float softcap;
};

// One side of a row. Values are logits at the divergence's temperature divided by `scale`: without
// transform that is what the matrix product gave, so that no element is multiplied.
template <typename T, bool kTransform>
struct SideReader {
  const T* logits;
  int32_t cols;
  float logit_scale;
  float softcap;
  float inverse_softcap;
  float inverse_temperature;
  float scale;

  __device__ __forceinline__ SideReader(const PairSide& side, int64_t offset, float temperature)
      : logits(static_cast<const T*>(side.logits) + offset),
        cols(side.cols),
        logit_scale(side.logit_scale),
        softcap(side.softcap),
        inverse_softcap(side.softcap != 0.0f ? 1.0f / side.softcap : 0.0f),
        inverse_temperature(temperature),
        scale(kTransform ? 1.0f : side.logit_scale * temperature) {}

  // The row stride covers whole vectors, so the last one may reach past cols.
  __device__ __forceinline__ void Load(int32_t col, Vector<T>* raw) const {
    if (col < cols) *raw = Vector<T>::Load(logits + col);
  }

  __device__ __forceinline__ float Value(float z0) const {
    if constexpr (!kTransform) return z0;
    return Transform<T>(z0, logit_scale, softcap, inverse_softcap, inverse_temperature).z;
  }

  __device__ __forceinline__ void Values(const Vector<T>& raw, int32_t col,
                                         float (&values)[Vector<T>::kCount]) const {
    constexpr int kCount = Vector<T>::kCount;
    if (col + kCount <= cols) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) values[k] = Value(ToFloat(raw.values[k]));
      return;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      values[k] = col + k < cols ? Value(ToFloat(raw.values[k])) : MinusInfinity();
    }
  }
};

// log of the sum of exp(v - teacher_max) over all ids of the teacher, those of the tail included.
__device__ __forceinline__ float TeacherLogSumWithTail(const PairStats& stats) {
  if (stats.tail_sum_exp == 0.0f) return logf(stats.teacher_sum_exp);
  const float high = fmaxf(stats.teacher_max, stats.tail_max);
  const float sum = stats.teacher_sum_exp * expf(stats.teacher_max - high) +
                    stats.tail_sum_exp * expf(stats.tail_max - high);
  return logf(sum) + (high - stats.teacher_max);
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_PAIR_CUH_
