// Device code of kernels/shard_stats.h.

#ifndef LMHEAD_KERNELS_DEVICE_SHARD_STATS_CUH_
#define LMHEAD_KERNELS_DEVICE_SHARD_STATS_CUH_

#include <cstdint>

#include "kernels/device/numeric.cuh"
#include "kernels/row_types.h"

namespace lmhead::kernels::device {

constexpr int kStatsThreads = 512;
constexpr int kStatsUnroll = 4;  // Vectors in flight a thread.

struct ShardStatsArguments {
  const void* logits;
  int64_t row_stride;
  int32_t cols;
  int32_t vocab_start;
  const RowInput* rows;
  const float* class_weights;  // At the tile's first column, or null.
  float logit_scale;
  float softcap;
  float inverse_temperature;  // Of every row, or 0: each row's own.
  bool merge;
  RowStats* stats;
};

// What a thread, a warp, a block has seen. Values are final logits divided by `scale`, which is the
// row's: without softcap that is what the matrix product gave, so that no element is multiplied.
struct OnlineStats {
  float max;
  float sum_exp;
  float entropy_sum;
  int32_t argmax;
  double smoothing_sum;
  double smoothing_weight;
};

// Of no columns: merges as nothing.
__device__ __forceinline__ OnlineStats EmptyStats(int32_t argmax) {
  return {MinusInfinity(), 0.0f, 0.0f, argmax, 0.0, 0.0};
}

// Rescales sums relative to stats->max so that they are relative to `max`, which is not smaller.
__device__ __forceinline__ void RaiseMax(float max, float scale, OnlineStats* stats) {
  if (stats->sum_exp != 0.0f) {  // Else max may be -inf, and (-inf) - (-inf) must not be formed.
    const float shift = stats->max - max;
    const float factor = expf(shift * scale);
    stats->entropy_sum =
        factor > 0.0f ? factor * (stats->entropy_sum + shift * stats->sum_exp) : 0.0f;
    stats->sum_exp *= factor;
  }
  stats->max = max;
}

__device__ __forceinline__ void Merge(OnlineStats other, float scale, OnlineStats* into) {
  if (other.max > into->max || (other.max == into->max && other.argmax < into->argmax)) {
    into->argmax = other.argmax;
  }
  if (other.max > into->max) {
    RaiseMax(other.max, scale, into);
  } else {
    RaiseMax(into->max, scale, &other);
  }
  into->sum_exp += other.sum_exp;
  into->entropy_sum += other.entropy_sum;
  into->smoothing_sum += other.smoothing_sum;
  into->smoothing_weight += other.smoothing_weight;
}

template <typename V>
__device__ __forceinline__ V ShuffleDown(V value, int offset) {
  return __shfl_down_sync(kWholeWarp, value, offset);
}

template <bool kEntropy, bool kSmoothing>
__device__ __forceinline__ void MergeWarp(float scale, OnlineStats* stats) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    OnlineStats other{};
    other.max = ShuffleDown(stats->max, offset);
    other.sum_exp = ShuffleDown(stats->sum_exp, offset);
    other.argmax = ShuffleDown(stats->argmax, offset);
    if constexpr (kEntropy) other.entropy_sum = ShuffleDown(stats->entropy_sum, offset);
    if constexpr (kSmoothing) {
      other.smoothing_sum = ShuffleDown(stats->smoothing_sum, offset);
      other.smoothing_weight = ShuffleDown(stats->smoothing_weight, offset);
    }
    Merge(other, scale, stats);
  }
}

// Adds kCount values that start at vocabulary id `first`.
template <typename T, int kCount, bool kEntropy>
__device__ __forceinline__ void AddLogits(const float (&z)[kCount], int32_t first, float scale,
                                          OnlineStats* stats) {
  float max = z[0];
#pragma unroll
  for (int k = 1; k < kCount; ++k) max = fmaxf(max, z[k]);
  if (max > stats->max) {  // Rare after the first few vectors.
    int k = 0;
#pragma unroll
    for (int i = kCount - 1; i >= 0; --i) k = z[i] == max ? i : k;
    stats->argmax = first + k;
    RaiseMax(max, scale, stats);
  }
  if (stats->max == MinusInfinity()) return;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float d = z[k] - stats->max;
    const float p = ExpScaled<T>(d, scale);
    stats->sum_exp += p;
    if constexpr (kEntropy) stats->entropy_sum += p * fmaxf(d, -kFloatMax);  // 0 * inf is 0.
  }
}

