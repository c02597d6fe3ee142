// The heads of a server, by name, and their admission: a head exists only when its memory plan fits
// what is left of the budget.
//
// Create and Delete block and run one at a time; Find and List never wait for them.

#ifndef LMHEAD_SERVER_HEAD_HEAD_REGISTRY_H_
#define LMHEAD_SERVER_HEAD_HEAD_REGISTRY_H_

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/head_spec.h"
#include "server/head/head.h"
#include "server/memory/budget.h"
#include "server/memory/memory_plan.h"

namespace lmhead {

// Thread-safe.
class HeadRegistry {
 public:
  // `budget` and what `environment` points to must outlive the registry.
  HeadRegistry(MemoryBudget* budget, const PlanOptions& plan_options, BackendFactory make_backend,
               const HeadEnvironment& environment);
  ~HeadRegistry();  // Closes all heads.
  HeadRegistry(const HeadRegistry&) = delete;
  HeadRegistry& operator=(const HeadRegistry&) = delete;

  // Plans, reserves, makes the backend. The same specification under the same name finds the head
  // that is there. ALREADY_EXISTS: the name is taken by another specification (the difference is
  // named). RESOURCE_EXHAUSTED: it does not fit; the message has the breakdown.
  // REQUIRES: spec is validated.
  absl::StatusOr<std::shared_ptr<Head>> Create(const HeadSpec& spec);

  // NOT_FOUND naming the heads there are.
  absl::StatusOr<std::shared_ptr<Head>> Find(const std::string& name) const;

  std::vector<std::shared_ptr<Head>> List() const;  // By name.

  // Takes the head out, waits for its queued work, frees its memory. FAILED_PRECONDITION while a
  // step is open, or streams of other heads have it as their teacher, unless forced: then the step
  // and those streams are aborted. An open step of a poisoned head needs no force.
  absl::Status Delete(const std::string& name, bool force);

  // The same, forced, of this head alone: a head that has taken its place meanwhile stays. OK when
  // it is out already.
  absl::Status Delete(const Head& head);

  // Free bytes of the budget, and what plans are made with.
  int64_t available_bytes() const { return budget_->available_bytes(); }
  const PlanOptions& plan_options() const { return plan_options_; }

 private:
  absl::Status TakeOut(const std::shared_ptr<Head>& head, bool force)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);

  MemoryBudget* const budget_;
  const PlanOptions plan_options_;
  const BackendFactory make_backend_;
  const HeadEnvironment environment_;

  absl::Mutex change_mu_ ABSL_ACQUIRED_BEFORE(mu_);  // Held over whole changes.
  mutable absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<Head>, std::less<>> heads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_HEAD_HEAD_REGISTRY_H_
