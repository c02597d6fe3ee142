// The head, or a rank's shard of it, on the host's processor: oneDNN for the matrix products,
// kernels/cpu for the row passes.
//
// All arithmetic is float32, whatever the dtypes of the weight and of the hidden states: hidden
// states are converted on upload, a bfloat16 weight one vocabulary tile at a time. Logits exist for
// a tile (eval, recompute) or for one batch (retain, frozen). Everything lives in one HostArena
// carved by the plan at construction. Results of the same sequence of calls are bitwise equal on
// the same machine with the same number of threads. docs/NUMERICS.md describes the passes.
//
// cpu_parameters.h holds the tensors, cpu_products.h multiplies with them, cpu_batch.h computes
// batches.

#ifndef LMHEAD_SERVER_COMPUTE_CPU_BACKEND_H_
#define LMHEAD_SERVER_COMPUTE_CPU_BACKEND_H_

#include <memory>

#include "absl/status/statusor.h"
#include "proto/types/head_spec.h"
#include "server/compute/backend.h"
#include "server/compute/collective.h"
#include "server/memory/arena.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// Allocates the rank's shard, which may be empty, fills its weight as spec.weight_init says (zeros
// when it says nothing) and its bias with zeros. ComputeBatch of the result runs to its end before
// it returns. RESOURCE_EXHAUSTED when the system has no room for the plan. `account` must outlive
// the backend.
// REQUIRES: spec is validated; plan is spec's plan for BackendKind::kCpu, context.num_ranks ranks
//     and context.num_replicas replicas; the collectives' memory is the host's.
absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateCpuBackend(const HeadSpec& spec,
                                                                 const MemoryPlan& plan,
                                                                 MemoryAccount* account,
                                                                 const RankContext& context = {});

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CPU_BACKEND_H_
