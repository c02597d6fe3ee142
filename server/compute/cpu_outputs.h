// Answers of a batch: the sums of its chunks and the outputs that they want.

#ifndef LMHEAD_SERVER_COMPUTE_CPU_OUTPUTS_H_
#define LMHEAD_SERVER_COMPUTE_CPU_OUTPUTS_H_

#include <vector>

#include "absl/status/status.h"
#include "server/compute/collective.h"
#include "server/compute/cpu_batch_state.h"

namespace lmhead {

// Finishes every row, whose statistics are those of all ranks: writes its outputs, prepares its
// gradient, and adds it to the sums of its chunk, in the order of the rows.
std::vector<LossSums> FinishRows(CpuBatchState* state);

// Writes the top-k outputs from lists that are sorted and those of all ranks.
void WriteTopK(const CpuBatchState& state);

// Writes grad_hidden_states, rounded once to the dtype that each chunk wants.
void WriteGradHidden(const CpuBatchState& state);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CPU_OUTPUTS_H_
