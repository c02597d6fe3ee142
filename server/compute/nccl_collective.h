// Collectives in device memory, over NCCL: one GPU a rank, in one process or several.
//
// NCCL is opened when it is first asked for, like cuBLASLt: the binary starts without it. It is
// initialised without blocking and polled, so that a rank that does not come is a DEADLINE_EXCEEDED
// and not a hang. Calls are queued on the caller's stream; a thread watches what is pending and
// ends the group when NCCL reports an error or a call takes longer than the timeout. A group that
// failed is aborted by a thread of its own, because the abort may hang as well: then it is left
// behind.
//
// Compiles without CUDA; the functions then say that there is none.

#ifndef LMHEAD_SERVER_COMPUTE_NCCL_COLLECTIVE_H_
#define LMHEAD_SERVER_COMPUTE_NCCL_COLLECTIVE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/compute/collective.h"
#include "server/compute/collective_times.h"

namespace lmhead {

struct NcclOptions {
  int device = 0;  // Of this rank; NCCL takes no device twice.
  absl::Duration timeout = absl::Seconds(30);
  // What errors call the ranks, in their order; empty: by their numbers here, "rank 1".
  std::vector<std::string> names;
  // Of the calls, as long as each takes on the device; may be null, outlives the collective.
  CollectiveTimes* times = nullptr;
};

// Whether the library is there and usable; if not, *why_not is one sentence for the user.
bool NcclAvailable(std::string* why_not);

// One rank's end of a group, not connected yet. UNAVAILABLE as NcclAvailable.
absl::StatusOr<std::unique_ptr<Collective>> CreateNcclCollective(int32_t rank, int32_t size,
                                                                 const NcclOptions& options);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_NCCL_COLLECTIVE_H_
