// One golden case through a real service: a head, and one for its teacher, is created for it,
// loaded, fed and deleted.

#ifndef LMHEAD_BENCH_GOLDEN_RUN_H_
#define LMHEAD_BENCH_GOLDEN_RUN_H_

#include <string>

#include "absl/status/statusor.h"
#include "bench/golden_case.h"
#include "client/cpp/client.h"
#include "kernels/reference/compare.h"
#include "proto/types/dtype.h"
#include "proto/types/head_spec.h"

namespace lmhead::bench {

// Retain and recompute run a training step and read all gradients; frozen reads grad_hidden_states
// of a head that is not trainable; eval asks it for the loss and the per-token outputs alone.
// Weight and hidden states, a teacher's too, are sent in `dtype`, a few rows a chunk. Returns the
// outputs that the schedule has. UNIMPLEMENTED, naming the field, when the service does not do it
// yet.
absl::StatusOr<reference::Outputs> RunGoldenCase(Client& client, const GoldenCase& golden,
                                                 Schedule schedule, DType dtype,
                                                 const std::string& head);

}  // namespace lmhead::bench

#endif  // LMHEAD_BENCH_GOLDEN_RUN_H_
