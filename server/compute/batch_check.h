// What every backend asserts of a batch before anything accumulates. Validated at the edge already.

#ifndef LMHEAD_SERVER_COMPUTE_BATCH_CHECK_H_
#define LMHEAD_SERVER_COMPUTE_BATCH_CHECK_H_

#include "absl/status/status.h"
#include "proto/types/head_spec.h"
#include "server/compute/backend.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// INVALID_ARGUMENT for shapes and targets that do not fit the head, naming chunk, row and value;
// FAILED_PRECONDITION for a mode that the head or its schedule does not have.
absl::Status CheckBatch(const HeadSpec& spec, const MemoryPlan& plan, const BatchInput& input);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_BATCH_CHECK_H_
