// The head on a GPU: cuBLASLt for the matrix products, kernels/*.cu for the rest.
//
// One head, one device, one block of device memory carved by the plan at construction. Logits exist
// for a tile (eval, recompute) or for one batch (retain, frozen), in the head's dtype; statistics,
// losses and gradient accumulators are float32. Uploads, computation and downloads of three batches
// overlap on streams of their own; a thread of the backend waits for each and calls its `done`.
//
// The first CUDA error is kept: that call and every later one return it (ABORTED), `done` of every
// batch gets it, and the head has to be deleted; the server stays up.
//
// Compiles without CUDA; the functions then say that there is none.

#ifndef LMHEAD_SERVER_COMPUTE_CUDA_BACKEND_H_
#define LMHEAD_SERVER_COMPUTE_CUDA_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/types/head_spec.h"
#include "server/compute/backend.h"
#include "server/compute/collective.h"
#include "server/memory/arena.h"
#include "server/memory/cuda_layout.h"  // kCudaBatchesInFlight, for the Executor.
#include "server/memory/memory_plan.h"

namespace lmhead {

// Whether a head can live on device 0: a driver, a GPU that the kernels are built for, cuBLASLt.
// If not, *why_not is one sentence for the user. Slow at the first call (it starts CUDA).
bool CudaAvailable(std::string* why_not);

// The device as its driver sees it.
struct CudaDevice {
  std::string name;  // "NVIDIA H200"
  int64_t total_bytes = 0;
  int64_t used_bytes = 0;  // By all processes, and by what this one does not account: the context.
};
absl::StatusOr<CudaDevice> DescribeCudaDevice(int device);

// Allocates the head, fills its weight as spec.weight_init says (zeros when it says nothing) and
// its bias with zeros, and tries algorithms for its products, which takes a few seconds for a
// large head; what was chosen is logged. RESOURCE_EXHAUSTED when the device has no room for the
// plan, UNAVAILABLE as CudaAvailable. `account` must outlive the backend. ComputeBatch of the
// result waits while kCudaBatchesInFlight batches are under way. Rows in memory that is not pinned
// (server/memory/host_block.h) are correct, but make it wait for their copies.
//
// With several ranks, this is one of them: it has the rows of ShardRange() alone, and every rank
// gets the same batches in the same order. A collective in host memory is staged through pinned
// memory; a failure of the group fails its batches, but not the backend. A teacher's logits are
// held in the head's dtype, whatever the teacher's. REQUIRES: spec is validated; plan is spec's
// plan for BackendKind::kCuda and that many ranks.
absl::StatusOr<std::unique_ptr<ComputeBackend>> CreateCudaBackend(const HeadSpec& spec,
                                                                  const MemoryPlan& plan,
                                                                  MemoryAccount* account,
                                                                  int device,
                                                                  const RankContext& context = {});

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_CUDA_BACKEND_H_
