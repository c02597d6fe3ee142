// What count_allocations.so and the test that preloads it share.

#ifndef LMHEAD_TESTS_E2E_COUNT_ALLOCATIONS_H_
#define LMHEAD_TESTS_E2E_COUNT_ALLOCATIONS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lmhead::e2e {

inline constexpr size_t kLargeAllocationBytes = size_t{1} << 20;

// Names the file to count in.
inline constexpr char kAllocationCountsVariable[] = "LMHEAD_TEST_ALLOCATION_COUNTS";

// Lies at the start of the file, zero at first.
struct AllocationCounts {
  std::atomic<uint64_t> num_large;
  std::atomic<uint64_t> largest_bytes;
  std::atomic<uint32_t> attached;      // The library is in the process and counts.
  std::atomic<uint32_t> print_stacks;  // Set by the test: say on stderr where each comes from.
};

}  // namespace lmhead::e2e

#endif  // LMHEAD_TESTS_E2E_COUNT_ALLOCATIONS_H_
