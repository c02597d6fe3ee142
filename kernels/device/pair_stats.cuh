// Device code of kernels/pair_stats.h.

#ifndef LMHEAD_KERNELS_DEVICE_PAIR_STATS_CUH_
#define LMHEAD_KERNELS_DEVICE_PAIR_STATS_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/row_types.h"

namespace lmhead::kernels::device {

constexpr int kPairThreads = 512;
constexpr int kPairUnroll = 2;  // Vectors in flight a thread and side.

// Which sum besides those of exponentials.
enum class CrossSum { kNone, kForward, kReverse };

struct PairStatsArguments {
  PairSide student;
  PairSide teacher;
  int64_t row_stride;
  float inverse_temperature;
  int32_t vocab_start;
  bool merge;
  PairStats* stats;
  RowStats* student_stats;
  const RowInput* rows;
};

// What a thread, a warp, a block has seen. The weighting side is the one whose probabilities weight
// the cross sum: q for the forward KL, p for the reverse one.
struct OnlinePair {
  float max[2];  // Of the student and of the teacher.
  float sum_exp[2];
  float cross_sum;
  int32_t argmax;  // Of the student.
};

__device__ __forceinline__ OnlinePair EmptyPair(int32_t argmax) {
  return {{MinusInfinity(), MinusInfinity()}, {0.0f, 0.0f}, 0.0f, argmax};
}

template <CrossSum kCross>
constexpr int kWeightingSide = kCross == CrossSum::kForward ? 1 : 0;

// Makes the sums relative to `max` of one side, which is not smaller than what they were.
template <CrossSum kCross>
__device__ __forceinline__ void RaisePairMax(int side, float max, float scale, OnlinePair* pair) {
  constexpr int kWeights = kWeightingSide<kCross>;
  const float before = pair->max[side];
  pair->max[side] = max;
  // Without a finite maximum nothing but infinite terms is in the sums.
  if (before == MinusInfinity() || before == max) return;
  const float shift = (before - max) * scale;  // Negative.
  if (side != kWeights) {
    // The other side's differences shrink by -shift, and each term grows by as much.
    if constexpr (kCross != CrossSum::kNone) {
      if (pair->sum_exp[kWeights] != 0.0f) pair->cross_sum -= shift * pair->sum_exp[kWeights];
    }
    pair->sum_exp[side] *= expf(shift);
    return;
  }
  const float factor = expf(shift);
  if constexpr (kCross != CrossSum::kNone) {
    if (pair->cross_sum != INFINITY) {
      pair->cross_sum =
          factor > 0.0f ? factor * (pair->cross_sum + shift * pair->sum_exp[side]) : 0.0f;
    }
  }
  pair->sum_exp[side] *= factor;
}

template <CrossSum kCross>
__device__ __forceinline__ void MergePair(OnlinePair other, const float (&scale)[2],
                                          OnlinePair* into) {
  if (other.max[0] > into->max[0] ||
      (other.max[0] == into->max[0] && other.argmax < into->argmax)) {
    into->argmax = other.argmax;
  }
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    if (other.max[side] > into->max[side]) {
      RaisePairMax<kCross>(side, other.max[side], scale[side], into);
    } else {
      RaisePairMax<kCross>(side, into->max[side], scale[side], &other);
    }
  }
#pragma unroll
  for (int side = 0; side < 2; ++side) into->sum_exp[side] += other.sum_exp[side];
  into->cross_sum += other.cross_sum;
}

template <CrossSum kCross>
__device__ __forceinline__ void MergePairWarp(const float (&scale)[2], OnlinePair* pair) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    OnlinePair other;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      other.max[side] = __shfl_down_sync(kWholeWarp, pair->max[side], offset);
      other.sum_exp[side] = __shfl_down_sync(kWholeWarp, pair->sum_exp[side], offset);
    }
    other.cross_sum = __shfl_down_sync(kWholeWarp, pair->cross_sum, offset);
    other.argmax = __shfl_down_sync(kWholeWarp, pair->argmax, offset);
    MergePair<kCross>(other, scale, pair);
  }
}

template <int kCount>
__device__ __forceinline__ float MaxOf(const float (&values)[kCount]) {
  float max = values[0];
#pragma unroll
  for (int k = 1; k < kCount; ++k) max = fmaxf(max, values[k]);
  return max;
}

// Adds kCount columns that start at the student's vocabulary id `first`.
template <typename T, CrossSum kCross, int kCount>
__device__ __forceinline__ void AddPair(const float (&u)[kCount], const float (&v)[kCount],
                                        int32_t first, const float (&scale)[2], OnlinePair* pair) {
  const float u_max = MaxOf(u);
  if (u_max > pair->max[0]) {  // Rare after the first few vectors, like the next.
    int k = 0;
#pragma unroll
    for (int i = kCount - 1; i >= 0; --i) k = u[i] == u_max ? i : k;
    pair->argmax = first + k;
    RaisePairMax<kCross>(0, u_max, scale[0], pair);
  }
  const float v_max = MaxOf(v);
  if (v_max > pair->max[1]) RaisePairMax<kCross>(1, v_max, scale[1], pair);
  // Relative to 0 as long as all is masked: an exponential is 0 then, a difference infinite.
  const float u_base = pair->max[0] == MinusInfinity() ? 0.0f : pair->max[0];
  const float v_base = pair->max[1] == MinusInfinity() ? 0.0f : pair->max[1];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float du = u[k] - u_base;
    const float dv = v[k] - v_base;
    const float p = ExpScaled<T>(du, scale[0]);
    const float q = ExpScaled<T>(dv, scale[1]);
    pair->sum_exp[0] += p;
    pair->sum_exp[1] += q;
    if constexpr (kCross == CrossSum::kForward) {
      if (q > 0.0f) pair->cross_sum += q * (dv * scale[1] - du * scale[0]);
    }
    if constexpr (kCross == CrossSum::kReverse) {
      if (p > 0.0f) pair->cross_sum += p * (du * scale[0] - dv * scale[1]);
    }
  }
}

