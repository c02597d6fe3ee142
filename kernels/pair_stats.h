// Statistics of each row over a tile of the student's logits and the same columns of the teacher's:
// maxima, sums of exponentials, and the sum that a KL divergence is made of. One pass, online.
//
// Host-callable launchers: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_PAIR_STATS_H_
#define LMHEAD_KERNELS_PAIR_STATS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_types.h"
#include "proto/types/loss_recipe.h"
#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

// The two sides of a tile. Columns past a side's cols are masked on it; those past the larger of
// the two are in no sum.
struct LogitsPair {
  MatrixView student;
  MatrixView teacher;  // The same shape and dtype.
  VocabTile tile;      // Of the student: its cols.
  int64_t teacher_cols = 0;
  LogitTransform student_transform;
  LogitTransform teacher_transform;
  float inverse_temperature = 1.0f;  // Of both sides, instead of the rows' own.
};

struct PairStatsOptions {
  Divergence divergence = Divergence::kForwardKl;  // Whose sum; JSD has none here.
  bool merge = false;  // Merge into what `stats` holds of earlier tiles; else start anew.
  // Unless null, also the student's statistics without entropy and smoothing, as LaunchShardStats
  // would give them for rows of that temperature.
  RowStats* student_stats = nullptr;
  const RowInput* rows = nullptr;  // For the targets of student_stats.
};

// Fills stats[row]; a new one has an empty tail. REQUIRES: as LaunchShardStats, of both sides.
cudaError_t LaunchPairStats(const LogitsPair& pair, const PairStatsOptions& options,
                            PairStats* stats, cudaStream_t stream);

// Adds the columns [0, cols) of the teacher's logits to the tail of stats[row].
cudaError_t LaunchTeacherTailStats(ConstMatrixView logits, int64_t cols,
                                   const LogitTransform& transform, float inverse_temperature,
                                   PairStats* stats, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_PAIR_STATS_H_
