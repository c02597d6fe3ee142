// Device code of kernels/topk_teacher.h.

#ifndef LMHEAD_KERNELS_DEVICE_TOPK_TEACHER_CUH_
#define LMHEAD_KERNELS_DEVICE_TOPK_TEACHER_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"
#include "kernels/device/shard_stats.cuh"
#include "kernels/row_types.h"
#include "kernels/topk_teacher.h"

namespace lmhead::kernels::device {

// One thread an id.
template <typename T>
__global__ void TakeTopkKernel(T* logits, int64_t row_stride, VocabTile tile, int64_t count,
                               TopkTeacher teacher, float* values) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t col = teacher.ids[i] - tile.start;
  if (col < 0 || col >= tile.cols) return;
  T* const element = logits + i / teacher.k * row_stride + col;
  values[i] = ToFloat(*element);
  *element = FromFloat<T>(MinusInfinity());
}

// z2: a logit before any temperature, -inf where masked.
__device__ __forceinline__ FinalLogit UntemperedLogit(float z0, const LogitTransform& transform) {
  const float inverse = transform.softcap != 0.0f ? 1.0f / transform.softcap : 0.0f;
  return Transform<float>(z0, transform.logit_scale, transform.softcap, inverse, 1.0f);
}

// Sum over a warp, the same in every lane.
__device__ __forceinline__ float WarpSum(float value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, offset);
  }
  return value;
}
// Statistics of the k ids alone at one temperature, merged over the warp: valid in lane 0.
__device__ __forceinline__ OnlineStats StatsOfTopk(const TopkTeacher& teacher, const float* values,
                                                   int64_t first, int lane,
                                                   const FoldTopkOptions& options,
                                                   float inverse_temperature) {
  OnlineStats stats = EmptyStats(INT32_MAX);
  for (int i = lane; i < teacher.k; i += kWarpSize) {
    const float z = UntemperedLogit(values[first + i], options.transform).z * inverse_temperature;
    const int32_t id = teacher.ids[first + i];
    OnlineStats one = EmptyStats(id);
    if (z != MinusInfinity()) {
      const float w = options.class_weights != nullptr ? options.class_weights[id] : 1.0f;
      one.max = z;
      one.sum_exp = 1.0f;
      one.smoothing_sum = static_cast<double>(w) * z;
      one.smoothing_weight = w;
    }
    Merge(one, 1.0f, &stats);
  }
  MergeWarp<true, true>(1.0f, &stats);
  return stats;
}

__device__ __forceinline__ OnlineStats OnlineOf(const RowStats& stats) {
  return {stats.logits_max, stats.sum_exp,       stats.entropy_sum,
          stats.argmax,     stats.smoothing_sum, stats.smoothing_weight};
}

// One warp a row.
__global__ void FoldTopkKernel(int64_t num_rows, const RowInput* rows, TopkTeacher teacher,
                               const float* values, FoldTopkOptions options,
                               const RowStats* all_outside, RowStats* row_stats,
                               TopkStats* topk_stats) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (row >= num_rows) return;
  const int64_t first = row * teacher.k;
  const RowInput input = rows[row];
  const RowStats outside = all_outside[row];  // Before row_stats, which may be the same, changes.
  const bool one_temperature = all_outside == row_stats;
  const float row_temperature =
      one_temperature ? options.inverse_temperature : input.inverse_temperature;

  RowStats folded = row_stats[row];
  OnlineStats inside = StatsOfTopk(teacher, values, first, lane, options, row_temperature);
  OnlineStats total = OnlineOf(folded);
  Merge(inside, 1.0f, &total);
  // The target, if it is inside: at most one lane has it.
  float target_logit = 0.0f;
  bool has_target = false;
  for (int i = lane; i < teacher.k; i += kWarpSize) {
    if (teacher.ids[first + i] != input.target) continue;
    has_target = true;
    target_logit = UntemperedLogit(values[first + i], options.transform).z * row_temperature;
  }
  const unsigned owner = __ballot_sync(kWholeWarp, has_target);
  if (owner != 0) target_logit = __shfl_sync(kWholeWarp, target_logit, __ffs(owner) - 1);

  // At the temperature of the divergence.
  OnlineStats inside_kl = one_temperature ? inside
                                          : StatsOfTopk(teacher, values, first, lane, options,
                                                        options.inverse_temperature);
  OnlineStats total_kl = OnlineOf(outside);
  Merge(inside_kl, 1.0f, &total_kl);
  const float total_max = __shfl_sync(kWholeWarp, total_kl.max, 0);
  const float base = total_max == MinusInfinity() ? 0.0f : total_max;
  float mass = 0.0f;
  float cross_sum = 0.0f;
  for (int i = lane; i < teacher.k; i += kWarpSize) {
    const float log_q = teacher.logprobs[first + i];
    const float q = expf(log_q);
    const float u = UntemperedLogit(values[first + i], options.transform).z;
    mass += q;
    if (q > 0.0f) cross_sum += q * (log_q - (u * options.inverse_temperature - base));
  }
  mass = WarpSum(mass);
  cross_sum = WarpSum(cross_sum);
  if (lane != 0) return;
  folded.logits_max = total.max;
  folded.sum_exp = total.sum_exp;
  if (options.entropy) folded.entropy_sum = total.entropy_sum;
  if (options.smoothing) {
    folded.smoothing_sum = total.smoothing_sum;
    folded.smoothing_weight = total.smoothing_weight;
  }
  folded.argmax = total.argmax;
  if (owner != 0) folded.target_logit = target_logit;
  row_stats[row] = folded;
  TopkStats stats{};
  stats.outside_max = outside.logits_max;
  stats.outside_sum_exp = outside.sum_exp;
  stats.total_max = total_max;
  stats.total_sum_exp = total_kl.sum_exp;
  stats.mass = mass;
  stats.cross_sum = cross_sum;
  topk_stats[row] = stats;
}

// One thread an id.
template <typename T>
__global__ void TopkGradsKernel(T* logits, int64_t row_stride, VocabTile tile, int64_t count,
                                TopkTeacher teacher, const float* values, TopkGradOptions options,
                                const RowGrad* rows, const RowDivergenceGrad* divergence_rows) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int32_t id = teacher.ids[i];
  const int64_t col = id - tile.start;
  if (col < 0 || col >= tile.cols) return;
  const int64_t row = i / teacher.k;
  const RowGrad grad = rows[row];
  if (grad.is_zero) return;
  const FinalLogit logit = UntemperedLogit(values[i], options.transform);
  float dz = 0.0f;
  if (logit.z != MinusInfinity()) {
    const RowDivergenceGrad divergence = divergence_rows[row];
    dz = divergence.inside_scale *
             expf(logit.z * options.inverse_temperature - divergence.inside_max) -
         divergence.teacher_scale * expf(teacher.logprobs[i]);
    if (options.cross_entropy && id != grad.target) {
      const float w = options.class_weights != nullptr ? options.class_weights[id] : 1.0f;
      dz += expf(logit.z * grad.inverse_temperature - grad.logits_max) * grad.prob_scale -
            w * grad.uniform_grad;
    }
    dz *= logit.softcap_derivative;
  }
  if (options.cross_entropy && id == grad.target) dz += grad.target_grad;
  logits[row * row_stride + col] = FromFloat<T>(dz);
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_TOPK_TEACHER_CUH_
