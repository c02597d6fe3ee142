// A teacher that is k ids and log-probabilities a row: what its ids need besides the passes over
// whole rows.
//
// The k logits of a row are taken out of the tile, which then holds -inf there, so that the
// statistics are those of the other ids: the student's mass outside the k is a sum over those
// columns and never a difference. Folding adds the k back in; the k gradients are written after the
// gradient pass over the row.
//
// Host-callable launchers: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_TOPK_TEACHER_H_
#define LMHEAD_KERNELS_TOPK_TEACHER_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_types.h"
#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

// [num_rows, k] each, in device memory. Ids of a row are distinct and in [0, vocab_size).
struct TopkTeacher {
  const int32_t* ids = nullptr;
  const float* logprobs = nullptr;  // May be -inf.
  int32_t k = 0;
};

// values[row, i] becomes the logit of id i as the matrix product gave it, and the tile's element
// -inf, for the ids that lie in the tile; other values stay. `values` starts as zeros, which those
// of several tiles and shards then sum up to.
cudaError_t LaunchTakeTopk(MatrixView logits, VocabTile tile, const TopkTeacher& teacher,
                           float* values, cudaStream_t stream);

struct FoldTopkOptions {
  LogitTransform transform;
  const float* class_weights = nullptr;  // [vocab_size], or null for ones.
  bool entropy = false;                  // row_stats have it.
  bool smoothing = false;                // Likewise.
  float inverse_temperature = 1.0f;      // Of the divergence.
};

// Adds the k ids to row_stats, which hold the others at the row's temperature, and fills
// topk_stats. `outside` holds the others at the temperature of the divergence, or is row_stats when
// the two temperatures are one: then that of the rows is `rows`' and the same.
cudaError_t LaunchFoldTopk(int64_t num_rows, const RowInput* rows, const TopkTeacher& teacher,
                           const float* values, const FoldTopkOptions& options,
                           const RowStats* outside, RowStats* row_stats, TopkStats* topk_stats,
                           cudaStream_t stream);

struct TopkGradOptions {
  LogitTransform transform;
  const float* class_weights = nullptr;  // [vocab_size] when there is label smoothing with them.
  bool cross_entropy = false;            // There is a cross-entropy part.
  float inverse_temperature = 1.0f;      // Of the divergence.
};

// Writes the gradients of the k ids that lie in the tile over what LaunchDivergenceGrad left there.
cudaError_t LaunchTopkGrads(MatrixView logits, VocabTile tile, const TopkTeacher& teacher,
                            const float* values, const TopkGradOptions& options,
                            const RowGrad* rows, const RowDivergenceGrad* divergence_rows,
                            cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_TOPK_TEACHER_H_
