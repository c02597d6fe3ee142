// The rendezvous store of one process: a map with waiting; and a part of any store.

#ifndef LMHEAD_SERVER_COMPUTE_RENDEZVOUS_H_
#define LMHEAD_SERVER_COMPUTE_RENDEZVOUS_H_

#include <map>
#include <string>
#include <utility>

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

// The keys of a store that start with a prefix, so that several groups may use one store.
class PrefixedStore final : public RendezvousStore {
 public:
  // `store` outlives it.
  PrefixedStore(RendezvousStore* store, std::string prefix)
      : store_(*store), prefix_(std::move(prefix)) {}

  absl::Status Set(const std::string& key, const std::string& value) override {
    return store_.Set(prefix_ + key, value);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override {
    return store_.Get(prefix_ + key, deadline);
  }

 private:
  RendezvousStore& store_;
  const std::string prefix_;
};

}  // namespace lmhead

#endif  // LMHEAD_SERVER_COMPUTE_RENDEZVOUS_H_
