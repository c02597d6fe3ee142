// Device code of kernels/jsd_sums.h, and log m, which the gradient of the divergence shares.

#ifndef LMHEAD_KERNELS_DEVICE_JSD_SUMS_CUH_
#define LMHEAD_KERNELS_DEVICE_JSD_SUMS_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/row_types.h"

namespace lmhead::kernels::device {

constexpr int kJsdThreads = 512;

// log m - log p for d = log q - log p: log(1 + beta (exp(d) - 1)), which keeps what is left of two
// nearly equal distributions. Beyond kDistanceMax p is negligible, and the limit keeps exp finite.
constexpr float kDistanceMax = 80.0f;
template <typename T>
__device__ __forceinline__ float LogMixtureOverP(float d, float beta) {
  const float limited = fminf(d, kDistanceMax);
  if constexpr (sizeof(T) == 2) {
    return __logf(fmaf(beta, __expf(limited), 1.0f - beta));
  } else {
    // Where q has nearly all of m and is little there, 1 + x would cancel: its parts are positive.
    const float x = beta * expm1f(limited);
    return x > -0.5f ? log1pf(x) : logf(fmaf(beta, expf(limited), 1.0f - beta));
  }
}

// One block a row.
template <typename T>
__global__ void __launch_bounds__(kJsdThreads, 2)
    JsdSumsKernel(PairSide student_side, PairSide teacher_side, int64_t row_stride,
                  float inverse_temperature, const PairStats* stats, float beta, bool with_tail,
                  bool add, float* sums) {
  constexpr int kCount = Vector<T>::kCount;
  const int64_t row = blockIdx.x;  // 64-bit: row * row_stride exceeds 2^31.
  const SideReader<T, true> student(student_side, row * row_stride, inverse_temperature);
  const SideReader<T, true> teacher(teacher_side, row * row_stride, inverse_temperature);
  const PairStats stat = stats[row];
  float student_sum = 0.0f;
  float teacher_sum = 0.0f;
  const bool masked = stat.student_max == MinusInfinity() || stat.teacher_max == MinusInfinity();
  const float student_log_sum = logf(stat.student_sum_exp);
  const float teacher_log_sum =
      with_tail ? TeacherLogSumWithTail(stat) : logf(stat.teacher_sum_exp);
  const int32_t cols = masked ? 0 : max(student.cols, teacher.cols);
  for (int32_t col = threadIdx.x * kCount; col < cols; col += kJsdThreads * kCount) {
    Vector<T> raw_u, raw_v;
    student.Load(col, &raw_u);
    teacher.Load(col, &raw_v);
    float u[kCount], v[kCount];
    student.Values(raw_u, col, u);
    teacher.Values(raw_v, col, v);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float log_p = (u[k] - stat.student_max) - student_log_sum;
      const float log_q = (v[k] - stat.teacher_max) - teacher_log_sum;
      const float p = Exp<T>(log_p);
      const float q = Exp<T>(log_q);
      if (p > 0.0f) {
        const float d = log_q - log_p;
        const float log_ratio = LogMixtureOverP<T>(d, beta);
        student_sum -= p * log_ratio;
        if (q > 0.0f) teacher_sum += q * (fminf(d, kDistanceMax) - log_ratio);
      } else if (q > 0.0f) {
        teacher_sum -= q * logf(beta);
      }
    }
  }
  __shared__ float scratch[2][kJsdThreads / kWarpSize];
  student_sum = BlockSum(student_sum, scratch[0]);
  teacher_sum = BlockSum(teacher_sum, scratch[1]);
  if (threadIdx.x != 0) return;
  sums[2 * row] = (add ? sums[2 * row] : 0.0f) + student_sum;
  sums[2 * row + 1] = (add ? sums[2 * row + 1] : 0.0f) + teacher_sum;
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_JSD_SUMS_CUH_
