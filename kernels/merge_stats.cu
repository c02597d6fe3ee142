#include "kernels/device/merge_stats.cuh"
#include "kernels/launch.h"
#include "kernels/merge_stats.h"

namespace lmhead::kernels {
namespace {

constexpr int kThreads = 128;

unsigned BlocksFor(int64_t count) { return static_cast<unsigned>(CeilDiv(count, kThreads)); }

}  // namespace

cudaError_t LaunchMergeRowStats(const void* first, int64_t shard_stride_bytes, int32_t num_shards,
                                int64_t num_rows, RowStats* merged, cudaStream_t stream) {
  device::MergeRowStatsKernel<<<BlocksFor(num_rows), kThreads, 0, stream>>>(
      static_cast<const std::byte*>(first), shard_stride_bytes, num_shards, num_rows, merged);
  return cudaGetLastError();
}

cudaError_t LaunchMergePairStats(const void* first, int64_t shard_stride_bytes, int32_t num_shards,
                                 int64_t num_rows, bool reverse, PairStats* merged,
                                 cudaStream_t stream) {
  const auto* const bytes = static_cast<const std::byte*>(first);
  if (reverse) {
    device::MergePairStatsKernel<device::CrossSum::kReverse>
        <<<BlocksFor(num_rows), kThreads, 0, stream>>>(bytes, shard_stride_bytes, num_shards,
                                                       num_rows, merged);
  } else {
    device::MergePairStatsKernel<device::CrossSum::kForward>
        <<<BlocksFor(num_rows), kThreads, 0, stream>>>(bytes, shard_stride_bytes, num_shards,
                                                       num_rows, merged);
  }
  return cudaGetLastError();
}

}  // namespace lmhead::kernels
