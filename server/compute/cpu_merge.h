// What the ranks of a head tell each other of a batch. Nothing for a head of one rank.
//
// All ranks merge what all sent in the order of the ranks, so that they hold the same bits.

#ifndef LMHEAD_SERVER_COMPUTE_CPU_MERGE_H_
#define LMHEAD_SERVER_COMPUTE_CPU_MERGE_H_

#include "absl/status/status.h"
#include "proto/types/head_spec.h"
#include "server/compute/collective.h"
#include "server/compute/cpu_batch_state.h"

namespace lmhead {

// Makes the statistics of every row those of the whole vocabulary.
absl::Status MergeRows(const HeadSpec& spec, const RankContext& context, CpuBatchState* state);

// Likewise the sums of a JSD's second sweep.
absl::Status MergeMixtures(const RankContext& context, CpuBatchState* state);

// Sorts the top-k lists and makes them those of the whole vocabulary.
absl::Status MergeTopK(const HeadSpec& spec, const RankContext& context, CpuBatchState* state);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CPU_MERGE_H_
