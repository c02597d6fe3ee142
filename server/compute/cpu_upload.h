// Takes the chunks of a batch in: hidden states as float32, and the inputs of every row.

#ifndef LMHEAD_SERVER_COMPUTE_CPU_UPLOAD_H_
#define LMHEAD_SERVER_COMPUTE_CPU_UPLOAD_H_

#include "absl/status/status.h"
#include "server/compute/collective.h"
#include "server/compute/cpu_batch_state.h"

namespace lmhead {

// Fills hidden, teacher_hidden, rows, divergences and entries of `state` from its input,
// broadcasting the rows from rank 0 as they arrived when the input says so: every rank sees the
// same rows as not finite. A failure is the collective's.
absl::Status UploadBatch(const RankContext& context, CpuBatchState* state);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CPU_UPLOAD_H_
