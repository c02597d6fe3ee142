// The k largest logits of each row, kept over tiles and shards.
//
// An entry is 64 bits that order as entries do: by falling logit, among equals the lowest id first.
// Lists are sorted; entries of a list that is not full are kNoTopkEntry. Softcapped logits are
// compared after the softcap, where large ones may be equal.
//
// Host-callable launchers: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_TOPK_SELECT_H_
#define LMHEAD_KERNELS_TOPK_SELECT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_types.h"
#include "proto/types/tensor_view.h"

namespace lmhead::kernels {

using TopkEntry = uint64_t;
inline constexpr TopkEntry kNoTopkEntry = 0;
inline constexpr int32_t kTopkSelectMax = 1024;

// entries[row] becomes the list of the k largest of the tile, or with `merge` of the tile and what
// the list held. REQUIRES: 1 <= k <= kTopkSelectMax; otherwise as LaunchShardStats.
cudaError_t LaunchTopkSelect(ConstMatrixView logits, VocabTile tile,
                             const LogitTransform& transform, int32_t k, bool merge,
                             TopkEntry* entries, cudaStream_t stream);

// entries[row] becomes the k largest of num_lists lists; list i of a row is at
// lists[(i * num_rows + row) * k].
cudaError_t LaunchTopkMerge(const TopkEntry* lists, int32_t num_lists, int64_t num_rows, int32_t k,
                            TopkEntry* entries, cudaStream_t stream);

// Ids and log-probabilities of complete lists, [num_rows, k] each; zeros for rows with nonfinite
// set, id 0 and log-probability -inf where there is no entry. `stats` covers the whole vocabulary
// at the rows' temperature.
cudaError_t LaunchTopkFinish(const TopkEntry* entries, int64_t num_rows, int32_t k,
                             const RowInput* rows, const RowStats* stats, const uint8_t* nonfinite,
                             const LogitTransform& transform, int32_t* ids, float* logprobs,
                             cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_TOPK_SELECT_H_
