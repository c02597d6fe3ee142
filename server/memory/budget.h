// Admission by memory: heads reserve their plans within one limit before anything is allocated.
//
// The limit holds for each rank. Nothing is sampled: what is reserved is the sum of the plans of
// the heads that exist, and a plan is an upper bound of what its arena carves.

#ifndef LMHEAD_SERVER_MEMORY_BUDGET_H_
#define LMHEAD_SERVER_MEMORY_BUDGET_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// Thread-safe.
class MemoryBudget {
 public:
  explicit MemoryBudget(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Plans spec (PlanHead) within what is free and reserves that plan under spec.name, in one go:
  // two heads created at once cannot both take the last bytes. options.budget_bytes is ignored.
  // RESOURCE_EXHAUSTED with the plan's breakdown, the limit, what the other heads hold and what to
  // do about it; nothing is reserved then.
  // REQUIRES: spec is validated; no reservation under that name.
  absl::StatusOr<MemoryPlan> Reserve(const HeadSpec& spec, const PlanOptions& options);

  // Gives a reservation back.
  // REQUIRES: there is one under that name.
  void Release(std::string_view head);

  int64_t limit_bytes() const { return limit_bytes_; }
  int64_t reserved_bytes() const;
  int64_t available_bytes() const;  // Never below 0.

 private:
  // "limit 8.00 GiB; other heads hold 3.00 GiB: student 2.00 GiB, teacher 1.00 GiB".
  std::string Holders() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t limit_bytes_;
  mutable absl::Mutex mu_;
  std::map<std::string, int64_t, std::less<>> reservations_ ABSL_GUARDED_BY(mu_);
  int64_t reserved_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_MEMORY_BUDGET_H_
