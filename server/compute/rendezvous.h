// The rendezvous store of one process: a map with waiting.

#ifndef LMHEAD_SERVER_COMPUTE_RENDEZVOUS_H_
#define LMHEAD_SERVER_COMPUTE_RENDEZVOUS_H_

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/compute/collective.h"

namespace lmhead {

class InProcessStore final : public RendezvousStore {
 public:
  InProcessStore() = default;

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override;

  // Every call from now on, and those that wait, return `reason`. The first one stays.
  void Close(const absl::Status& reason);

 private:
  absl::Mutex mu_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_RENDEZVOUS_H_
