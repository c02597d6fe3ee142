// How long the collectives of a rank take, its waiting for the others included: for the metrics.

#ifndef LMHEAD_SERVER_COMPUTE_COLLECTIVE_TIMES_H_
#define LMHEAD_SERVER_COMPUTE_COLLECTIVE_TIMES_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace lmhead {

enum class CollectiveOp : uint8_t { kAllGather, kReduce, kAllReduce, kBroadcast };
inline constexpr size_t kNumCollectiveOps = 4;

// Totals by CollectiveOp. Thread-safe.
struct CollectiveTimes {
  static constexpr std::array<const char*, kNumCollectiveOps> kNames = {"all_gather", "reduce",
                                                                        "all_reduce", "broadcast"};
  std::array<std::atomic<int64_t>, kNumCollectiveOps> calls{};
  std::array<std::atomic<int64_t>, kNumCollectiveOps> nanoseconds{};

  void Add(CollectiveOp op, absl::Duration duration) {
    calls[static_cast<size_t>(op)] += 1;
    nanoseconds[static_cast<size_t>(op)] += absl::ToInt64Nanoseconds(duration);
  }
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_COLLECTIVE_TIMES_H_