// Adds kCount values to the sums for label smoothing; masked ones are left out.
template <int kCount>
__device__ __forceinline__ void AddSmoothing(const float (&z)[kCount], const float* class_weights,
                                             OnlineStats* stats) {
  float sum = 0.0f;
  float weight = 0.0f;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (z[k] == MinusInfinity()) continue;  // Masked, or past the end.
    const float w = class_weights != nullptr ? class_weights[k] : 1.0f;
    sum += w * z[k];
    weight += w;
  }
  stats->smoothing_sum += sum;
  stats->smoothing_weight += weight;
}

// One block a row.
template <typename T, bool kTransform, bool kEntropy, bool kSmoothing>
__global__ void __launch_bounds__(kStatsThreads, 2) ShardStatsKernel(ShardStatsArguments args) {
  constexpr int kCount = Vector<T>::kCount;
  const int64_t row = blockIdx.x;  // 64-bit: row * row_stride exceeds 2^31.
  const T* const logits = static_cast<const T*>(args.logits) + row * args.row_stride;
  RowInput input = args.rows[row];
  if (args.inverse_temperature != 0.0f) input.inverse_temperature = args.inverse_temperature;
  const float logit_scale = args.logit_scale * (kTransform ? 1.0f : input.inverse_temperature);
  const float scale = kTransform ? 1.0f : logit_scale;
  const float inverse_softcap = args.softcap != 0.0f ? 1.0f / args.softcap : 0.0f;

  // A final logit divided by `scale`.
  const auto value = [&](T z0) {
    if constexpr (!kTransform) return ToFloat(z0);
    return Transform<T>(ToFloat(z0), logit_scale, args.softcap, inverse_softcap,
                        input.inverse_temperature)
        .z;
  };

  OnlineStats stats = EmptyStats(args.vocab_start);
  constexpr int32_t kStep = kStatsThreads * kCount;
  for (int32_t start = threadIdx.x * kCount; start < args.cols; start += kStep * kStatsUnroll) {
    Vector<T> raw[kStatsUnroll];
#pragma unroll
    for (int u = 0; u < kStatsUnroll; ++u) {
      // The row stride covers whole vectors, so the last one may reach past cols.
      if (start + u * kStep < args.cols) raw[u] = Vector<T>::Load(logits + start + u * kStep);
    }
#pragma unroll
    for (int u = 0; u < kStatsUnroll; ++u) {
      const int32_t col = start + u * kStep;
      if (col >= args.cols) break;
      float z[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) z[k] = value(raw[u].values[k]);
      if (col + kCount > args.cols) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) z[k] = col + k < args.cols ? z[k] : MinusInfinity();
      }
      AddLogits<T, kCount, kEntropy>(z, args.vocab_start + col, scale, &stats);
      if constexpr (kSmoothing) {
        const float* const weights = args.class_weights;
        AddSmoothing<kCount>(z, weights != nullptr ? weights + col : nullptr, &stats);
      }
    }
  }

  MergeWarp<kEntropy, kSmoothing>(scale, &stats);
  __shared__ OnlineStats warps[kStatsThreads / kWarpSize];
  if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = stats;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kStatsThreads / kWarpSize; ++warp) {
    Merge(warps[warp], scale, &stats);
  }

  stats.max *= scale;
  stats.entropy_sum *= scale;
  stats.smoothing_sum *= scale;

  const int32_t target = input.target - args.vocab_start;  // Signed: may lie in another tile.
  RowStats out{};
  if (0 <= target && target < args.cols) out.target_logit = value(logits[target]) * scale;
  if (args.merge) {
    const RowStats before = args.stats[row];
    out.target_logit += before.target_logit;  // At most one of them is not 0.
    Merge({before.logits_max, before.sum_exp, before.entropy_sum, before.argmax,
           before.smoothing_sum, before.smoothing_weight},
          /*scale=*/1.0f, &stats);
  }
  out.logits_max = stats.max;
  out.sum_exp = stats.sum_exp;
  out.entropy_sum = stats.entropy_sum;
  out.smoothing_sum = stats.smoothing_sum;
  out.smoothing_weight = stats.smoothing_weight;
  out.argmax = stats.argmax;
  args.stats[row] = out;
}

}  // namespace lmhead::kernels::device

#endif  // LMHEAD_KERNELS_DEVICE_SHARD_STATS_CUH_
