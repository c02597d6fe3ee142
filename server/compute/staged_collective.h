// A collective in device memory over one in host memory.
//
// For ranks whose GPUs NCCL cannot join: several on one GPU, or hosts that only Gloo connects. Each
// call copies down, waits for the stream, asks the host's collective and copies up; so it
// waits until all ranks have come, on the rank's thread, where every rank makes the same calls in
// the same order. What was queued on other streams goes on meanwhile.

#ifndef LMHEAD_SERVER_COMPUTE_STAGED_COLLECTIVE_H_
#define LMHEAD_SERVER_COMPUTE_STAGED_COLLECTIVE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/compute/collective.h"

namespace lmhead {

// `host` is one of kHost and must outlive the result; `device` is the rank's. Longer arrays than
// `staging_bytes` (all ranks' of an AllGather together) go in pieces, except those of an AllGather,
// which must fit.
absl::StatusOr<std::unique_ptr<Collective>> StageOnHost(Collective* host, int64_t staging_bytes,
                                                        int device);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_STAGED_COLLECTIVE_H_
