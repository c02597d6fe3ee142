// Statistics of each row over a tile of logits: maximum, sum of exponentials, target's logit,
// argmax, and on demand the sums for entropy and label smoothing. One pass, online.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_SHARD_STATS_H_
#define LMHEAD_KERNELS_SHARD_STATS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_types.h"
#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

struct ShardStatsOptions {
  LogitTransform transform;
  const float* class_weights = nullptr;  // [vocab_size], or null for ones.
  bool entropy = false;                  // Fill entropy_sum.
  bool smoothing = false;                // Fill smoothing_sum and smoothing_weight.
  float inverse_temperature = 0.0f;      // Of every row; 0 means each row's own.
  bool merge = false;  // Merge into what `stats` holds of earlier tiles; else start anew.
};

// Fills stats[row] from columns [tile.start, tile.start + tile.cols) of the row's final logits.
// Masked columns (-inf) count for nothing; a row of masked columns keeps logits_max -inf.
// REQUIRES: `logits` is float32 or bfloat16, its columns are the row stride, a multiple of 16 bytes
// and at least tile.cols; its data is 16-byte aligned.
cudaError_t LaunchShardStats(ConstMatrixView logits, VocabTile tile, const RowInput* rows,
                             const ShardStatsOptions& options, RowStats* stats,
                             cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_SHARD_STATS_H_
