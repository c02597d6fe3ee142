// Device code of kernels/merge_stats.h.

#ifndef LMHEAD_KERNELS_DEVICE_MERGE_STATS_CUH_
#define LMHEAD_KERNELS_DEVICE_MERGE_STATS_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/device/pair_stats.cuh"
#include "kernels/device/shard_stats.cuh"
#include "kernels/row_types.h"

namespace lmhead::kernels::device {

template <typename Record>
__device__ __forceinline__ const Record& RecordOf(const std::byte* first, int64_t stride,
                                                  int32_t shard, int64_t row) {
  return reinterpret_cast<const Record*>(first + shard * stride)[row];
}

// One thread a row.
__global__ void MergeRowStatsKernel(const std::byte* first, int64_t stride, int32_t num_shards,
                                    int64_t num_rows, RowStats* merged) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= num_rows) return;
  OnlineStats sum = EmptyStats(INT32_MAX);
  RowStats out{};
  for (int32_t shard = 0; shard < num_shards; ++shard) {
    const RowStats& stats = RecordOf<RowStats>(first, stride, shard, row);
    Merge({stats.logits_max, stats.sum_exp, stats.entropy_sum, stats.argmax, stats.smoothing_sum,
           stats.smoothing_weight},
          /*scale=*/1.0f, &sum);
    out.target_logit += stats.target_logit;  // At most one of them is not 0.
  }
  out.logits_max = sum.max;
  out.sum_exp = sum.sum_exp;
  out.entropy_sum = sum.entropy_sum;
  out.smoothing_sum = sum.smoothing_sum;
  out.smoothing_weight = sum.smoothing_weight;
  out.argmax = sum.argmax;
  merged[row] = out;
}

// One thread a row.
template <CrossSum kCross>
__global__ void MergePairStatsKernel(const std::byte* first, int64_t stride, int32_t num_shards,
                                     int64_t num_rows, PairStats* merged) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= num_rows) return;
  const float units[2] = {1.0f, 1.0f};
  OnlinePair sum = EmptyPair(0);
  OnlinePair tail = EmptyPair(0);
  for (int32_t shard = 0; shard < num_shards; ++shard) {
    const PairStats& stats = RecordOf<PairStats>(first, stride, shard, row);
    MergePair<kCross>({{stats.student_max, stats.teacher_max},
                       {stats.student_sum_exp, stats.teacher_sum_exp},
                       stats.cross_sum,
                       0},
                      units, &sum);
    OnlinePair of_tail = EmptyPair(0);
    of_tail.max[1] = stats.tail_max;
    of_tail.sum_exp[1] = stats.tail_sum_exp;
    MergePair<CrossSum::kNone>(of_tail, units, &tail);
  }
  PairStats out{};
  out.student_max = sum.max[0];
  out.student_sum_exp = sum.sum_exp[0];
  out.teacher_max = sum.max[1];
  out.teacher_sum_exp = sum.sum_exp[1];
  out.cross_sum = sum.cross_sum;
  out.tail_max = tail.max[1];
  out.tail_sum_exp = tail.sum_exp[1];
  merged[row] = out;
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_MERGE_STATS_CUH_
