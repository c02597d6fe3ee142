// Statistics of the shards of a vocabulary merged into those of the whole.
//
// Host-callable launchers: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_MERGE_STATS_H_
#define LMHEAD_KERNELS_MERGE_STATS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_types.h"

namespace lmhead::kernels {

// Merges num_shards records a row; the record of shard i and a row is at
// (first + i * shard_stride_bytes) + row * its size. In the order of the shards, so that results
// repeat. `merged` must not overlap them.
cudaError_t LaunchMergeRowStats(const void* first, int64_t shard_stride_bytes, int32_t num_shards,
                                int64_t num_rows, RowStats* merged, cudaStream_t stream);

// The same for pairs. `reverse` tells which KL's sum they hold.
cudaError_t LaunchMergePairStats(const void* first, int64_t shard_stride_bytes, int32_t num_shards,
                                 int64_t num_rows, bool reverse, PairStats* merged,
                                 cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_MERGE_STATS_H_