// Writes the row's results, merged with those of earlier tiles.
template <CrossSum kCross>
__device__ __forceinline__ void WritePair(const PairStatsArguments& args, int64_t row,
                                          float target_logit, OnlinePair pair) {
  const float units[2] = {1.0f, 1.0f};
  PairStats out{};
  out.tail_max = MinusInfinity();
  if (args.merge) {
    out = args.stats[row];
    const OnlinePair before = {{out.student_max, out.teacher_max},
                               {out.student_sum_exp, out.teacher_sum_exp},
                               out.cross_sum,
                               args.student_stats != nullptr ? args.student_stats[row].argmax : 0};
    MergePair<kCross>(before, units, &pair);
    if (args.student_stats != nullptr) target_logit += args.student_stats[row].target_logit;
  }
  out.student_max = pair.max[0];
  out.student_sum_exp = pair.sum_exp[0];
  out.teacher_max = pair.max[1];
  out.teacher_sum_exp = pair.sum_exp[1];
  out.cross_sum = pair.cross_sum;
  args.stats[row] = out;
  if (args.student_stats == nullptr) return;
  RowStats student{};
  student.logits_max = pair.max[0];
  student.sum_exp = pair.sum_exp[0];
  student.target_logit = target_logit;
  student.argmax = pair.argmax;
  args.student_stats[row] = student;
}

// One block a row.
template <typename T, CrossSum kCross, bool kTransform>
__global__ void __launch_bounds__(kPairThreads, 2) PairStatsKernel(PairStatsArguments args) {
  constexpr int kCount = Vector<T>::kCount;
  const int64_t row = blockIdx.x;  // 64-bit: row * row_stride exceeds 2^31.
  const SideReader<T, kTransform> student(args.student, row * args.row_stride,
                                          args.inverse_temperature);
  const SideReader<T, kTransform> teacher(args.teacher, row * args.row_stride,
                                          args.inverse_temperature);
  const float scale[2] = {student.scale, teacher.scale};
  const int32_t cols = max(student.cols, teacher.cols);
  OnlinePair pair = EmptyPair(args.vocab_start);
  constexpr int32_t kStep = kPairThreads * kCount;
  for (int32_t start = threadIdx.x * kCount; start < cols; start += kStep * kPairUnroll) {
    Vector<T> raw_u[kPairUnroll], raw_v[kPairUnroll];
#pragma unroll
    for (int i = 0; i < kPairUnroll; ++i) {
      student.Load(start + i * kStep, &raw_u[i]);
      teacher.Load(start + i * kStep, &raw_v[i]);
    }
#pragma unroll
    for (int i = 0; i < kPairUnroll; ++i) {
      const int32_t col = start + i * kStep;
      if (col >= cols) break;
      float u[kCount], v[kCount];
      student.Values(raw_u[i], col, u);
      teacher.Values(raw_v[i], col, v);
      AddPair<T, kCross>(u, v, args.vocab_start + col, scale, &pair);
    }
  }
  MergePairWarp<kCross>(scale, &pair);
  __shared__ OnlinePair warps[kPairThreads / kWarpSize];
  if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = pair;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kPairThreads / kWarpSize; ++warp) {
    MergePair<kCross>(warps[warp], scale, &pair);
  }
  pair.max[0] *= scale[0];
  pair.max[1] *= scale[1];
  float target_logit = 0.0f;
  if (args.student_stats != nullptr) {
    const int32_t target = args.rows[row].target - args.vocab_start;  // Signed.
    if (0 <= target && target < student.cols) {
      target_logit = student.Value(ToFloat(student.logits[target])) * scale[0];
    }
  }
  WritePair<kCross>(args, row, target_logit, pair);
}

// One block a row: maximum and sum of exponentials alone, over columns of the teacher.
template <typename T>
__global__ void __launch_bounds__(kPairThreads)
    TeacherTailStatsKernel(PairSide side, int64_t row_stride, float inverse_temperature,
                           PairStats* stats) {
  const int64_t row = blockIdx.x;
  const SideReader<T, true> teacher(side, row * row_stride, inverse_temperature);
  const float scale[2] = {1.0f, 1.0f};
  OnlinePair pair = EmptyPair(0);
  for (int32_t col = threadIdx.x; col < side.cols; col += kPairThreads) {
    const float u[1] = {MinusInfinity()};
    const float v[1] = {teacher.Value(ToFloat(teacher.logits[col]))};
    AddPair<T, CrossSum::kNone>(u, v, 0, scale, &pair);
  }
  MergePairWarp<CrossSum::kNone>(scale, &pair);
  __shared__ OnlinePair warps[kPairThreads / kWarpSize];
  if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = pair;
  __syncthreads();
  if (threadIdx.x != 0) return;
  OnlinePair sum = EmptyPair(0);
  sum.max[1] = stats[row].tail_max;
  sum.sum_exp[1] = stats[row].tail_sum_exp;
  for (int warp = 0; warp < kPairThreads / kWarpSize; ++warp) {
    MergePair<CrossSum::kNone>(warps[warp], scale, &sum);
  }
  stats[row].tail_max = sum.max[1];
  stats[row].tail_sum_exp = sum.sum_exp[1];
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_PAIR_STATS_CUH_
