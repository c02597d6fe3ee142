// Collectives in host memory, over Gloo's TCP transport: between threads, processes and hosts.
//
// Built from Gloo's sends and receives between two ranks, so that sums have one order (rank 0's
// first, then rank 1's, ...) whatever the number of elements, that a failure names the rank it came
// from, and that Abort() wakes whoever waits.

#ifndef LMHEAD_SERVER_COMPUTE_GLOO_COLLECTIVE_H_
#define LMHEAD_SERVER_COMPUTE_GLOO_COLLECTIVE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/compute/collective.h"

namespace lmhead {

struct GlooOptions {
  // Address or name of this machine that the other ranks can reach.
  std::string host = "127.0.0.1";
  // Longest wait for another rank in one call, and for it to connect.
  absl::Duration timeout = absl::Seconds(30);
  // What errors call the ranks, in their order; empty: by their numbers here, "rank 1".
  std::vector<std::string> names;
};

// One rank's end of a group, not connected yet. Holds size x 256 KiB of host memory for sums.
// UNAVAILABLE when `host` is not an address of this machine. Makes the process ignore SIGPIPE
// unless it handles it.
absl::StatusOr<std::unique_ptr<Collective>> CreateGlooCollective(int32_t rank, int32_t size,
                                                                 const GlooOptions& options);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_GLOO_COLLECTIVE_H_
