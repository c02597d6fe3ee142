// How long the collectives of a rank take, its waiting for the others included: for the metrics.

#ifndef LMHEAD_SERVER_COMPUTE_TIMED_COLLECTIVE_H_
#define LMHEAD_SERVER_COMPUTE_TIMED_COLLECTIVE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "server/compute/collective.h"

namespace lmhead {

enum class CollectiveOp : uint8_t { kAllGather, kReduce, kAllReduce, kBroadcast };

// Totals by CollectiveOp. Thread-safe.
struct CollectiveTimes {
  static constexpr std::array<const char*, 4> kNames = {"all_gather", "reduce", "all_reduce",
                                                        "broadcast"};
  std::array<std::atomic<int64_t>, 4> calls{};
  std::array<std::atomic<int64_t>, 4> nanoseconds{};
};

// `inner`, whose calls are counted in `times`, which outlives it. A collective of device memory
// only queues its calls, so that their time would say nothing: it is returned as it is.
std::unique_ptr<Collective> TimeCollective(std::unique_ptr<Collective> inner,
                                           CollectiveTimes* times);

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_TIMED_COLLECTIVE_H_
