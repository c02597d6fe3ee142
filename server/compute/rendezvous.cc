#include "server/compute/rendezvous.h"

#include "absl/strings/str_cat.h"

namespace lmhead {

absl::Status InProcessStore::Set(const std::string& key, const std::string& value) {
  absl::MutexLock lock(&mu_);
  if (!closed_.ok()) return closed_;
  if (!values_.emplace(key, value).second) {
    return absl::AlreadyExistsError(absl::StrCat("rendezvous key ", key, " was set already"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> InProcessStore::Get(const std::string& key, absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  const auto settled = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !closed_.ok() || values_.count(key) > 0;
  };
  if (!mu_.AwaitWithDeadline(absl::Condition(&settled), deadline)) {
    return absl::DeadlineExceededError(
        absl::StrCat("rendezvous key ", key, " was not set in time"));
  }
  if (!closed_.ok()) return closed_;
  return values_[key];
}

void InProcessStore::Close(const absl::Status& reason) {
  absl::MutexLock lock(&mu_);
  if (closed_.ok()) closed_ = reason;
}

}  // namespace lmhead
