// The second sweep of the Jensen-Shannon divergence: its two sums need the normalisers of both
// sides.
//
// A host-callable launcher: no allocation, no synchronisation. The caller owns buffers and stream.

#ifndef LMHEAD_KERNELS_JSD_SUMS_H_
#define LMHEAD_KERNELS_JSD_SUMS_H_

#include <cuda_runtime_api.h>

#include "kernels/pair_stats.h"
#include "kernels/row_types.h"

namespace lmhead::kernels {

// sums[2 row] is or grows by the sum of p (log p - log m) over the pair's columns, sums[2 row + 1]
// by that of q (log q - log m), with m = beta q + (1 - beta) p. `stats` covers the whole
// vocabulary; `with_tail` tells whether the teacher's distribution includes its tail.
cudaError_t LaunchJsdSums(const LogitsPair& pair, const PairStats* stats, float beta,
                          bool with_tail, bool add, float* sums, cudaStream_t stream);

}  // namespace lmhead::kernels

#endif  // LMHEAD_KERNELS_JSD_SUMS_H_
